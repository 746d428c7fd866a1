"""Files that commands make for one another: how each is made, and how it is read."""

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

# Where the source lies is a part of what a stopped command remembers.
_TEXT = Path(__file__).parents[2] / "LICENSE"


def _prepare(out: Path) -> None:
    from echo_jax.data.prepare import Settings, TextSettings, prepare_text

    settings = Settings(out=out, shard_mb=0.002, holdout=0.2, workers=1)
    text = TextSettings(vocab=400, block=16, document="line")
    prepare_text([str(_TEXT)], settings, text)


def write_text(folder: Path) -> Path:
    """Makes a prepared folder of text, with subwords."""
    _prepare(folder / "prepared")
    return folder / "prepared"


def read_tokenizer(folder: Path) -> Any:
    """Reads the subwords of a prepared folder as a training does."""
    from echo_jax.data.sources.prepared import open_prepared

    return open_prepared(folder, "train").read_file("tokenizer.model")


def write_stopped(folder: Path) -> Path:
    """Makes a prepared folder that was stopped when all shards were written."""
    from echo_jax.data.prepare.workspace import Workspace

    stop = mock.patch.object(Workspace, "publish", side_effect=KeyboardInterrupt)
    with stop, contextlib.suppress(KeyboardInterrupt):
        _prepare(folder / "stopped")
    return folder / "stopped"


def go_on_preparing(folder: Path) -> Any:
    """Repeats the command on a copy of what was stopped; returns all files."""
    from echo_jax.data.sources.prepared import read_info

    out = folder.with_name("gone-on")
    shutil.copytree(folder, out)
    _prepare(out)
    read_info(out)
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def write_kept_task(folder: Path) -> Path:
    """Makes what a run folder keeps of its task."""
    from echo_jax.files.folders import run_folder
    from echo_jax.training.saving.model import write_task

    task = SimpleNamespace(
        task_info={"classes": ["ant", "cat"], "eod": 2, "scale": 0.5},
        task_files={"tokenizer.model": _TEXT.read_bytes()},
    )
    (folder / "run").mkdir()
    write_task(run_folder(folder / "run"), cast(Any, task))
    return folder / "run"


def read_kept_task(folder: Path) -> Any:
    """Reads what a run folder keeps of its task."""
    from echo_jax.files.folders import run_folder
    from echo_jax.training.saving.model import read_task

    return read_task(run_folder(folder))._asdict()


def write_exported(folder: Path) -> Path:
    """Makes weights as ``echo-jax export`` does."""
    import numpy as np

    from echo_jax.training.saving.weights import write_weights

    rng = np.random.default_rng(0)
    arrays = {"a": rng.random((20, 30), np.float32), "b": rng.integers(0, 9, 40)}
    (folder / "exported").mkdir()
    file = folder / "exported" / "model.safetensors"
    write_weights(file, {"params": arrays}, {"update": 3})
    return folder / "exported"


def read_exported(folder: Path) -> Any:
    """Reads weights as ``config.init_from`` does."""
    from echo_jax.training.saving.weights import read_weights

    found = read_weights(folder / "model.safetensors")
    return {
        name: (str(array.dtype), array.shape, array.tobytes())
        for name, array in found.items()
    }
