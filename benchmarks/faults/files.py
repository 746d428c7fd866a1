"""F4: a bit flips in a file, or the file is cut; read as reports and resumes do."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import (
    Bench,
    Fault,
    Outcome,
    Verdict,
    held,
    said,
    unless_equal,
)
from benchmarks.faults.damage import damage
from benchmarks.faults.made_files import (
    go_on_preparing,
    read_exported,
    read_kept_task,
    read_tokenizer,
    write_exported,
    write_kept_task,
    write_stopped,
    write_text,
)
from benchmarks.faults.runs import HOST, final_state, same_end, trained, unbroken

_ROOT = Path(__file__).parents[2]
_STUDY = _ROOT / "results" / "fed"
_SEARCH = _ROOT / "results" / "s3"
_SMALL = ("config.json", "environment.json", "summary.json", "metrics.jsonl")


def _read_after(
    make: Callable[[Path], Path],
    read: Callable[[Path], Any],
    name: str,
    files: str,
    rng: random.Random,
    bench: Bench,
) -> Outcome:
    """Damages one of some files of a folder, and reads it as a command would.

    Args:
      make: Makes the folder, once.
      read: Reads it: plain data.
      name: Of the folder.
      files: A pattern of the files.
      rng: Decides which, and how.
      bench: Where.
    """
    whole = bench.once(name, make)
    wanted = bench.once(f"{name}-{files.replace('/', '-')}-read", lambda _: read(whole))
    folder = bench.folder / whole.name
    shutil.copytree(whole, folder)
    found = [path for path in sorted(folder.rglob(files)) if path.is_file()]
    what = damage(rng.choice(found), rng)
    try:
        return unless_equal(_known(read(folder), wanted), wanted, Verdict.SILENT, what)
    except (ValueError, OSError) as error:
        outcome = said(error)
        return dataclasses.replace(outcome, note=f"{what}: {outcome.note}")


def _known(found: Any, wanted: Any) -> Any:
    """Leaves out a field that is new: the checksum, if its name was changed."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        more = len(found) - len(wanted)
        return {
            name: _known(value, wanted.get(name))
            for name, value in found.items()
            if name in wanted or more > 1
        }
    are_lists = isinstance(found, list) and isinstance(wanted, list)
    if are_lists and len(found) == len(wanted):
        return [_known(*pair) for pair in zip(found, wanted, strict=True)]
    return found


def _sealed_study(folder: Path) -> Path:
    """A published study, with the checksums that studies get today."""
    from echo_jax.config import default_config
    from echo_jax.files.folders import run_folder
    from echo_jax.files.json_files import json_line, read_json, read_line, write_json

    study = Path(shutil.copytree(_STUDY, folder / "study"))
    (study / "baseline" / "config.json").write_text(default_config().to_json())
    for path in study.rglob("*.json"):
        file = run_folder(path.parent) / path.name
        write_json(file, read_json(file) or {})
    for path in study.rglob("*.jsonl"):
        rows = [*map(read_line, path.read_bytes().splitlines())]
        path.write_text("".join(map(json_line, rows)))
        file = run_folder(path.parent) / "summary.json"
        write_json(file, {**(read_json(file) or {}), "rows": len(rows)})
    return study


def _read_study(folder: Path) -> Any:
    from echo_jax.studies.runs import read_study

    return dataclasses.asdict(read_study(folder))


def _read_rows(folder: Path) -> Any:
    """What a run that goes on takes from the rows before it, and what it says."""
    from echo_jax.files.folders import run_folder
    from echo_jax.files.json_files import DamagedFileError, read_json
    from echo_jax.training.records.runfiles import MetricsFile

    file = run_folder(folder / "baseline") / "metrics.jsonl"
    about = read_json(run_folder(folder / "baseline") / "summary.json") or {}
    read = MetricsFile(
        file, resumed_from=10**9, num_rows=about.get("rows", 0), writes=False
    )
    if read.damaged or read.num_missing:
        raise DamagedFileError(file, f"{read.damaged}, {read.num_missing} missing")
    return read.rows


