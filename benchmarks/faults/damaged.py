"""F4: a bit of a file flips, or the file is cut; the next command reads it."""

import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.faults import runs
from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held_if

_SHORTER = runs.HOST.changed(name="shorter", updates=8)
_WORDS = f"text {runs.TEXT.name} --tokenizer bytes --block 8 --holdout 0.2"
PREPARED = runs.Prepare("prepared", lambda bench: runs.TEXT.parent, _WORDS)


def damage(files: list[Path], rng: random.Random) -> str:
    """Flips a bit of one of some files, or cuts it; returns what was done."""
    file = rng.choice(sorted(path for path in files if path.is_file()))
    data = bytearray(file.read_bytes() or b"\0")
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    if rng.random() < 0.25:
        file.write_bytes(data[:at])
        return f"{file.name}: cut to {at} of {len(data)} bytes"
    data[at] ^= 1 << bit
    file.write_bytes(data)
    return f"{file.name}: bit {bit} of byte {at} of {len(data)} flipped"


def checkpoint(rng: random.Random, bench: Bench) -> Outcome:
    """Damages the newest checkpoint: the run goes on from it or the one before."""
    whole, folder = runs.unbroken(bench, runs.HOST).folder, bench.folder / "run"
    shutil.copytree(runs.unbroken(bench, _SHORTER).folder, folder)
    saved = folder / "checkpoints"
    what = damage([*saved.glob("8.*"), *(saved / "8").rglob("*")], rng)
    ended = runs.done(runs.HOST, bench, folder)
    if outcome := ended.failed(what):
        return outcome
    same_end = runs.final_state(folder) == runs.final_state(whole)
    said = ("it is set aside", "resumes after update 8")
    is_said = any(words in ended.output for words in said)
    return held_if(same_end and is_said, f"{what}: {ended.output}", Verdict.SILENT)


def read(
    source: runs.Work,
    pattern: str,
    reading: Callable[[Path], runs.Work],
    rng: random.Random,
    bench: Bench,
) -> Outcome:
    """Damages a file that a command made: another refuses it, or ends as before."""
    whole = runs.unbroken(bench, source).folder
    copy, out = bench.folder / "copy", bench.folder / "out"
    shutil.copytree(whole, copy)
    what = damage([*copy.glob(pattern)], rng)
    work = reading(copy)
    ended = runs.done(work, bench, out)
    if ended.status:
        return ended.failed(what, status=None) or held_if(True, what)
    same_end = work.same_end(out, runs.unbroken(bench, reading(whole)).folder)
    return held_if(same_end, what, Verdict.SILENT)


def _replay(folder: Path) -> runs.Run:
    return runs.ADAPTIVE.replay(folder).changed(name="replay")


def _train_on(folder: Path) -> runs.Run:
    return runs.HOST.changed(name="training", data__source=folder)


F4 = Fault(
    name="F4",
    title="a flipped bit, or a cut, in one file",
    trials={
        "checkpoint": checkpoint,
        "decision log": partial(read, runs.ADAPTIVE, "decisions.json", _replay),
        "prepared shard": partial(read, PREPARED, "*.arrayrecord", _train_on),
    },
)
