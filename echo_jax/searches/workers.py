"""Runs a search in several processes and shows its progress.

On a CPU there is one process for each core, bound to it, since a small training hardly
uses a second core. An accelerator has one process, because processes cannot share it.
Workers on other machines with the same folder take part (`echo_jax.searches.trials`).
"""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from typing import Any

from rich.console import Console

from echo_jax.config import Config
from echo_jax.files.folders import RunPath, run_folder
from echo_jax.searches.trials import Protocol, Trial, Unit, read_unit
from echo_jax.terminal import ending
from echo_jax.terminal.printable import printable

__all__ = ["LostWorkerError", "StudyStopped", "run_search"]

_LOOK_EVERY_S = 1.0
_OTHERS_EVERY_S = 10.0
# Time for workers to end after a signal, before they are killed.
_GRACE_S = 20.0


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
    arms: Mapping[str, Config],
    workdir: RunPath,
    *,
    jobs: int = 0,
    console: Console | None = None,
) -> None:
    """Makes all missing trials of a study; other machines may take part."""
    (workdir / "trials").mkdir()
    progress = _Progress(protocol, workdir, console or Console())
    jobs = jobs or _num_jobs()
    with _Stop() as stop:
        while progress.read():
            with _Workers(jobs, protocol, dict(arms), str(workdir)) as workers:
                workers.watch(progress, stop)
            if progress.read() and not stop.asked.wait(0):
                progress.note("others make the rest; waits for them")
                stop.asked.wait(_OTHERS_EVERY_S)
            if stop.asked.is_set():
                raise StudyStopped(stop.signum)


class _Stop:
    """Records the first signal that asks for an end; a second one ends the command."""

    def __init__(self) -> None:
        self.asked, self.signum = threading.Event(), 0
        self._listener = ending.SignalThread(self._hear)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Stop":
        self._listener.__enter__()
        if threading.current_thread() is threading.main_thread():
            for signum in ending.stop_signals():
                if signal.getsignal(signum) != signal.SIG_IGN:
                    # The thread also gets the signal.
                    self._before[signum] = signal.signal(signum, lambda *_: None)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._listener.__exit__()

    def _hear(self, signum: int) -> None:
        if self.asked.is_set() and ending.owns_process():
            message = str(StudyStopped(signum))
            ending.end(128 + signum, message, resumes=True)
        self.signum = signum
        self.asked.set()


class _Workers:
    """The processes of `_work`, from the arguments that all of them get."""

    def __init__(self, jobs: int, *given: Any):
        context = multiprocessing.get_context("spawn")
        self._said: Any = context.Queue()
        cores = sorted(os.sched_getaffinity(0)) if jobs > 1 else [None]
        self._processes: list[BaseProcess] = [
            context.Process(
                target=_work,
                args=(*given, cores[number % len(cores)], self._said),
                daemon=True,
            )
            for number in range(jobs)
        ]

    def __enter__(self) -> "_Workers":
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        deadline_s = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(deadline_s - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                process.join()

    def watch(self, progress: "_Progress", stop: _Stop) -> None:
        """Shows the workers' messages until all have ended or a signal came."""
        while True:
            alive = [process for process in self._processes if process.is_alive()]
            try:
                while True:
                    said = self._said.get(timeout=_LOOK_EVERY_S if alive else 0)
                    if isinstance(said, LostWorkerError):
                        raise said
                    progress.show(*said)
            except queue.Empty:
                pass
            except LostWorkerError:
                self._signal(signal.SIGTERM)
                raise
            if stop.asked.is_set():
                self._signal(signal.SIGTERM)
                return
            if not alive:
                break
        lost = [p.exitcode for p in self._processes if p.exitcode]
        if lost:
            raise LostWorkerError(
                f"a process that makes trials ended with status {lost[0]}; the trials "
                "that have ended are kept: run the same command again, perhaps with "
                "fewer --jobs"
            )

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.is_alive() and process.pid:
                os.kill(process.pid, number)


def _work(
    protocol: Protocol,
    arms: Mapping[str, Config],
    workdir: str,
    core: int | None,
    said: Any,
) -> None:
    """Makes trials in its own process."""
    if core is not None:
        # Before jax counts the cores for its threads.
        os.sched_setaffinity(0, {core})
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    # Imported here: it imports jax.
    from echo_jax.searches.making import make_trials
    from echo_jax.training.processes.interrupt import Interrupted

    try:
        make_trials(
            protocol,
            arms,
            run_folder(workdir),
            lambda unit, trial: said.put((unit, trial)),
        )
    except (Interrupted, KeyboardInterrupt):
        sys.exit(0)  # The sender of the signal knows.
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        said.put(LostWorkerError(message, getattr(error, "exit_code", 1)))
        sys.exit(1)


def _end_with(parent: int) -> None:
    """Stops this process when its parent process is gone."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGTERM)


def _num_jobs() -> int:
    """Returns one process for each core of a CPU, or one for an accelerator."""
    # In another process: the process that asks for an accelerator keeps it.
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        backend = pool.apply(_backend)
    return len(os.sched_getaffinity(0)) if backend == "cpu" else 1


def _backend() -> str:
    # Imported here, only in the child process.
    import jax

    return jax.default_backend()


class _Progress:
    """The progress of a search, in lines."""

    def __init__(self, protocol: Protocol, workdir: RunPath, console: Console):
        self._protocol, self._workdir, self._console = protocol, workdir, console
        self._began_s, self._made = time.monotonic(), 0
        self._best: dict[str, float] = {}
        self._missing: dict[Unit, int] = {}

    def read(self) -> int:
        """Returns the number of trials that nobody is known to have made."""
        protocol, searches = self._protocol, {}
        for unit in protocol.units():
            made = read_unit(self._workdir, unit)
            whole = protocol.size(unit)
            if unit.kind == "search":
                searches[unit] = made
                for trial in made:
                    self._note_best(unit, trial)
            elif protocol.is_over(found := searches.get(unit.search, [])):
                whole = len(protocol.points_of(unit, found))
            self._missing[unit] = max(whole - len(made), 0)
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
        best = self._best.get(unit.arm)
        self.note(
            f"trial {total - missing}/{total}  {unit} #{trial.number}  "
            f"{_outcome(trial)}  {values}"
            + (f"  best {best:,.6g}" if best else "")
            + f"  ETA {days}{left}"
        )

    def note(self, line: str) -> None:
        """Prints a line with the time."""
        self._console.print(
            f"{time.strftime('%H:%M:%S')}  {printable(line)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )

    def _note_best(self, unit: Unit, trial: Trial) -> None:
        if unit.kind == "search" and trial.score is not None:
            best = self._best.get(unit.arm, trial.score)
            self._best[unit.arm] = min(best, trial.score)


def _outcome(trial: Trial) -> str:
    if trial.fresh_to_target is not None:
        return f"{trial.fresh_to_target:,.6g} fresh examples"
    if trial.final is not None and trial.outcome == "ended":
        return f"{trial.final:g} at the end"
    return f"{trial.outcome} {trial.message:.60}".strip()
