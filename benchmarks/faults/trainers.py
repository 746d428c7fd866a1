"""F5 and F7 to F10: workers that die, losses that are no numbers, other machines."""

import contextlib
import dataclasses
import math
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_items import ITEM_TRIALS
from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held
from benchmarks.faults.pairs import Pair
from benchmarks.faults.processes import killed, started, wait
from benchmarks.faults.runs import (
    ADAPTIVE,
    DEVICE,
    HOST,
    WORKERS,
    Recipe,
    failed,
    final_state,
    last_saved,
    rows_of,
    source_of,
    summary_of,
    trained,
    unbroken,
)

_LIMIT_S = 300.0
_TIMEOUT_S = 20.0  # of data, where a worker hangs
_DATA_DID_NOT_COME = 75


def break_worker(signum: int, rng: random.Random, bench: Bench) -> Outcome:
    """Sends a worker a signal: the run goes on, or ends in a sentence, and resumes."""
    folder, log = bench.folder / "run", bench.folder / "run.log"
    longer = dataclasses.replace(WORKERS, updates=100_000)
    argv = longer.argv(source_of(bench), folder, data__timeout_s=_TIMEOUT_S)
    process = started(argv, log)
    try:
        while not _workers_of(process.pid) and process.exitcode is None:
            time.sleep(0.05)
        process.join(rng.uniform(0.0, 15.0))
        # Those that speeds were measured with have ended.
        while process.exitcode is None and not _signaled(process.pid, signum, rng):
            time.sleep(0.05)
        what = f"{signal.Signals(signum).name} to a worker"
        process.join(2 * _TIMEOUT_S)
        if process.exitcode is None:
            # It went on without the worker, or waits: a stop must save either way.
            os.kill(process.pid, signal.SIGTERM)
        ended = wait(process, log, _LIMIT_S)
    finally:
        killed(process)
    if unsaid := ended.unsaid():
        return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
    if ended.status not in (1, 128 + signal.SIGTERM, _DATA_DID_NOT_COME):
        return Outcome(Verdict.WRONG, f"{what}: exit {ended.status}: {ended.line}")
    end = (last_saved(folder) or 0) + WORKERS.every
    other = bench.folder / "whole"
    # What threads read is what workers read.
    for each, recipe in ((folder, WORKERS), (other, HOST)):
        again = trained(bench, dataclasses.replace(recipe, updates=end), each)
        if outcome := failed(again, f"{what}, resumed"):
            return outcome
    if _trained_state(folder) != _trained_state(other):
        return Outcome(Verdict.WRONG, f"{what}: another end than unbroken")
    return held(f"{what}: {ended.line}")


def _signaled(pid: int, signum: int, rng: random.Random) -> bool:
    """Sends a signal to a worker of a process; whether there was one."""
    if not (workers := _workers_of(pid)):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(workers), signum)
        return True
    return False


def _workers_of(pid: int) -> list[int]:
    """Returns the processes that read for a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == pid and b"spawn_main" in command:
            found.append(int(path.name))
    return found


def _trained_state(folder: Path) -> dict[str, Any]:
    """The state without where the stream stands, which tells of workers."""
    state = final_state(folder)
    return {name: state[name] for name in ("params_sha256", "arrays", "counts")}


def diverge(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Lets a loss become no number: the run ends, and no checkpoint holds one."""
    folder = bench.folder / "run"
    rate = 10 ** rng.uniform(3.0, 38.0)
    more = {"optim__lr": rate, "optim__name": "sgd", "optim__clip_norm": 0.0}
    every = rng.randint(1, recipe.every)
    recipe = dataclasses.replace(recipe, every=every)
    ended = trained(bench, recipe, folder, more=more)
    what = f"learning rate {rate:.3g}, saved every {every}"
    if unsaid := ended.unsaid():
        return Outcome(Verdict.TRACEBACK, f"{what}: {unsaid}")
    if ended.status not in (0, 1):
        return Outcome(Verdict.WRONG, f"{what}: exit {ended.status}: {ended.line}")
    for saved in (folder / "checkpoints").glob("[0-9]*"):
        if saved.is_dir() and not _is_finite(saved / "state"):
            return Outcome(Verdict.SILENT, f"{what}: {saved.name} is not finite")
    if not ended.status:
        final = summary_of(folder)["final"]["loss"]
        if final is None or not math.isfinite(final):
            return Outcome(Verdict.SILENT, f"{what}: ended with a loss of {final}")
    return held(f"{what}: {ended.line}")


def _is_finite(state: Path) -> bool:
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        arrays = jax.tree.leaves(reader.restore(state.absolute()))
    return all(np.isfinite(np.asarray(each)).all() for each in arrays)


