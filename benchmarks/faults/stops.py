"""F1 to F3 and F5: commands are killed, stopped, doubled or find no room."""

import contextlib
import random
import signal
import time
from functools import partial
from pathlib import Path

from benchmarks.faults import runs
from benchmarks.faults.campaign import Bench, Fault, Outcome, Verdict, held_if
from benchmarks.faults.commands import Command, Ended
from benchmarks.faults.disks import resize, small_disk

_GRACE_S = {1: 10.0, 2: 30.0}  # within which a run saves and ends, by processes
_AT_ONCE_S = 2.0  # within which a second signal ends a run
_SETTLED_S = 60.0  # within which the second of two commands is refused
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_SIGNALS = [signal.Signals[name] for name in _NAMES]
_PAGE_BYTES = 4096
_LARGE_BYTES = 1 << 26  # more than a run needs
_ENDLESS = 100_000  # updates; no trial waits for them


def kill(work: runs.Work, rng: random.Random, bench: Bench) -> Outcome:
    """Kills a command a few times, at any moment or before a write; then it ends."""
    whole, folder = runs.unbroken(bench, work), bench.folder / "out"
    kills = []
    for _ in range(rng.randint(1, 3)):
        if work is not runs.PAIR and rng.random() < 0.5:
            at = rng.randint(1, whole.num_writes)
            ended = runs.done(work, bench, folder, die_at=at)
            bench.kills += ended.status == -signal.SIGKILL
            kills.append(f"before write {at}")
        else:
            moment = rng.uniform(0.0, whole.seconds)
            with Command(work.argvs(bench, folder), bench.folder / "log") as command:
                command.run_for(moment)
                bench.kills += command.kill(gap_s=rng.uniform(0.0, 2.0))
            kills.append(f"after {moment:.2f} s")
    what = f"killed {', '.join(kills)}"
    if outcome := runs.done(work, bench, folder).failed(what):
        return outcome
    other = whole.folder
    if work is runs.ADAPTIVE:
        replay, other = runs.ADAPTIVE.replay(folder), bench.folder / "replayed"
        if outcome := runs.done(replay, bench, other).failed(what):
            return outcome
    return held_if(work.same_end(folder, other), what)


def stop(run: runs.Run, num_signals: int, rng: random.Random, bench: Bench) -> Outcome:
    """Stops a run by one signal, or by two: it ends in time, and goes on."""
    whole, folder = runs.unbroken(bench, run), bench.folder / "run"
    argvs = run.changed(updates=_ENDLESS).argvs(bench, folder)
    signums = [rng.choice(_SIGNALS) for _ in range(num_signals)]
    moment = rng.uniform(0.0, whole.seconds)
    what = f"{', '.join(each.name for each in signums)} after {moment:.2f} s"
    with Command(argvs, bench.folder / "log") as command:
        command.run_for(moment)
        command.send(signums[0])
        for signum in signums[1:]:
            command.run_for(rng.uniform(0.0, 1.0))
            command.send(signum)
        grace_s = _GRACE_S[run.processes]
        ended = command.wait(grace_s if num_signals == 1 else _AT_ONCE_S)
    # jax's runtime makes SIGTERM of some signals, if there are several processes.
    expected = [*signums, signal.SIGTERM] if run is runs.PAIR else signums
    by_system = -ended.status in expected
    if not by_system and ended.status - 128 not in expected:
        return ended.failed(what, 128 + signums[0]) or held_if(True, what)
    # It may end a run that has not yet begun, or at the second signal.
    if by_system and num_signals == 1 and runs.last_saved(folder) is not None:
        return Outcome(Verdict.WRONG, f"{what}: it ended without saving")
    return _gone_on(run, folder, what, bench)


def _gone_on(run: runs.Run, folder: Path, what: str, bench: Bench) -> Outcome:
    """Lets a run go on for a few updates, as one that was never stopped does."""
    saved = runs.last_saved(folder)
    if saved is None:
        return held_if(True, f"{what}: nothing was saved")
    what, other = f"{what}, saved at {saved}", bench.folder / "whole"
    run = run.changed(updates=saved + 4)
    for each, into in ((run, folder), (run.replay(folder), other)):
        if outcome := runs.done(each, bench, into).failed(what):
            return outcome
    return held_if(runs.final_state(folder) == runs.final_state(other), what)


