"""Ends this process by a signal at once, with one line, in any state.

Python runs the handler of a signal in the main thread, and only between two bytecodes.
It does not run while that thread compiles or waits in native code. But the signal is
also written to a socket when it arrives, and a thread that reads the socket gets every
signal.
"""

import contextlib
import ctypes
import io
import multiprocessing
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn, Self

# The command of this process, if the process has no other purpose. It is global, like
# signal handlers.
_program: tuple[str, ...] = ()
_last_words = threading.Lock()
_before_exit: Callable[[], object] = bool  # does nothing
_abort_handler: object = None  # called by C, so it must stay alive
_OUTPUT, _ERRORS = 1, 2  # descriptors
# Clears the line and shows the cursor, which a progress bar hides.
_LEAVES_BAR = b"\r\x1b[2K\x1b[?25h"


def owns_process() -> bool:
    """Whether this process runs a command, which may end it."""
    return bool(_program)


# SLURM and other schedulers send SIGUSR1 or SIGUSR2 before a time limit. These and
# SIGHUP are skipped if the program handles or ignores them, as with ``nohup``.
def stop_signals() -> list[signal.Signals]:
    """Returns the signals that ask a run to save and end."""
    found = [signal.SIGINT, signal.SIGTERM]
    for signum in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        handler = signal.getsignal(signum)
        # In a command the handler belongs to this module or to the code that it runs.
        if handler == signal.SIG_DFL or (owns_process() and handler != signal.SIG_IGN):
            found.append(signum)
    return found


def before_exit(call: Callable[[], object]) -> None:
    """Sets a function that `end` calls just before the process ends."""
    global _before_exit
    _before_exit = call


# A Python handler would never run: the thread that aborts does not return to Python.
# If the function returns, the process aborts.
def before_abort(call: Callable[[], object]) -> None:
    """Sets a function to call before native code aborts the process."""
    global _abort_handler
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signum: call())
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_handler)


# Blocked threads and stopped workers do not delay it. It skips teardown, because
# threads of native code may crash on objects that are gone.
def end(status: int, message: object = "", *, resumes: bool = False) -> NoReturn:
    """Ends the process now with a line; with `resumes`, also prints the command."""
    # Never released: a second caller waits until the process has ended.
    _last_words.acquire()
    try:
        lines = [f"{' '.join(_program[:2])}: {message}"] if message else []
        if resumes:
            lines.append(f"  {shlex.join(_program)}")
        for worker in multiprocessing.active_children():
            worker.kill()
        _kill_spawned()
        # Not through Python's files: another thread may hold their locks forever.
        if os.isatty(_OUTPUT):
            with contextlib.suppress(OSError):  # It may have been hung up.
                os.write(_OUTPUT, _LEAVES_BAR)
        os.write(_ERRORS, "".join(f"{line}\n" for line in lines).encode())
        _before_exit()
    finally:
        os._exit(status)


# `multiprocessing` does not list them yet. They read their task from this process, and
# would print long tracebacks when it ends. Only Linux can list them.
def _kill_spawned() -> None:
    for path in Path("/proc").glob("[0-9]*"):
        # Other processes may end in the meantime.
        with contextlib.suppress(OSError):
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            is_child = int(parent) == os.getpid()
            # Python's resource tracker is another child, which frees resources.
            if is_child and b"spawn_main" in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)


def drop_lost_outputs() -> bool:
    """Redirects outputs without a reader to null; returns whether there was one."""
    outputs = select.poll()
    for descriptor in (_OUTPUT, _ERRORS):
        outputs.register(descriptor, 0)  # reports what is wrong, and nothing else
    closed = select.POLLERR | select.POLLHUP  # as Linux and macOS call it
    gone = [number for number, event in outputs.poll(0) if event & closed]
    for descriptor in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    return bool(gone)


class _Output(io.FileIO):
    """An output of this process; once its reader has gone, writes do nothing."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            drop_lost_outputs()
            said = "nobody reads its output any more; it goes on, and prints no more"
            os.write(_ERRORS, f"{' '.join(_program[:2])}: {said}\n".encode())
            return len(data)


def outlive_readers() -> None:
    """Lets this process go on if the reader of an output goes away, as `head` does."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            raw = io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False))
            coding = stream.encoding, stream.errors
            setattr(sys, name, io.TextIOWrapper(raw, *coding, line_buffering=True))


# It works only in the main thread, which gets Python's signals. Only the last entered
# one gets a signal.
class SignalThread:
    """Calls a function in its own thread for every signal that has a handler."""

    def __init__(self, on_signal: Callable[[int], None]):
        self._on_signal = on_signal
        self._before: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
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
    """Makes the first signal end this process, from now until exit.

    A command uses it at its start and its end, when nothing needs saving. While a run
    trains, `training.processes.interrupt` handles signals instead.

    Ctrl-C reaches all processes of a terminal, and a scheduler's signal all processes
    of a job. Processes started in this block have these signals blocked from the start:
    otherwise they would end, or print a traceback, while this process needs them.
    SIGTERM is not blocked, because this process ends them with it.
    """

    def __init__(self, argv: Sequence[str]):
        self._argv = tuple(argv)
        self._listener = SignalThread(self._end)

    def __enter__(self) -> Self:
        global _program
        _program = self._argv
        # Python's tracker frees the resources of killed workers and would print it.
        warnings = os.environ.get("PYTHONWARNINGS", "")
        os.environ["PYTHONWARNINGS"] = f"{warnings},ignore:resource_tracker".strip(",")
        self._listener.__enter__()
        self._handlers = {
            # The thread has already got the signal.
            signum: signal.signal(signum, lambda *_: None)
            for signum in stop_signals()
            if signal.getsignal(signum) != signal.SIG_IGN
        }
        # Threads and processes inherit the mask. The listener, which was started
        # before, still gets the signals.
        blocked = {*self._handlers} - {signal.SIGTERM}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        # The tracker's start unblocks Ctrl-C in the current thread.
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

    def _end(self, signum: int) -> None:
        if signum in self._handlers:
            name = signal.Signals(signum).name
            again = "run the same command to resume"
            end(128 + signum, f"interrupted by {name}; {again}", resumes=True)
