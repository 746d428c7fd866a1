"""Tiny runs of ``echo-jax train``, and whether two of them ended alike."""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Bench, CannotBeginError, Outcome, Verdict
from benchmarks.faults.processes import Ended, command

_CONFIG = Path(__file__).parents[2] / "configs" / "lm.py"
_TEXT = Path(__file__).parents[2] / "LICENSE"
_TINY = {
    "batch_size": 4,
    "data.eval_examples": 4,
    "log_every": 2,
    "mesh.data": 1,
    "model.d_ff": 16,
    "model.d_model": 8,
    "model.num_heads": 2,
    "model.num_layers": 1,
    "model.seq_len": 8,
    "optim.schedule": "constant",
    "optim.warmup_updates": 0,
}


@dataclass(frozen=True)
class Recipe:
    """A run that takes a second.

    Attributes:
      name: Of the kind of run.
      echo: Fields of its config, beside those of all.
      updates: How many.
      every: Updates between checkpoints, and between evaluations.
    """

    name: str
    echo: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 12
    every: int = 4

    def fields(self, source: Path) -> dict[str, Any]:
        """The fields of its config."""
        every = {"eval_every": self.every, "checkpoint_every": self.every}
        source_and_end = {"data.source": str(source), "updates": self.updates}
        return {**_TINY, **source_and_end, **every, **self.echo}

    def argv(self, source: Path, workdir: Path, **more: Any) -> list[str]:
        """What ``echo-jax`` is given; ``__`` in a name stands for a dot."""
        others = {name.replace("__", "."): value for name, value in more.items()}
        fields = {**self.fields(source), **others}
        flags = [f"--config.{name}={value}" for name, value in fields.items()]
        config = ["--config", f"{_CONFIG}:tiny", "--workdir", str(workdir)]
        return ["train", *config, *flags]


_SPREAD = {
    "echo.factor": 2.5,
    "echo.order": "spread",
    "echo.buffer": 16,
    "echo.after": "decode",
}
HOST = Recipe("host", {**_SPREAD, "echo.order": "window_shuffle"})
GRAIN = Recipe("Grain", {**_SPREAD, "data.workers": 1})
WORKERS = Recipe("workers", {**HOST.echo, "data.workers": 2})
DEVICE = Recipe("device", {**_SPREAD, "echo.where": "device"})
ADAPTIVE = Recipe(
    "adaptive",
    {
        "echo.mode": "adaptive",
        "echo.where": "device",
        "echo.after": "decode",
        "echo.buffer": 16,
        "data.storage.latency_s": 0.01,
    },
)
STOCHASTIC = Recipe(
    "stochastic",
    {
        "echo.mode": "stochastic",
        "echo.where": "device",
        "echo.after": "decode",
        "echo.buffer": 16,
        "echo.fetch.start": 0.5,
        "echo.fetch.end": 0.5,
    },
)
GROWING = Recipe(
    "growing, float16",
    {
        **_SPREAD,
        "echo.where": "device",
        "batch.boundaries": (4,),
        "batch.factors": (2,),
        "precision.compute": "float16",
        "precision.loss_scale": "dynamic",
        "precision.init": 2.0**20,
        "precision.growth": 3,
    },
)


def study_argv(source: Path, workdir: Path) -> list[str]:
    """What ``echo-jax`` is given for a study of two tiny runs."""
    file = source.with_name("study.py")
    fields = {**HOST.fields(source), "echo.factor": 1.0}
    arms = {"baseline": {}, "spread": {"echo": {"factor": 2.0, "order": "spread"}}}
    file.write_text(
        "from ml_collections import ConfigDict\n"
        "from echo_jax.config import load_config\n\n\n"
        "def get_config():\n"
        f"    base = load_config({f'{_CONFIG}:tiny'!r}, {fields!r})\n"
        "    study = {'name': 'a study', 'base': base, 'storage_ratio': 0.0}\n"
        f"    return ConfigDict({{**study, 'arms': {arms!r}}})\n"
    )
    return ["study", "--config", str(file), "--workdir", str(workdir)]