def limit_files(run: runs.Run, rng: random.Random, bench: Bench) -> Outcome:
    """Lets no file become longer than a limit, and then lifts the limit."""
    folder, max_bytes = bench.folder / "run", rng.randint(3_000, 30_000)
    ended = runs.done(run, bench, folder, max_file_bytes=max_bytes)
    return _with_room(run, folder, ended, f"no file over {max_bytes} bytes", bench)


def lack_disk(run: runs.Run, rng: random.Random, bench: Bench) -> Outcome:
    """Lets a run fill a disk that is too small, and makes the disk larger."""
    files = runs.unbroken(bench, run).folder.rglob("*")
    needed = sum(path.stat().st_size for path in files)
    with small_disk(bench.folder / "disk", _PAGE_BYTES) as disk:
        num_bytes = rng.randint(1, needed // _PAGE_BYTES) * _PAGE_BYTES
        resize(disk, num_bytes)
        ended = runs.done(run, bench, disk / "run")
        resize(disk, _LARGE_BYTES)
        what = f"a disk of {num_bytes} bytes"
        return _with_room(run, disk / "run", ended, what, bench)


def _with_room(
    run: runs.Run, folder: Path, ended: Ended, what: str, bench: Bench
) -> Outcome:
    """Judges the end of a run without room, and lets the same command go on."""
    if outcome := ended.failed(what, status=None):
        return outcome
    what = f"{what}: {ended.line}"
    if outcome := runs.done(run, bench, folder).failed(what):
        return outcome
    return held_if(run.same_end(folder, runs.unbroken(bench, run).folder), what)


def own_twice(run: runs.Run, rng: random.Random, bench: Bench) -> Outcome:
    """Starts two commands over one folder: never both train, and the run goes on."""
    whole, folder = runs.unbroken(bench, run), bench.folder / "run"
    argvs = run.changed(updates=_ENDLESS).argvs(bench, folder)
    later_s, victim = rng.uniform(0.0, whole.seconds), rng.choice((None, 0, 1))
    what = f"the second {later_s:.2f} s after the first, {victim} killed"
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(Command(argvs, bench.folder / "first"))]
        both[0].run_for(later_s)
        both.append(stack.enter_context(Command(argvs, bench.folder / "second")))
        if victim is not None:
            both[victim].run_for(rng.uniform(0.0, whole.seconds))
            bench.kills += both[victim].kill()
        begin = time.monotonic()
        while all(command.runs for command in both):
            if time.monotonic() - begin > _SETTLED_S:
                return Outcome(Verdict.WRONG, f"{what}: both train")
            time.sleep(0.1)
        for number, command in enumerate(both):
            if command.runs:
                command.run_for(rng.uniform(0.0, 2.0))
                command.send(signal.SIGTERM)
            ended = command.wait()
            if number == victim and ended.status == -signal.SIGKILL:
                continue
            # It may have been refused while it was asked to stop.
            is_refused = ended.status == 2 and "in use" in ended.line
            if not is_refused and (outcome := ended.failed(what, 128 + signal.SIGTERM)):
                return outcome
    return _gone_on(run, folder, what, bench)


_RUNS = (runs.HOST, runs.GRAIN, runs.DEVICE, runs.ADAPTIVE, runs.PAIR)
_WORKS = (*_RUNS, runs.Study(), runs.PREPARE)
F1 = Fault(
    name="F1",
    title="SIGKILL, one to three times, at any moment or before a write",
    trials={each.name: partial(kill, each) for each in _WORKS},
)
F2 = Fault(
    name="F2",
    title="SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 at any moment",
    trials={
        **{each.name: partial(stop, each, 1) for each in _RUNS},
        "host, two signals": partial(stop, runs.HOST, 2),
    },
)
F3 = Fault(
    name="F3",
    title="a disk that is too small, or a limit on file size",
    trials={
        "host, limit": partial(limit_files, runs.HOST),
        "host, disk": partial(lack_disk, runs.HOST),
        "device, disk": partial(lack_disk, runs.DEVICE),
    },
)
F5 = Fault(
    name="F5",
    title="two commands over one folder at once, one of them perhaps killed",
    trials={each.name: partial(own_twice, each) for each in (runs.HOST, runs.DEVICE)},
)