def _decisions(folder: Path) -> Path:
    from echo_jax.echo.decision_log import DecisionLog

    rng = random.Random(0)
    folder = folder / "run"
    folder.mkdir()
    log = DecisionLog(rng.random() < 0.4 for _ in range(2000))
    (folder / "tape.json").write_text(log.to_text())
    return folder


def _read_decisions(folder: Path) -> Any:
    from echo_jax.echo.decision_log import DecisionLog

    return list(DecisionLog.from_text((folder / "tape.json").read_bytes()))


def _prepared(folder: Path) -> Path:
    from echo_jax.data.prepare import Settings, prepare_images

    source = write_images(folder / "source")
    out = folder / "prepared"
    prepare_images([str(source)], Settings(out=out, holdout=0.2, shard_mb=0.01))
    return out


def write_images(folder: Path, count: int = 30) -> Path:
    """Writes class folders of small JPEGs, and returns the folder."""
    import cv2
    import numpy as np

    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 256, (12, 10, 3), np.uint8)
        path = folder / ("ant", "cat")[number % 2] / f"{number:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(cv2.imencode(".jpg", pixels)[1].tobytes())
    return folder


def _read_prepared(folder: Path) -> Any:
    """All that training takes from a prepared folder."""
    from echo_jax.data.sources.prepared import open_prepared, read_info

    info = read_info(folder)
    splits = {split: open_prepared(folder, split) for split in info["splits"]}
    return {
        "info": info,
        "records": {
            split: [records[index] for index in range(len(records))]
            for split, records in splits.items()
        },
    }


def _verified(folder: Path) -> Any:
    from echo_jax.data.sources.prepared import verify

    verify(folder)
    return {path.name: path.read_bytes() for path in folder.glob("*.arrayrecord")}


@dataclasses.dataclass
class _Saved:
    """Two checkpoints, and what they hold."""

    folder: Path
    states: dict[int, Any]
    abstract_state: Any


def _save(folder: Path) -> _Saved:
    import jax
    import jax.numpy as jnp

    from echo_jax.files.folders import run_folder
    from echo_jax.training.saving.checkpoint import Checkpoints

    first = {
        "params": {
            "a": jax.random.normal(jax.random.key(0), (40, 30)),
            "b": jnp.ones(7),
        },
        "opt_state": (jnp.zeros((40, 30)), jnp.int32(3)),
        "key": jax.random.key_data(jax.random.key(1)),
    }
    states = {1: first, 2: jax.tree.map(lambda x: x + x.dtype.type(1), first)}
    folder = folder / "checkpoints"
    checkpoints = Checkpoints(run_folder(folder), keep=2)
    for update, state in states.items():
        checkpoints.save(update, state, {"update": update})
    checkpoints.close()
    return _Saved(folder, states, jax.eval_shape(lambda: first))


def _published_search(folder: Path) -> Path:
    return Path(shutil.copytree(_SEARCH, folder / "search"))


def _read_search(folder: Path) -> Any:
    from echo_jax.searches.comparison import read_search

    return dataclasses.asdict(read_search(folder))


def checkpoint_trial(rng: random.Random, bench: Bench) -> Outcome:
    """Damages the newest checkpoint: it is passed over, or read as it was saved."""
    from echo_jax.files.folders import run_folder
    from echo_jax.training.saving.checkpoint import Checkpoints, params_sha256

    saved = bench.once("checkpoints", _save)
    folder = Path(shutil.copytree(saved.folder, bench.folder / "checkpoints"))
    files = [path for path in sorted((folder / "2").rglob("*")) if path.is_file()]
    files.append(folder / "2.sums.json")
    what = damage(rng.choice(files), rng)
    found = Checkpoints(run_folder(folder), keep=2)
    try:
        restored = found.restore_newest(saved.abstract_state)
    finally:
        found.close()
    if restored is None:
        return Outcome(Verdict.SILENT, f"{what}: no checkpoint was seen")
    wanted = saved.states[restored.update]
    same = params_sha256(restored.state) == params_sha256(wanted)
    if not same or restored.host != {"update": restored.update}:
        return Outcome(Verdict.SILENT, what)
    if restored.update == 1 and not restored.damaged:
        return Outcome(Verdict.SILENT, f"{what}: passed over without a word")
    return held(f"{what}: {restored.damaged or 'the same result'}")


