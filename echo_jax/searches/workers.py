"""Runs a search in several processes and shows its progress.

On a CPU there is one process for each core, bound to it, since a small training hardly
uses a second core. An accelerator has one process, because processes cannot share it.
Workers on other machines with the same folder take part (`echo_jax.searches.trials`).
"""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from typing import Any

from etils import epath
from rich.console import Console

from echo_jax.config.run import RunSpec
from echo_jax.files.folders import run_folder
from echo_jax.searches.trials import Protocol, Trial, Unit, read_unit
from echo_jax.terminal import ending
from echo_jax.terminal.notes import Notes

_SPAWN = multiprocessing.get_context("spawn")
_LOOK_EVERY_S = 0.2
_OTHERS_EVERY_S = 10.0
# A worker that must end gets so many SIGTERM, one in 2 s, and is then killed.
_ASKED_TO_END, _AGAIN_S = 10, 2.0
# In a worker: the queue of the trials that it has made.
_made: Any = None


# `exit_code` is the shell's: 128 + the signal, such as 143 after SIGTERM.
class StudyStopped(Exception):
    """A signal stopped a search; the same command resumes it."""

    def __init__(self, signum: int):
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name}; the trials that have ended are kept")


class LostWorkerError(Exception):
    """A worker ended with an error or was killed."""

    def __init__(self, message: str, exit_code: int = 1):
        self.exit_code = exit_code
        super().__init__(message)


# `jobs=0` means one process for each core of a CPU, or one on an accelerator.
def run_search(
    protocol: Protocol,
    variants: Mapping[str, RunSpec],
    workdir: epath.Path,
    *,
    jobs: int = 0,
    console: Console | None = None,
) -> None:
    """Makes all missing trials of a study; other machines may take part."""
    (workdir / "trials").mkdir(parents=True, exist_ok=True)
    progress = _Progress(protocol, workdir, console)
    jobs = jobs or _num_jobs()
    free = sorted(os.sched_getaffinity(0))
    cores, made = _SPAWN.SimpleQueue(), _SPAWN.SimpleQueue()
    for number in range(jobs):
        cores.put({free[number % len(free)]} if jobs > 1 else {*free})
    # The kernel closes `held` too if this process is killed.
    lifeline, held = _SPAWN.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, _SPAWN, _begin, (cores, made, lifeline))
    given = protocol, dict(variants), str(workdir)
    with _stop_asked() as stop, pool, held:
        while progress.read():
            waiting = {pool.submit(_work, *given) for _ in range(jobs)}
            while waiting:
                both = {stop, *waiting}
                done, waiting = wait(both, _LOOK_EVERY_S, FIRST_EXCEPTION)
                waiting.discard(stop)
                while not made.empty():
                    progress.show(*made.get())
                for future in done:
                    future.result()
            if progress.read():
                progress.note(
                    "other processes make the remaining trials; waiting for them"
                )
                wait([stop], _OTHERS_EVERY_S)


@contextlib.contextmanager
def _stop_asked() -> Iterator[Future[None]]:
    """Yields a future that a signal fails; raises the error of a stopped search."""
    stop: Future[None] = Future()

    def hear(signum: int) -> None:
        stop.set_exception(StudyStopped(signum))

    with ending.StopSignals(hear):
        try:
            yield stop
        except BrokenProcessPool as error:
            raise LostWorkerError(
                "a process that makes trials crashed or was killed; the trials that "
                "have ended are kept: run the same command again, perhaps with fewer "
                "--jobs"
            ) from error
        finally:
            # A signal to all processes may end a worker before this one hears of it.
            if stop.done():
                stop.result()


def _begin(cores: Any, made: Any, lifeline: Connection) -> None:
    """Prepares a worker."""
    global _made
    _made = made
    # Before jax counts the cores for its threads.
    os.sched_setaffinity(0, cores.get())
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()


def _end_with(lifeline: Connection) -> None:
    """Ends this worker when its search ends or the process of the search is killed."""
    lifeline.poll(None)
    # One signal may end only a trial, or come when the trial no longer looks for it.
    for _ in range(_ASKED_TO_END):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_AGAIN_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _work(protocol: Protocol, variants: Mapping[str, RunSpec], workdir: str) -> None:
    """Makes trials in a worker."""
    # Imported here: it imports jax.
    from echo_jax.searches.making import make_trials
    from echo_jax.training.processes.stop import Interrupted

    try:
        make_trials(protocol, variants, run_folder(workdir), lambda *it: _made.put(it))
    except (Interrupted, KeyboardInterrupt):
        return  # The sender of the signal knows.
    except Exception as error:
        code = getattr(error, "exit_code", 1)
        raise LostWorkerError(f"{type(error).__name__}: {error}", code) from None


def _num_jobs() -> int:
    # In another process: the process that asks for an accelerator keeps it.
    with _SPAWN.Pool(1) as pool:
        backend = pool.apply(_backend)
    return len(os.sched_getaffinity(0)) if backend == "cpu" else 1


def _backend() -> str:
    # Imported here, only in the child process.
    import jax

    return jax.default_backend()


class _Progress(Notes):
    """The progress of a search, in lines."""

    def __init__(
        self, protocol: Protocol, workdir: epath.Path, console: Console | None
    ):
        super().__init__(console)
        self._protocol, self._workdir = protocol, workdir
        self._began_s, self._made = time.monotonic(), 0
        self._best: dict[str, float] = {}
        self._missing: dict[Unit, int] = {}

    def read(self) -> int:
        """Returns the number of trials that are missing in the folder."""
        protocol = self._protocol
        made = {unit: read_unit(self._workdir, unit) for unit in protocol.units()}
        for unit, trials in made.items():
            whole, found = protocol.size(unit), made.get(unit.search, [])
            if unit.kind == "confirm" and protocol.is_over(found):
                whole = len(protocol.points_of(unit, found))
            for trial in trials:
                self._note_best(unit, trial)
            self._missing[unit] = max(whole - len(trials), 0)
        return sum(self._missing.values())

    def show(self, unit: Unit, trial: Trial) -> None:
        self._made += 1
        self._note_best(unit, trial)
        # The trials of other workers are seen when the folder is read again.
        self._missing[unit] = max(self._missing[unit] - 1, 0)
        missing = sum(self._missing.values())
        total = sum(map(self._protocol.size, self._missing))
        left_s = missing * (time.monotonic() - self._began_s) / self._made
        left = time.strftime("%H:%M:%S", time.gmtime(left_s))
        days = f"{int(left_s // 86400)} d " if left_s >= 86400 else ""
        values = "  ".join(f"{name} {value}" for name, value in trial.point.items())
        best = self._best.get(unit.variant)
        said = f"  best {best:,.6g}" if best else ""
        self.note(
            f"trial {total - missing}/{total}  {unit} #{trial.number}  "
            f"{_outcome(trial)}  {values}{said}  ETA {days}{left}"
        )

    def _note_best(self, unit: Unit, trial: Trial) -> None:
        if unit.kind == "search" and trial.score is not None:
            best = self._best.get(unit.variant, trial.score)
            self._best[unit.variant] = min(best, trial.score)


def _outcome(trial: Trial) -> str:
    if trial.fresh_to_target is not None:
        return f"{trial.fresh_to_target:,.6g} fresh examples"
    if trial.final is not None and trial.outcome == "ended":
        return f"{trial.final:g} at the end"
    return f"{trial.outcome} {trial.message:.60}".strip()