def unequal_producers(rng: random.Random, bench: Bench) -> Outcome:
    """Lets one of two processes read slowly: they agree, and their logs repeat it."""
    folder, again = bench.folder / "run", bench.folder / "again"
    slow = {"data__storage__latency_s": rng.uniform(0.0, 0.05)}
    what = f"{slow['data__storage__latency_s'] * 1e3:.0f} ms a read in one"
    with Pair(bench, ADAPTIVE, folder, more=slow) as pair:
        for ended in pair.wait(_LIMIT_S):
            if outcome := failed(ended, what):
                return outcome
    found = summary_of(folder)
    if found["fresh"] + found["repeats"] != ADAPTIVE.updates * 4:
        return Outcome(Verdict.WRONG, f"{what}: {found['fresh']} fresh")
    replay = {**ADAPTIVE.echo, "echo.replay": str(folder / "tape.json")}
    with Pair(bench, dataclasses.replace(ADAPTIVE, echo=replay), again) as pair:
        for ended in pair.wait(_LIMIT_S):
            if outcome := failed(ended, f"{what}, replayed"):
                return outcome
    if _trained_state(folder) != _trained_state(again):
        return Outcome(Verdict.WRONG, f"{what}: another end when replayed")
    return held(what)


def _recipe(rng: random.Random) -> Recipe:
    """A run of a random echo."""
    order = rng.choice(("consecutive", "window_shuffle", "shuffle_buffer", "spread"))
    factor = rng.choice((2.0, 2.5, 4.0))
    buffer = 1 if order == "consecutive" else 32
    echo = {"echo.factor": factor, "echo.order": order, "echo.buffer": buffer}
    after = rng.choice(("read", "decode")) if order != "consecutive" else "batch"
    return Recipe(f"{order}-{factor}-{after}", {**echo, "echo.after": after})


def count_workers(count: int, rng: random.Random, bench: Bench) -> Outcome:
    """Reads with so many workers what is else read by threads."""
    recipe = _recipe(rng)
    whole, folder = unbroken(bench, recipe).folder, bench.folder / "run"
    what = f"{recipe.name}, {count} workers"
    ended = trained(bench, recipe, folder, more={"data__workers": count})
    if outcome := failed(ended, what):
        return outcome
    if _trained_state(folder) != _trained_state(whole) or rows_of(folder) != rows_of(
        whole
    ):
        return Outcome(Verdict.WRONG, f"{what}: another end")
    return held(what)


def count_devices(recipe: Recipe, rng: random.Random, bench: Bench) -> Outcome:
    """Trains on some devices, and goes on on others."""
    echo = {**recipe.echo, "mesh.data": -1}
    if recipe is DEVICE:
        echo |= {"echo.lanes": 4, "echo.buffer": 32}
    recipe = dataclasses.replace(recipe, name=f"{recipe.name}-devices", echo=echo)
    whole, folder = unbroken(bench, recipe).folder, bench.folder / "run"
    first, second = rng.choice((1, 2, 4)), rng.choice((1, 2, 4))
    what = f"on {first}, then on {second} devices"
    shorter = dataclasses.replace(recipe, updates=recipe.updates - recipe.every)
    ended = trained(bench, shorter, folder, devices=first)
    if outcome := failed(ended, what):
        return outcome
    ended = trained(bench, recipe, folder, devices=second)
    if outcome := failed(ended, what):
        return outcome
    states = [final_state(each) for each in (folder, whole)]
    if states[0]["stream"] != states[1]["stream"]:
        return Outcome(Verdict.WRONG, f"{what}: another order")
    losses = [summary_of(each)["final"]["loss"] for each in (folder, whole)]
    if abs(losses[0] - losses[1]) > 1e-6:
        return Outcome(Verdict.WRONG, f"{what}: losses {losses[0]!r} and {losses[1]!r}")
    shutil.rmtree(folder)
    return held(what)


F5 = Fault(
    name="F5",
    title="A worker that reads is killed, crashes, or hangs",
    holds="gone on with, or ended in a sentence; and resumed to the same end",
    trials={
        "killed": partial(break_worker, signal.SIGKILL),
        "crashed": partial(break_worker, signal.SIGSEGV),
        "hung": partial(break_worker, signal.SIGSTOP),
    },
    limit_s=4 * _LIMIT_S,
)
F7 = Fault(
    name="F7",
    title="An item, or a loss, that is no number",
    holds="skipped, or the end in a sentence; used nowhere, and in no checkpoint",
    trials={
        **{f"loss, {each.name}": partial(diverge, each) for each in (HOST, DEVICE)},
        **ITEM_TRIALS,
    },
    limit_s=2 * _LIMIT_S,
)
F8 = Fault(
    name="F8",
    title="Two processes, of which one reads slowly",
    holds="the same parameters in both, and again when their logs are replayed",
    trials={"adaptive": unequal_producers},
    limit_s=3 * _LIMIT_S,
)
F9 = Fault(
    name="F9",
    title="1, 2 or 4 workers in place of threads",
    holds="the same parameters, optimizer and rows, to the bit",
    trials={f"{count} workers": partial(count_workers, count) for count in (1, 2, 4)},
    limit_s=2 * _LIMIT_S,
)
F10 = Fault(
    name="F10",
    title="1, 2 or 4 devices, and others after a resume",
    holds="the same order, and the same loss within 1e-6",
    trials={each.name: partial(count_devices, each) for each in (HOST, DEVICE)},
    limit_s=2 * _LIMIT_S,
)
