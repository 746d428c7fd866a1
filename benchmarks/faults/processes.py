"""Processes that a trial may kill, starve or fill up, and the commands they run.

They are forked from a server that has imported what takes long, and has started
nothing: a command in one is a process of its own all the same.
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
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.faults.campaign import Outcome, Overdue, Verdict, held, said

_PRELOADED = (
    "benchmarks.faults.processes",
    "cv2",
    "echo_jax.cli",
    "echo_jax.data.prepare",
    "echo_jax.runs",
    "echo_jax.workloads",
    "matplotlib.figure",
)
_MEMORY_BYTES = 1 << 30  # that a parser may take beyond what the process has
# In place of what it was, and of the name of the file.
_UNSAID = ("this may be a bug", "a file cannot be written")
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
# Files that are opened to be written, and what moves and removes them.
_WRITES = ("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def prepare_environment(folder: Path) -> None:
    """Has all processes of this one, not begun yet, compile the same programs once.

    Args:
      folder: Receives them, if the environment does not say where they are.
    """
    # Those of `tests/conftest.py`, whose reasons hold here.
    for name, value in {
        "JAX_PLATFORMS": "cpu",
        "NPROC": "16",
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(2**30),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }.items():
        os.environ.setdefault(name, value)


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_PRELOADED])
    return context


@dataclass(frozen=True)
class Ended:
    """How a command ended.

    Attributes:
      status: Its exit status; negative, the signal that killed it.
      output: What it printed, errors too.
      writes: How many times it opened, moved or removed files, if it was not killed.
    """

    status: int
    output: str
    writes: int

    @property
    def line(self) -> str:
        """The last line that it printed."""
        return (self.output.strip().splitlines() or [""])[-1]

    def unsaid(self) -> str:
        """What is printed that is no sentence of ours; ``""`` if nothing."""
        if "Traceback (most recent call last)" in self.output:
            return f"a traceback: {self.line}"
        if any(words in self.output for words in _UNSAID):
            return self.line
        if self.status < 0 and self.status != -signal.SIGKILL:
            return f"died of {signal.Signals(-self.status).name}: {self.line}"
        return ""


def started(argv: list[str], log: Path, **options: Any) -> Any:
    """Starts ``echo-jax``.

    Args:
      argv: Its arguments.
      log: Receives what it prints.
      **options: See `_run`.

    Returns:
      A process of `multiprocessing`.
    """
    process = _context().Process(target=_run, args=(argv, log), kwargs=options)
    process.start()
    return process


def wait(process: Any, log: Path, limit_s: float) -> Ended:
    """Waits for a command.

    Raises:
      Overdue: It has not ended in time; it is killed.
    """
    process.join(limit_s)
    if process.exitcode is None:
        killed(process)
        raise Overdue
    writes = log.with_suffix(".writes")
    return Ended(
        process.exitcode,
        log.read_text(errors="replace") if log.exists() else "",
        int(writes.read_text()) if writes.exists() else 0,
    )


def killed(process: Any) -> None:
    """Kills a process, and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def command(
    argv: list[str], log: Path, limit_s: float = 300.0, **options: Any
) -> Ended:
    """Runs ``echo-jax`` to its end; see `started` and `wait`."""
    log.with_suffix(".writes").unlink(missing_ok=True)
    process = started(argv, log, **options)
    try:
        return wait(process, log, limit_s)
    finally:
        killed(process)


def _run(
    argv: list[str],
    log: Path,
    devices: int = 1,
    die_at: int = 0,
    fill_at: int = 0,
    max_file_bytes: int = 0,
) -> None:
    """Runs ``echo-jax`` in this process.

    Args:
      argv: Its arguments.
      log: Receives what it prints.
      devices: Virtual ones.
      die_at: Before which write it kills itself; 0 never.
      fill_at: Which write of a run folder's small files finds the disk full; 0 none.
      max_file_bytes: The largest file that it may write; 0 for no limit.
    """
    _die_with_the_campaign()
    # Whatever is ignored where the campaign was started, as ``nohup`` has it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A kill must leave nothing by halves that other processes read.
    _configure_jax(devices, caches=not (die_at or max_file_bytes))
    writes = _count_writes(die_at)
    if fill_at:
        _fill_disk_at(fill_at)
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    _at_exit(lambda: log.with_suffix(".writes").write_text(str(writes())))
    from echo_jax import cli

    # No arguments: so it is the command of this process, and may end it.
    sys.argv[1:] = argv
    status = 1
    log.with_suffix(".begun").touch()
    try:
        status = cli.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        # As a command of its own does, and a process of multiprocessing does not.
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _at_exit(call: Callable[[], object]) -> None:
    """Calls a function before this process ends itself, in whatever way."""
    leave = os._exit

    def leave_after(status: int) -> None:
        with contextlib.suppress(OSError):
            call()
        leave(status)

    os._exit = leave_after


def _die_with_the_campaign() -> None:
    """Leads a process group, which is killed with what it has started.

    And dies with the server that forked it, which ends with the campaign: a run may
    have been begun that never ends.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _configure_jax(devices: int, caches: bool) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    if not caches:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)


def _count_writes(die_at: int) -> Callable[[], int]:
    """Counts what this process does to files, and kills it before one of them."""
    count = 0

    def look(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in _WRITES and not (
            event == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS
        ):
            return
        count += 1
        if count == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    return lambda: count


def _fill_disk_at(number: int) -> None:
    """Lets the n-th write of a small file find the disk full, half of it written."""
    from benchmarks.faults.disks import fill_at

    fill_at(number)


def isolated(
    function: Callable[..., None],
    *args: Any,
    limit_s: float,
    memory_bytes: int = _MEMORY_BYTES,
) -> Outcome:
    """Runs a function in a process with limits on its time and memory.

    Args:
      function: Of a module; returns nothing, or fails with a sentence.
      *args: Its arguments.
      limit_s: HUNG after it.
      memory_bytes: Beyond what the process has at its start.

    Returns:
      HELD if it returned or said what is wrong; HUNG; TRACEBACK for any other error,
      for memory that is used up and for a crash.
    """
    receiver, sender = _context().Pipe(duplex=False)
    process = _context().Process(
        target=_limited, args=(sender, memory_bytes, function, args)
    )
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s):
            return Outcome(Verdict.HUNG, f"more than {limit_s:g} s")
        return receiver.recv()
    except EOFError:
        process.join()
        return Outcome(Verdict.TRACEBACK, f"the process died: {process.exitcode}")
    finally:
        killed(process)
        receiver.close()


def _limited(
    sender: Connection,
    memory_bytes: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    _die_with_the_campaign()
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # Not of the address space, of which every thread reserves more than it uses.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        function(*args)
        outcome = held("taken")
    except MemoryError as error:
        outcome = Outcome(Verdict.TRACEBACK, f"memory used up: {error}")
    except Exception as error:
        outcome = said(error)
    sender.send(outcome)
    os._exit(0)
