"""F1 to F3: runs that are killed, stopped, or find the disk full, and go on."""

import dataclasses
import os
import random
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held
from benchmarks.faults.disks import resize, small_disk
from benchmarks.faults.files import write_images
from benchmarks.faults.pairs import Pair, made_by_pair
from benchmarks.faults.processes import Ended, command, killed, started, wait
from benchmarks.faults.runs import (
    ADAPTIVE,
    DEVICE,
    GRAIN,
    GROWING,
    HOST,
    STOCHASTIC,
    WORKERS,
    Recipe,
    Whole,
    failed,
    final_state,
    last_saved,
    made_by,
    same_end,
    source_of,
    study_argv,
    trained,
    unbroken,
)

__all__ = ["F1", "F2", "F3"]

_LIMIT_S = 300.0
_GRACE_S = 60.0
_MAX_KILLS = 3
_MAX_SMALL_WRITES = 20
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 26  # more than a run needs
_RESERVE = 1.2  # of an unbroken run's time, within which a moment is drawn


def _kill_once(argv: list[str], log: Path, whole: Whole, rng: random.Random) -> str:
    """Starts a command and kills it at a moment; says at which.

    It is that of a write, counted, so that nothing between two of them is left out,
    or any other. A command may have ended before.
    """
    if rng.random() < 0.5:
        at = rng.randint(1, max(1, whole.writes))
        command(argv, log, _LIMIT_S, die_at=at)
        return f"before write {at}"
    moment = rng.uniform(0.0, _RESERVE * whole.seconds)
    process = started(argv, log)
    try:
        process.join(moment)
    finally:
        killed(process)
    return f"after {moment:.2f} s"


def _resumed(
    argv: list[str], folder: Path, whole: Whole, rng: random.Random
) -> tuple[Ended, str]:
    """Kills a command a few times, and lets it end; says when it was killed."""
    log = folder.with_name(f"{folder.name}.log")
    kills = [
        _kill_once(argv, log, whole, rng) for _ in range(rng.randint(1, _MAX_KILLS))
    ]
    return command(argv, log, _LIMIT_S), f"killed {', '.join(kills)}"