def run_trial(rng: random.Random, bench: Bench) -> Outcome:
    """Damages any file of a run that was broken off, and goes on with the command."""
    whole = unbroken(bench, HOST).folder
    broken = bench.once("broken", lambda folder: _broken(bench, folder / "run"))
    folder = Path(shutil.copytree(broken, bench.folder / "run"))
    names = [*_SMALL[:2], _SMALL[3]]
    checkpoint = f"checkpoints/{HOST.updates - HOST.every}"
    files = [folder / rng.choice(names)]
    if rng.random() < 0.5:
        found = (folder / checkpoint).rglob("*")
        files = [path for path in sorted(found) if path.is_file()]
    what = damage(rng.choice(files), rng)
    ended = trained(bench, HOST, folder)
    if unsaid := ended.unsaid():
        return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
    if ended.status:
        return held(f"{what}: {ended.line}")
    # Rows that were lost are said, and the run goes on to the same state.
    if final_state(folder) != final_state(whole):
        return Outcome(Verdict.SILENT, f"{what}: another end")
    words = ("damaged", "are gone")
    if same_end(folder, whole) or any(word in ended.output for word in words):
        return held(f"{what}: the same end")
    return Outcome(Verdict.SILENT, f"{what}: other rows, and not a word")


def _broken(bench: Bench, folder: Path) -> Path:
    """A run that was ended before its last checkpoint."""
    shorter = dataclasses.replace(HOST, updates=HOST.updates - HOST.every)
    ended = trained(bench, shorter, folder)
    if ended.status:
        raise RuntimeError(ended.output)
    (folder / "summary.json").unlink()
    return folder


_study = partial(_read_after, _sealed_study, _read_study, "study")
_images = partial(_read_after, _prepared)
F4 = Fault(
    name="F4",
    title="A flipped bit, or a cut, in one file",
    holds="said, or passed over for the checkpoint before, or of no consequence",
    trials={
        "checkpoint": checkpoint_trial,
        "config.json": partial(_study, "config.json"),
        "environment.json": partial(_study, "environment.json"),
        "summary.json": partial(_study, "summary.json"),
        "metrics.jsonl": partial(_study, "metrics.jsonl"),
        "study.json": partial(_study, "study.json"),
        "trials of a search": partial(
            _read_after, _published_search, _read_search, "search", "*.json"
        ),
        "rows of a resumed run": partial(
            _read_after, _sealed_study, _read_rows, "study", "baseline/metrics.jsonl"
        ),
        "decision log": partial(
            _read_after, _decisions, _read_decisions, "decisions", "tape.json"
        ),
        "dataset.json": partial(_images, _read_prepared, "images", "dataset.json"),
        "records": partial(_images, _read_prepared, "images", "*.arrayrecord"),
        "prepare verify": partial(_images, _verified, "images", "*"),
        "tokenizer.model": partial(
            _read_after, write_text, read_tokenizer, "prepared text", "tokenizer.model"
        ),
        "stopped prepare": partial(
            _read_after, write_stopped, go_on_preparing, "stopped", ".prepare/*"
        ),
        "task.json": partial(_read_after, write_kept_task, read_kept_task, "task", "*"),
        "exported weights": partial(
            _read_after, write_exported, read_exported, "exported", "*"
        ),
        "resumed run": run_trial,
    },
    limit_s=120.0,
)
