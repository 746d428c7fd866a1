"""Ending this process by a signal: at once, with one line, whatever it does.

Python runs the handler of a signal in the main thread, and only between two lines of
Python: never while that thread compiles, or waits in native code. But the signal is
written to a socket as it arrives. A thread that reads there hears of every signal.
"""

import contextlib
import ctypes
import multiprocessing
import os
import select
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import NoReturn, Self

__all__ = [
    "EndsAtOnce",
    "SignalThread",
    "before_abort",
    "before_exit",
    "drop_lost_outputs",
    "end",
    "flush_output",
    "owns_process",
    "stop_signals",
]

# Of the whole process, as handlers are: the command that it runs, if it is for nothing
# else.
_program: tuple[str, ...] = ()
_last_words = threading.Lock()
_before_exit: Callable[[], object] = bool  # does nothing
_abort_handler: object = None  # is called by C, and so has to stay
_OUTPUT, _ERRORS = 1, 2  # descriptors
_FREE_TO_USE = signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
# To the start of an empty line, with a cursor: a bar on the terminal hides it.
_LEAVES_BAR = b"\r\x1b[2K\x1b[?25h"


def owns_process() -> bool:
    """Whether this process runs a command, and may be ended by it."""
    return bool(_program)


def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a run to save and end.

    SIGUSR1 and SIGUSR2 are what SLURM and other schedulers send before a time limit.
    They and SIGHUP are left to a program that handles them by itself, or ignores them,
    as ``nohup`` does.
    """
    return [signal.SIGINT, signal.SIGTERM, *filter(_is_free, _FREE_TO_USE)]


def _is_free(signum: signal.Signals) -> bool:
    handler = signal.getsignal(signum)
    # In a command the handler is this module's, or that of what it runs.
    return handler == signal.SIG_DFL or (owns_process() and handler != signal.SIG_IGN)


def before_exit(call: Callable[[], object]) -> None:
    """Has a function called by `end` once all is said, just before the process ends."""
    global _before_exit
    _before_exit = call


def before_abort(call: Callable[[], object]) -> None:
    """Has a function called where native code is about to abort the process.

    A handler of Python's own would never run: the thread that aborts does not come back
    to Python. If the function returns, the process is aborted.
    """
    global _abort_handler
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: call())
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_handler)


def end(status: int, message: object = "", *, resumes: bool = False) -> NoReturn:
    """Ends the process of a command here and now.

    Threads that wait for ever in a read do not keep it, and no worker process is left
    behind, also none that is stopped. Nothing is torn down: threads of native code
    may crash on what is no longer there.

    Args:
      status: The exit status.
      message: One line, printed after the command's name.
      resumes: Whether to print the command again, which goes on with what it saved.
    """
    # For ever: whoever comes second finds the process gone.
    _last_words.acquire()
    try:
        lines = [f"{' '.join(_program[:2])}: {message}"] if message else []
        if resumes:
            lines.append(f"  {shlex.join(_program)}")
        for worker in multiprocessing.active_children():
            worker.kill()
        _kill_spawned()
        # Not by way of Python's files, whose locks another thread may hold for ever.
        if os.isatty(_OUTPUT):
            with contextlib.suppress(OSError):  # It may have been hung up.
                os.write(_OUTPUT, _LEAVES_BAR)
        os.write(_ERRORS, "".join(f"{line}\n" for line in lines).encode())
        _before_exit()
    finally:
        os._exit(status)


def _kill_spawned() -> None:
    """Kills workers that are being started, which `multiprocessing` does not list yet.

    They read what they are to do from this process, and would say for pages that it
    breaks off. Linux alone says which they are.
    """
    for path in Path("/proc").glob("[0-9]*"):
        # Others end meanwhile.
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            # Python's tracker of resources is another child, and frees them.
            if (
                int(parent) == os.getpid()
                and b"spawn_main" in (path / "cmdline").read_bytes()
            ):
                os.kill(int(path.name), signal.SIGKILL)


def flush_output() -> None:
    """Writes what was printed now: while Python ends nobody could catch an error."""
    print(end="", flush=True)


def drop_lost_outputs() -> bool:
    """Sends standard output and error nowhere, each if nobody reads it any more.

    Returns:
      Whether that is so of one of them: a closed pipe, or a terminal hung up.
    """
    outputs = select.poll()
    for descriptor in (_OUTPUT, _ERRORS):
        outputs.register(descriptor, 0)  # reports what is wrong, and nothing else
    closed = select.POLLERR | select.POLLHUP  # as Linux and macOS call it
    gone = [number for number, event in outputs.poll(0) if event & closed]
    for descriptor in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(gone)


class SignalThread:
    """Calls a function in a thread of its own for every signal that has a handler.

    Outside of the main thread, to which Python gives signals, it does nothing. Of
    several of them only the one that was entered last hears of a signal.

    Args:
      on_signal: Given the number of the signal.
    """

    def __init__(self, on_signal: Callable[[int], None]):
        self._on_signal = on_signal
        self._before: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        self._thread = threading.Thread(
            target=self._listen, name="signals", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is None:
            return
        signal.set_wakeup_fd(self._before)
        self._writer.close()
        self._thread.join()
        self._reader.close()

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            for signum in numbers:
                self._on_signal(signum)


class EndsAtOnce:
    """Has the first signal end this process, from now on and until it is left.

    For a command at its start and at its end: there is nothing to save, or it is saved.
    A run has signals for itself as long as it trains; see
    `training.processes.interrupt`.

    Ctrl-C goes to all processes that a terminal shows, and a scheduler's signal to all
    of a job. Those that this one starts meanwhile have them blocked from their first
    instruction on: they would end, or print a traceback, while this one still needs
    them. SIGTERM is not blocked: this process ends them with it.

    Args:
      argv: The command: ``["echo-jax", "train", ...]``.

    Example:
      >>> with EndsAtOnce(["echo-jax", *sys.argv[1:]]):
      ...     import jax
    """

    def __init__(self, argv: Sequence[str]):
        self._argv = tuple(argv)
        self._listener = SignalThread(self._end)

    def __enter__(self) -> Self:
        global _program
        _program = self._argv
        # Python's tracker frees what killed workers leave behind, and would say so.
        warnings = os.environ.get("PYTHONWARNINGS", "")
        os.environ["PYTHONWARNINGS"] = f"{warnings},ignore:resource_tracker".strip(",")
        self._listener.__enter__()
        self._handlers = {
            signum: signal.signal(signum, self._handle)
            for signum in stop_signals()
            if signal.getsignal(signum) != signal.SIG_IGN
        }
        # Threads and processes inherit that. The listener, which was started before,
        # is left to take the signals.
        blocked = {*self._handlers} - {signal.SIGTERM}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        # Its start unblocks Ctrl-C in the thread that it is started from.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        return self

    def __exit__(self, *error: object) -> None:
        global _program
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        self._listener.__exit__()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        _program = ()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Leaves it to the thread, which has heard of it already."""

    def _end(self, signum: int) -> None:
        if signum in self._handlers:
            name = signal.Signals(signum).name
            again = "run the same command to resume"
            end(128 + signum, f"interrupted by {name}; {again}", resumes=True)
