"""Runs a search in several processes and shows its progress.

On a CPU there is one process for each core, bound to it, since a small training hardly
uses a second core. An accelerator has one process, because processes cannot share it.
Workers on other machines with the same folder take part (`echo_jax.searches.trials`).
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any

from rich.console import Console

from echo_jax.config import Config
from echo_jax.files.folders import RunPath, run_folder
from echo_jax.searches.trials import Protocol, Trial, Unit, read_unit
from echo_jax.terminal import ending
from echo_jax.terminal.notes import Notes

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
    progress = _Progress(protocol, workdir, console)
    jobs = jobs or _num_jobs()
    with _Stop() as stop:
        while progress.read():
            _run_workers(jobs, (protocol, dict(arms), str(workdir)), progress, stop)
            if progress.read() and not stop.asked.is_set():
                progress.note("others make the rest; waits for them")
                stop.asked.wait(_OTHERS_EVERY_S)
            if stop.asked.is_set():
                raise StudyStopped(stop.signum)


class _Stop:
    """Records the first signal that asks for an end; a second one ends the command."""

    def __init__(self) -> None:
        self.asked, self.signum = threading.Event(), 0
        self._ends = contextlib.ExitStack()

    def __enter__(self) -> "_Stop":
        self._ends.enter_context(ending.SignalThread(self._hear))
        if threading.current_thread() is threading.main_thread():
            for signum in ending.stop_signals():
                if signal.getsignal(signum) != signal.SIG_IGN:
                    # The thread also gets the signal.
                    before = signal.signal(signum, lambda *_: None)
                    self._ends.callback(signal.signal, signum, before)
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def _hear(self, signum: int) -> None:
        if self.asked.is_set() and ending.owns_process():
            message = str(StudyStopped(signum))
            ending.end(128 + signum, message, resumes=True)
        self.signum = signum
        self.asked.set()


def _run_workers(
    jobs: int, given: tuple[Any, ...], progress: "_Progress", stop: _Stop
) -> None:
    """Runs `_work` in processes until all have ended or a signal came."""
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0)) if jobs > 1 else [None]
    workers: list[BaseProcess] = []
    talking: list[Any] = []
    try:
        for number in range(jobs):
            said, says = context.Pipe(duplex=False)
            arguments = (*given, cores[number % len(cores)], says)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            says.close()
            workers.append(worker)
            talking.append(said)
        while talking and not stop.asked.is_set():
            ready: list[Any] = connection.wait(talking, _LOOK_EVERY_S)
            for said in ready:
                try:
                    message = said.recv()
                except (EOFError, OSError):
                    talking.remove(said)  # The worker has ended.
                    continue
                if isinstance(message[0], LostWorkerError):
                    raise message[0]
                progress.show(*message)
    finally:
        if talking:
            for worker in workers:
                worker.terminate()
        deadline_s = time.monotonic() + _GRACE_S
        for worker in workers:
            worker.join(max(deadline_s - time.monotonic(), 0))
            worker.kill()
            worker.join()
    lost = [worker.exitcode for worker in workers if worker.exitcode]
    if lost and not stop.asked.is_set():
        raise LostWorkerError(
            f"a process that makes trials ended with status {lost[0]}; the trials "
            "that have ended are kept: run the same command again, perhaps with "
            "fewer --jobs"
        )


def _work(
    protocol: Protocol,
    arms: Mapping[str, Config],
    workdir: str,
    core: int | None,
    says: connection.Connection,
) -> None:
    """Makes trials in its own process."""
    if core is not None:
        # Before jax counts the cores for its threads.
        os.sched_setaffinity(0, {core})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Imported here: it imports jax.
    from echo_jax.searches.making import make_trials
    from echo_jax.training.processes.interrupt import Interrupted

    def say(*message: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # The parent is gone.
            says.send(message)

    try:
        make_trials(protocol, arms, run_folder(workdir), say)
    except (Interrupted, KeyboardInterrupt):
        sys.exit(0)  # The sender of the signal knows.
    except Exception as error:
        code = getattr(error, "exit_code", 1)
        say(LostWorkerError(f"{type(error).__name__}: {error}", code))
        sys.exit(1)


def _end_with_parent() -> None:
    """Stops this process when its parent process is gone."""
    if parent := multiprocessing.parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _num_jobs() -> int:
    # In another process: the process that asks for an accelerator keeps it.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        backend = pool.apply(_backend)
    return len(os.sched_getaffinity(0)) if backend == "cpu" else 1


def _backend() -> str:
    # Imported here, only in the child process.
    import jax

    return jax.default_backend()


class _Progress(Notes):
    """The progress of a search, in lines."""

    def __init__(self, protocol: Protocol, workdir: RunPath, console: Console | None):
        super().__init__(console)
        self._protocol, self._workdir = protocol, workdir
        self._began_s, self._made = time.monotonic(), 0
        self._best: dict[str, float] = {}
        self._missing: dict[Unit, int] = {}

    def read(self) -> int:
        """Returns the number of trials that nobody is known to have made."""
        protocol = self._protocol
        made = {unit: read_unit(self._workdir, unit) for unit in protocol.units()}
        for unit, trials in made.items():
            whole = protocol.size(unit)
            if unit.kind == "search":
                for trial in trials:
                    self._note_best(unit, trial)
            elif protocol.is_over(found := made.get(unit.search, [])):
                whole = len(protocol.points_of(unit, found))
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
        best = self._best.get(unit.arm)
        said = f"  best {best:,.6g}" if best else ""
        self.note(
            f"trial {total - missing}/{total}  {unit} #{trial.number}  "
            f"{_outcome(trial)}  {values}{said}  ETA {days}{left}"
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
