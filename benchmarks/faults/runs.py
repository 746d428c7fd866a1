"""Tiny commands that trials break, and whether two of them ended alike."""

import contextlib
import dataclasses
import json
import logging
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Bench, CannotBeginError
from benchmarks.faults.commands import Command, Ended

_CONFIG = Path(__file__).parents[2] / "configs" / "lm.py"
TEXT = Path(__file__).parents[2] / "constraints.txt"
# Rows of metrics differ in these: they depend on time, or are checksums of such rows.
_TIMED = ("_s", "_per_s", "idle_fraction", "longest_wait_at", "crc32")
_TINY = {
    "batch_size": 4,
    "checkpoint_every": 4,
    "data.eval_examples": 4,
    "data.source": str(TEXT),
    "echo.stage": "decode",
    "echo.buffer": 16,
    "eval_every": 4,
    "log_every": 2,
    "mesh.data": 1,
    "model.d_ff": 16,
    "model.d_model": 8,
    "model.num_heads": 2,
    "model.num_layers": 1,
    "model.seq_len": 8,
    "optim.schedule": "constant",
    "optim.warmup_updates": 0,
    "updates": 12,
}


@dataclass(frozen=True)
class Run:
    """A training that takes a second, with these config fields."""

    name: str
    fields: Mapping[str, Any]
    processes: int = 1

    def argvs(self, bench: Bench, folder: Path) -> list[list[str]]:
        fields = {**_TINY, **self.fields}
        argv = ["train", "--config", f"{_CONFIG}:tiny", "--workdir", str(folder)]
        argv += [f"--config.{name}={value}" for name, value in fields.items()]
        if self.processes == 1:
            return [argv]
        together = [
            "--config.mesh.data=-1",
            f"--config.distributed.coordinator=localhost:{_free_port()}",
            f"--config.distributed.num_processes={self.processes}",
        ]
        numbers = range(self.processes)
        own = [f"--config.distributed.process_id={number}" for number in numbers]
        return [[*argv, *together, each] for each in own]

    def changed(self, name: str = "", **fields: Any) -> "Run":
        """Returns a run with other fields; ``__`` in a name stands for a dot."""
        more = {name.replace("__", "."): value for name, value in fields.items()}
        fields = {**self.fields, **more}
        return dataclasses.replace(self, name=name or self.name, fields=fields)

    def replay(self, folder: Path) -> "Run":
        """Returns a run that decides as another one did whose decisions need time."""
        is_adaptive = self.fields.get("echo.mode") == "adaptive"
        return (
            self.changed(echo__replay=folder / "decisions.json")
            if is_adaptive
            else self
        )

    def same_end(self, folder: Path, other: Path) -> bool:
        same_rows = _rows_of(folder) == _rows_of(other)
        return same_rows and final_state(folder) == final_state(other)


class Study:
    """A study of two runs."""

    name = "study"

    def argvs(self, bench: Bench, folder: Path) -> list[list[str]]:
        fields = {**_TINY, **HOST.fields, "echo.factor": 1.0}
        arms = {"baseline": {}, "spread": {"echo": {"factor": 2.0, "order": "spread"}}}
        file = folder.with_name(f"{folder.name}.py")
        file.write_text(
            "from ml_collections import ConfigDict\n"
            "from echo_jax.config import load_config\n\n\n"
            "def get_config():\n"
            f"    base = load_config({f'{_CONFIG}:tiny'!r}, {fields!r})\n"
            "    study = {'name': 'a study', 'base': base, 'storage_ratio': 0.0}\n"
            f"    return ConfigDict({{**study, 'arms': {arms!r}}})\n"
        )
        return [["study", "--config", str(file), "--workdir", str(folder)]]

    def same_end(self, folder: Path, other: Path) -> bool:
        arms = ("baseline", "spread")
        ends = [HOST.same_end(folder / arm, other / arm) for arm in arms]
        return all(ends) and (folder / "table.md").exists()