def source_of(bench: Bench) -> Path:
    """Returns the text that runs are trained on."""
    return bench.once(
        "text", lambda folder: Path(shutil.copy(_TEXT, folder / "text.txt"))
    )


def trained(
    bench: Bench,
    recipe: Recipe,
    workdir: Path,
    *,
    more: Mapping[str, Any] | None = None,
    **options: Any,
) -> Ended:
    """Runs ``echo-jax train``, once, to its end.

    Args:
      bench: Has the data.
      recipe: Of the run.
      workdir: Its folder; what it prints goes beside it.
      more: Other fields of the config.
      **options: See `processes.command`.
    """
    log = workdir.with_name(f"{workdir.name}.log")
    return command(
        recipe.argv(source_of(bench), workdir, **(more or {})), log, **options
    )


@dataclass(frozen=True)
class Whole:
    """What a command makes that nobody has stopped.

    Attributes:
      folder: It.
      writes: How many times it opened, moved or removed files.
      seconds: How long it took.
    """

    folder: Path
    writes: int
    seconds: float


def made_by(
    argv_of: Callable[[Path], list[str]], folder: Path, **options: Any
) -> Whole:
    """Runs a command that is to be stopped later, twice: the first time it compiles.

    Args:
      argv_of: Its arguments, for the folder that it makes.
      folder: For both.
      **options: See `processes.command`.

    Raises:
      CannotBeginError: It fails.
    """
    for name in ("compiled", "whole"):
        begin = time.monotonic()
        ended = command(argv_of(folder / name), folder / f"{name}.log", **options)
        if ended.status:
            raise CannotBeginError(ended.output)
    return Whole(folder / "whole", ended.writes, time.monotonic() - begin)


def unbroken(bench: Bench, recipe: Recipe) -> Whole:
    """Returns a run that nobody has stopped, made once."""
    argv_of = partial(recipe.argv, source_of(bench))
    return bench.once(f"unbroken-{recipe.name}", partial(made_by, argv_of))


def failed(ended: Ended, what: str, status: int = 0) -> Outcome | None:
    """Returns how a command failed that should not have; None if it did not.

    Args:
      ended: It.
      what: Was done to it.
      status: That it should end with.
    """
    if unsaid := ended.unsaid():
        return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
    if ended.status != status:
        return Outcome(Verdict.WRONG, f"{what}: exit {ended.status}: {ended.line}")
    return None


def rows_of(workdir: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run, without what depends on time."""
    from echo_jax.files.json_files import read_line

    timed = ("_s", "_per_s", "idle_fraction", "longest_wait_at")
    lines = (workdir / "metrics.jsonl").read_bytes().splitlines()
    return [
        {name: value for name, value in row.items() if not name.endswith(timed)}
        for row in map(read_line, lines)
        if row["kind"] != "restored"
    ]


def summary_of(workdir: Path) -> dict[str, Any]:
    """Returns what a finished run says of itself."""
    from echo_jax.files.json_files import unseal

    return unseal(json.loads((workdir / "summary.json").read_text()))


def final_state(workdir: Path) -> dict[str, Any]:
    """Returns checksums of parameters and optimizer, and where the stream stands."""
    saved = workdir / "checkpoints" / str(last_saved(workdir)) / "host" / "metadata"
    content = json.loads(saved.read_text())
    # Of all processes: the first of those that resume has what was counted before.
    totals = content["host"]["totals"]
    counts = {
        "updates": totals[0]["updates"],
        **{name: sum(each[name] for each in totals) for name in ("fresh", "repeats")},
    }
    return {
        "params_sha256": summary_of(workdir)["params_sha256"],
        "arrays": content["sums"],
        "stream": content["host"]["data"],
        "counts": counts,
    }


def same_end(workdir: Path, other: Path) -> bool:
    """Whether two runs have the same state to the bit, and the same rows."""
    return final_state(workdir) == final_state(other) and rows_of(workdir) == rows_of(
        other
    )


def last_saved(workdir: Path) -> int | None:
    """Returns the update of the newest checkpoint; None without one."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=None)
