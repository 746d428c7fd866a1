"""F1 to F3: runs that are killed, stopped, or find the disk full, and go on."""

import contextlib
import dataclasses
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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

_LIMIT_S = 300.0
_GRACE_S = 60.0
_MAX_KILLS = 3
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_MAX_SMALL_WRITES = 20
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 26  # more than a run needs
_RESERVE = 1.2  # of an unbroken run's time, within which a moment is drawn

# Breaks the command of a folder as often as it wants to, and lets it end.
_Ends = Callable[[list[str], Path, Whole, random.Random, Bench], tuple[Ended, str]]


def _kill_once(
    argv: list[str], log: Path, whole: Whole, rng: random.Random, bench: Bench
) -> str:
    """Starts a command and kills it at a moment; says at which.

    It is that of a write, counted, so that nothing between two of them is left out,
    or any other. A command may have ended before.
    """
    if rng.random() < 0.5:
        at = rng.randint(1, max(1, whole.writes))
        ended = command(argv, log, _LIMIT_S, die_at=at)
        bench.kills += ended.status == -signal.SIGKILL
        return f"before write {at}"
    moment = rng.uniform(0.0, _RESERVE * whole.seconds)
    process = started(argv, log)
    try:
        process.join(moment)
    finally:
        _strike(process, bench)
    return f"after {moment:.2f} s"


def _strike(process: Any, bench: Bench) -> None:
    """Kills a process, and counts that unless it had ended."""
    killed(process)
    bench.kills += process.exitcode == -signal.SIGKILL


def _resumed(
    argv: list[str], folder: Path, whole: Whole, rng: random.Random, bench: Bench
) -> tuple[Ended, str]:
    """Kills a command a few times, and lets it end; says when it was killed."""
    log = folder.with_name(f"{folder.name}.log")
    kills = [
        _kill_once(argv, log, whole, rng, bench)
        for _ in range(rng.randint(1, _MAX_KILLS))
    ]
    return command(argv, log, _LIMIT_S), f"killed {', '.join(kills)}"


def _stopped(
    argv: list[str], folder: Path, whole: Whole, rng: random.Random, bench: Bench
) -> tuple[Ended, str]:
    """Stops a command, and lets it end; says by what.

    A command that has not ended as it should when it was stopped is the one that ends.
    """
    log = folder.with_name(f"{folder.name}.log")
    signum = rng.choice(_SIGNALS)
    process = started(argv, log)
    try:
        while not log.with_suffix(".begun").exists():
            time.sleep(0.01)
        moment = rng.uniform(0.0, _RESERVE * whole.seconds)
        process.join(moment)
        # It may have ended before.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signum)
        ended = wait(process, log, _GRACE_S)
    finally:
        killed(process)
    what = f"{signum.name} after {moment:.2f} s"
    # Where it does not look for signals, it ends as the system has it.
    if ended.status in (-signum, 128 + signum):
        ended = dataclasses.replace(ended, status=0)
    if failed(ended, what):
        return ended, what
    return command(argv, log, _LIMIT_S), what


def kill_run(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Kills a run, and compares its end with that of one nobody has killed."""
    whole = unbroken(bench, recipe)
    folder, other = bench.folder / "run", whole.folder
    argv = recipe.argv(source_of(bench), folder)
    ended, what = _resumed(argv, folder, whole, rng, bench)
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
            _strike(pair.processes[first], bench)
            pair.processes[1 - first].join(after_s)
            _strike(pair.processes[1 - first], bench)
        kills.append(f"{first} after {moment:.2f} s")
    what = f"killed process {', '.join(kills)}"
    return _pair_resumed(folder, whole, what, bench)


def stop_pair(rng: random.Random, bench: Bench) -> Outcome:
    """Stops two processes, as a launcher does: they go on to the same end."""
    whole = bench.once("pair", partial(made_by_pair, bench, HOST))
    folder, signum = bench.folder / "run", rng.choice(_SIGNALS)
    moment = rng.uniform(0.0, _RESERVE * whole.seconds)
    what = f"{signum.name} to both after {moment:.2f} s"
    with Pair(bench, HOST, folder) as pair:
        pair.processes[0].join(moment)
        for process in pair.processes:
            # It may have ended before.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)
        for ended in pair.wait(_GRACE_S):
            # By the signal, or by what jax's runtime makes of it.
            if ended.status not in (-signum, 128 + signum, 128 + signal.SIGTERM):
                if outcome := failed(ended, what):
                    return outcome
            elif "Traceback" in ended.output:
                return Outcome(Verdict.TRACEBACK, f"{what}: {ended.output[-300:]}")
    return _pair_resumed(folder, whole, what, bench)


def _pair_resumed(folder: Path, whole: Whole, what: str, bench: Bench) -> Outcome:
    """Lets two processes go on to their end, and compares it with an unbroken one."""
    with Pair(bench, HOST, folder) as pair:
        for ended in pair.wait(_LIMIT_S):
            if outcome := failed(ended, what):
                return outcome
    if not same_end(folder, whole.folder):
        return Outcome(Verdict.WRONG, f"{what}: another end than unbroken")
    return held(what)


def break_prepare(end: _Ends, rng: random.Random, bench: Bench) -> Outcome:
    """Kills or stops a preparation: goes on to the same files, byte for byte."""
    source = bench.once("images", lambda folder: write_images(folder / "photos", 60))

    def argv_of(out: Path) -> list[str]:
        options = ["--holdout", "0.2", "--shard-mb", "0.002", "--out", str(out)]
        return ["prepare", "images", str(source), *options]

    whole = bench.once("prepared", partial(made_by, argv_of))
    folder = bench.folder / "out"
    ended, what = end(argv_of(folder), folder, whole, rng, bench)
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


def break_study(end: _Ends, rng: random.Random, bench: Bench) -> Outcome:
    """Kills or stops a study of two arms: each ends as it does in an unbroken one."""
    argv_of = partial(study_argv, source_of(bench))
    whole = bench.once("study", partial(made_by, argv_of))
    folder = bench.folder / "study"
    ended, what = end(argv_of(folder), folder, whole, rng, bench)
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
        signum = rng.choice(_SIGNALS)
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
        "study": partial(break_study, _resumed),
        "prepare": partial(break_prepare, _resumed),
    },
    limit_s=4 * _LIMIT_S,
)
F2 = Fault(
    name="F2",
    title="SIGTERM, SIGINT or SIGHUP at any moment",
    holds=f"saved within {_GRACE_S:g} s, and resumed to the same end, to the bit",
    trials={
        **{
            each.name: partial(stop_run, each)
            for each in (*_RECIPES, ADAPTIVE, WORKERS)
        },
        "two processes": stop_pair,
        "study": partial(break_study, _stopped),
        "prepare": partial(break_prepare, _stopped),
    },
    limit_s=4 * _LIMIT_S,
)
F3 = Fault(
    name="F3",
    title="A full disk at any write, one too small, and a limit to the size of files",
    holds="said in a sentence, and the same command goes on to the same end",
    trials={
        **{f"{each.name}, disk": partial(fill_disk, each) for each in (HOST, DEVICE)},
        "host, limit": partial(limit_files, HOST),
        "host, small disk": partial(small_disk_of, HOST),
    },
    limit_s=4 * _LIMIT_S,
)