@dataclass(frozen=True)
class Prepare:
    """A preparation of files in a folder; `words` name kind, file and options."""

    name: str
    make_sources: Callable[[Bench], Path]
    words: str

    def argvs(self, bench: Bench, folder: Path) -> list[list[str]]:
        kind, names, *options = self.words.split()
        files = [str(self.make_sources(bench) / name) for name in names.split(":")]
        return [["prepare", kind, ":".join(files), *options, "--out", str(folder)]]

    def same_end(self, folder: Path, other: Path) -> bool:
        return _contents_of(folder) == _contents_of(other)


_SPREAD = {"echo.factor": 2.5, "echo.order": "spread"}
HOST = Run("host", {"echo.factor": 2.5, "echo.order": "window_shuffle"})
GRAIN = Run("Grain", {**_SPREAD, "data.workers": 1})
DEVICE = Run("device", {**_SPREAD, "echo.buffer_on": "device"})
_ADAPTIVE = {"echo.mode": "adaptive", "echo.buffer_on": "device"}
ADAPTIVE = Run("adaptive", {**_ADAPTIVE, "data.storage.latency_s": 0.01})
PREPARE = Prepare(
    "prepare",
    lambda bench: bench.once("images", lambda folder: write_images(folder, 60)),
    "images . --holdout 0.2 --shard-mb 0.002",
)
PAIR = dataclasses.replace(HOST, name="two processes", processes=2)


def write_images(folder: Path, count: int = 6) -> Path:
    """Writes class folders of small JPEGs, and returns the folder."""
    import cv2
    import numpy as np

    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), np.uint8)
        path = folder / ("ant", "cat")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".jpg", pixels)[1].tobytes())
    return folder


Work = Run | Study | Prepare


def done(work: Work, bench: Bench, folder: Path, **options: int) -> Ended:
    """Runs a command to its end; see `commands.Command`."""
    log = bench.folder / f"{folder.name}.log"
    with Command(work.argvs(bench, folder), log, **options) as command:
        return command.wait()


@dataclass(frozen=True)
class Whole:
    """The end of a command that nobody has stopped; `seconds` have a reserve."""

    folder: Path
    num_writes: int
    seconds: float


def unbroken(bench: Bench, work: Work) -> Whole:
    """Returns the end of a command that nobody has stopped, made once."""

    def make(folder: Path) -> Whole:
        for name in ("compiled", "whole"):  # The first one compiles.
            begin = time.monotonic()
            ended = done(work, bench, folder / name)
            seconds = time.monotonic() - begin
            if ended.status:
                raise CannotBeginError(ended.output)
        return Whole(folder / "whole", ended.num_writes, 1.2 * seconds)

    return bench.once(f"unbroken-{work.name}", make)


def final_state(folder: Path) -> dict[str, Any]:
    """Returns all arrays of a run's newest checkpoint, and its counts."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    saved = (folder / "checkpoints" / str(last_saved(folder)) / "state").absolute()
    reader = ocp.PyTreeCheckpointer()
    # As NumPy arrays, because a run of two processes had other devices.
    about: Any = reader.metadata(saved)
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    kinds = jax.tree.map(lambda _: as_numpy, about.item_metadata.tree)
    arrays = jax.tree.leaves_with_path(reader.restore(saved, restore_args=kinds))
    summary = json.loads((folder / "summary.json").read_text())
    return {
        **{name: summary[name] for name in ("updates", "fresh", "repeats")},
        **{jax.tree_util.keystr(path): array.tobytes() for path, array in arrays},
    }


def last_saved(folder: Path) -> int | None:
    """Returns the update of a run's newest checkpoint; None without one."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    saved = (folder / "checkpoints").glob("*")
    return max((int(path.name) for path in saved if path.name.isdigit()), default=None)


def _rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {name: value for name, value in row.items() if not name.endswith(_TIMED)}
        for row in rows
        if row["kind"] != "restored"
    ]


def _contents_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def _free_port() -> int:
    # Free until it is bound, seconds later: connections are given higher ones.
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("localhost", port)):
            return port