def kill_run(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Kills a run, and compares its end with that of one nobody has killed."""
    whole = unbroken(bench, recipe)
    folder, other = bench.folder / "run", whole.folder
    argv = recipe.argv(source_of(bench), folder)
    ended, what = _resumed(argv, folder, whole, rng)
    if outcome := failed(ended, what):
        return outcome
    if replay := _replay(recipe, folder):
        other = bench.folder / "replayed"
        ended = trained(bench, recipe, other, more=replay)
        if outcome := failed(ended, f"{what}, replayed"):
            return outcome
    if not same_end(folder, other):
        return Outcome(Verdict.WRONG, f"{what}: another end than unbroken")
    return held(what)


def _replay(recipe: Recipe, folder: Path) -> dict[str, str]:
    """What an unbroken run needs to decide as one did whose decisions depend on time.

    Args:
      recipe: Of both.
      folder: Of the one that has ended.
    """
    is_adaptive = recipe.echo.get("echo.mode") == "adaptive"
    return {"echo__replay": str(folder / "tape.json")} if is_adaptive else {}


def kill_pair(rng: random.Random, bench: Bench) -> Outcome:
    """Kills one of two processes, and soon the other, as a launcher does."""
    whole = bench.once("pair", partial(made_by_pair, bench, HOST))
    folder, kills = bench.folder / "run", []
    for _ in range(rng.randint(1, 2)):
        moment = rng.uniform(0.0, _RESERVE * whole.seconds)
        first, after_s = rng.randrange(2), rng.uniform(0.0, 2.0)
        with Pair(bench, HOST, folder) as pair:
            pair.processes[first].join(moment)
            killed(pair.processes[first])
            pair.processes[1 - first].join(after_s)
        kills.append(f"{first} after {moment:.2f} s")
    what = f"killed process {', '.join(kills)}"
    with Pair(bench, HOST, folder) as pair:
        for ended in pair.wait(_LIMIT_S):
            if outcome := failed(ended, what):
                return outcome
    if not same_end(folder, whole.folder):
        return Outcome(Verdict.WRONG, f"{what}: another end than unbroken")
    return held(what)


def kill_prepare(rng: random.Random, bench: Bench) -> Outcome:
    """Kills a preparation: goes on to the same files, byte for byte."""
    source = bench.once("images", lambda folder: write_images(folder / "photos", 60))

    def argv_of(out: Path) -> list[str]:
        options = ["--holdout", "0.2", "--shard-mb", "0.002", "--out", str(out)]
        return ["prepare", "images", str(source), *options]

    whole = bench.once("prepared", partial(made_by, argv_of))
    folder = bench.folder / "out"
    ended, what = _resumed(argv_of(folder), folder, whole, rng)
    if outcome := failed(ended, what):
        return outcome
    if _contents(folder) != _contents(whole.folder):
        return Outcome(Verdict.WRONG, f"{what}: other files than unbroken")
    return held(what)


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def kill_study(rng: random.Random, bench: Bench) -> Outcome:
    """Kills a study of two arms: each ends as it does in an unbroken one."""
    argv_of = partial(study_argv, source_of(bench))
    whole = bench.once("study", partial(made_by, argv_of))
    folder = bench.folder / "study"
    ended, what = _resumed(argv_of(folder), folder, whole, rng)
    if outcome := failed(ended, what):
        return outcome
    for arm in ("baseline", "spread"):
        if not same_end(folder / arm, whole.folder / arm):
            return Outcome(Verdict.WRONG, f"{what}: another end of {arm}")
    if not (folder / "table.md").exists():
        return Outcome(Verdict.WRONG, f"{what}: no table")
    return held(what)


def stop_run(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Stops a run as a pre-emption does: it saves, says so, and goes on."""
    whole = unbroken(bench, recipe)
    folder, log = bench.folder / "run", bench.folder / "run.log"
    # So long that the signal comes before its end.
    longer = dataclasses.replace(recipe, updates=100_000)
    process = started(longer.argv(source_of(bench), folder), log)
    try:
        while not log.with_suffix(".begun").exists():
            time.sleep(0.01)
        moment = rng.uniform(0.0, _RESERVE * whole.seconds)
        process.join(moment)
        signum = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        what = f"{signum.name} after {moment:.2f} s"
        os.kill(process.pid, signum)
        ended = wait(process, log, _GRACE_S)
    finally:
        killed(process)
    saved = last_saved(folder)
    # Where the command did not look for signals yet, it had nothing to save.
    if ended.status == -signum and saved is None:
        return held(f"{what}, before anything")
    if outcome := failed(ended, what, status=128 + signum):
        return outcome
    if saved is None:
        return held(f"{what}: {ended.line}")
    # It goes on from there as one that was never stopped does.
    recipe = dataclasses.replace(recipe, updates=saved + recipe.every)
    other = bench.folder / "whole"
    for each in (folder, other):
        more = {} if each is folder else _replay(recipe, folder)
        ended = trained(bench, recipe, each, more=more)
        if outcome := failed(ended, what):
            return outcome
    if final_state(folder) != final_state(other):
        return Outcome(Verdict.WRONG, f"{what}: another end than unbroken")
    return held(f"{what}, saved at {saved}")


def fill_disk(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Lets a write find the disk full: a sentence, and the same command goes on."""
    whole = unbroken(bench, recipe)
    folder = bench.folder / "run"
    number = rng.randint(1, _MAX_SMALL_WRITES)
    ended = trained(bench, recipe, folder, fill_at=number)
    what = f"disk full at write {number} of small files"
    return _after_full(recipe, folder, whole, ended, what, bench)


def limit_files(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Lets no file become longer than a limit, whoever writes it."""
    whole = unbroken(bench, recipe)
    folder = bench.folder / "run"
    size = rng.randint(3_000, 30_000)
    ended = trained(bench, recipe, folder, max_file_bytes=size)
    what = f"no file of more than {size} bytes"
    return _after_full(recipe, folder, whole, ended, what, bench)


def small_disk_of(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Runs on a disk that is too small, and then goes on with more room."""
    with small_disk(bench.folder / "disk", _PAGE_BYTES) as disk:
        whole = unbroken(bench, recipe)
        needed = sum(path.stat().st_size for path in whole.folder.rglob("*"))
        size = rng.randint(1, needed // _PAGE_BYTES) * _PAGE_BYTES
        resize(disk, size)
        folder = disk / "run"
        argv = recipe.argv(source_of(bench), folder)
        # What it prints is not on that disk.
        ended = command(argv, bench.folder / "run.log", _LIMIT_S)
        resize(disk, _LARGE_BYTES)
        what = f"a disk of {size} bytes"
        return _after_full(recipe, folder, whole, ended, what, bench)


def _after_full(
    recipe: Recipe, folder: Path, whole: Whole, ended: Ended, what: str, bench: Bench
) -> Outcome:
    if unsaid := ended.unsaid():
        return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
    what = f"{what}: {ended.line}"
    ended = trained(bench, recipe, folder)
    if outcome := failed(ended, what):
        return outcome
    if not same_end(folder, whole.folder):
        return Outcome(Verdict.WRONG, f"{what}: then another end than unbroken")
    return held(what)


_RECIPES = (HOST, GRAIN, DEVICE, STOCHASTIC)
_KILLED = (*_RECIPES, GROWING, ADAPTIVE)
F1 = Fault(
    name="F1",
    title="SIGKILL, one to three times, at any moment and before any write",
    holds="resumed to the same parameters, optimizer, stream and rows, to the bit",
    trials={
        **{each.name: partial(kill_run, each) for each in _KILLED},
        "two processes": kill_pair,
        "study": kill_study,
        "prepare": kill_prepare,
    },
    limit_s=4 * _LIMIT_S,
)
F2 = Fault(
    name="F2",
    title="SIGTERM, SIGINT or SIGHUP at any moment",
    holds=f"saved within {_GRACE_S:g} s, and resumed to the same end, to the bit",
    trials={
        each.name: partial(stop_run, each) for each in (*_RECIPES, ADAPTIVE, WORKERS)
    },
    limit_s=4 * _LIMIT_S,
)
F3 = Fault(
    name="F3",
    title="A full disk at any write, and a limit to the size of files",
    holds="said in a sentence, and the same command goes on to the same end",
    trials={
        **{f"{each.name}, disk": partial(fill_disk, each) for each in (HOST, DEVICE)},
        "host, limit": partial(limit_files, HOST),
        "host, small disk": partial(small_disk_of, HOST),
    },
    limit_s=4 * _LIMIT_S,
)
