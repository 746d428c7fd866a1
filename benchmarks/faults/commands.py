"""Runs ``echo-jax`` in processes that a trial may kill, starve or fill up.

The processes are forked from a server that has imported everything slow. The server
has started nothing, so a command in a fork behaves like a process of its own.
"""

import atexit
import contextlib
import ctypes
import functools
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Outcome, OverdueError, Verdict

_LIMIT_S = 300.0
_PRELOADED = ["cv2", "echo_jax.cli", "echo_jax.data.prepare", "echo_jax.runs"]
# Words of a failure that names neither its cause nor the file.
_UNSAID = ("this may be a bug", ": a file: ", "MemoryError")
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Audit events that change a folder, besides files opened for writing.
_WRITES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NOT_BEGUN = -1


def prepare_environment(folder: Path) -> None:
    """Makes all commands share one compilation cache, which this folder receives."""
    # `tests/conftest.py` has the other values, and the reasons.
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }.items():
        os.environ.setdefault(name, value)


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_PRELOADED])
    return context


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what its processes printed."""

    status: int  # the first that is not 0; negative: the signal that killed a process
    output: str
    num_writes: int  # how many files it opened for writing, moved or removed

    @property
    def line(self) -> str:
        """The last line that it printed."""
        return (self.output.strip().splitlines() or [""])[-1]

    def failed(self, what: str, status: int | None = 0) -> Outcome | None:
        """Returns the outcome of an end without a sentence, or with another status."""
        no_sentence = "Traceback (most recent call last)" in self.output
        no_sentence |= any(words in self.output for words in _UNSAID)
        no_sentence |= self.status < 0 and self.status != -signal.SIGKILL
        note = f"{what}: exit {self.status}: {self.line}"
        if no_sentence:
            return Outcome(Verdict.TRACEBACK, note)
        is_expected = status is None or self.status == status
        return None if is_expected else Outcome(Verdict.WRONG, note)


class Command:
    """The processes of a running ``echo-jax``; leaving the context kills them.

    Args:
      argvs: The arguments of each process.
      log: File that receives what they print, with a number.
      **options: ``main``, a function to run in place of ``echo-jax``; ``die_at``, the
        write before which it kills itself; limits ``max_file_bytes``, ``memory_bytes``.
    """

    def __init__(self, argvs: Sequence[list[str]], log: Path, **options: Any):
        self._writes = _context().RawValue("q", _NOT_BEGUN)
        self._logs, self._processes = [], []
        for number, argv in enumerate(argvs):
            self._logs.append(log.with_suffix(f".{number}.log"))
            args = (argv, self._logs[-1], self._writes)
            process = _context().Process(target=_run, args=args, kwargs=options)
            process.start()
            self._processes.append(process)

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def runs(self) -> bool:
        """Whether a process has not ended."""
        return any(process.exitcode is None for process in self._processes)

    def run_for(self, seconds: float) -> None:
        """Lets it run for some seconds after its begin, or to its end."""
        while self.runs and self._writes.value == _NOT_BEGUN:
            time.sleep(0.01)
        self._processes[0].join(seconds)

    def send(self, signum: int) -> None:
        """Sends each process a signal, unless it has ended."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signum)

    def kill(self, gap_s: float = 0.0) -> int:
        """Kills one process after the other; returns how many had not ended."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            self._processes[-1].join(gap_s)
        return sum(each.exitcode == -signal.SIGKILL for each in self._processes)

    def wait(self, limit_s: float = _LIMIT_S) -> Ended:
        """Waits for its end; raises OverdueError if it has not ended in time."""
        end = time.monotonic() + limit_s
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if self.runs:
            raise OverdueError(f"it ran for more than {limit_s:g} s")
        failed = [each.exitcode for each in self._processes if each.exitcode]
        logs = [log.read_text(errors="replace") for log in self._logs if log.exists()]
        return Ended(failed[0] if failed else 0, "".join(logs), self._writes.value)


def _run(
    argv: list[str],
    log: Path,
    writes: Any,
    main: Callable[[list[str]], int | None] | None = None,
    die_at: int = 0,
    max_file_bytes: int = 0,
    memory_bytes: int = 0,
) -> None:
    """Runs ``echo-jax``, or another function, in this process."""
    # A group of its own, which is killed with all that it has started.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # ``nohup`` and a shell's ``&`` let the campaign ignore signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import jax

    from echo_jax import cli

    if die_at or max_file_bytes:
        # Other processes must not read a cached program that was half written.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    if memory_bytes:
        # Not the address space: every thread reserves more of it than it uses.
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
        limit = num_pages * resource.getpagesize() + memory_bytes
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    writes.value = 0
    _count_writes(writes, die_at)
    # Only without arguments does the function own this process, and may end it.
    sys.argv[1:] = argv
    try:
        status = main(argv) if main else cli.main()
    finally:
        # A process of multiprocessing skips these.
        atexit._run_exitfuncs()
    raise SystemExit(status)


def _count_writes(writes: Any, die_at: int) -> None:
    """Counts what this process does to files, and kills it before one of them."""

    def look(event: str, args: tuple[Any, ...]) -> None:
        opens = event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS
        if opens or event in _WRITES:
            writes.value += 1
            if writes.value == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
