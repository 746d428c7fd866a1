"""Signals of a command, and the end of its process at once, in any state.

Python runs the handler of a signal in the main thread, and only between two bytecodes.
It does not run while that thread compiles or waits in native code. But the signal is
also written to a socket when it arrives, and a thread that reads the socket gets every
signal.
"""

import contextlib
import multiprocessing
import os
import select
import shlex
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NoReturn, Self

# The command of this process, if the process has no other purpose. It is global, like
# signal handlers.
_program: tuple[str, ...] = ()
_last_words = threading.Lock()
_OUTPUT, _ERRORS = 1, 2  # descriptors
_ASKED = (signal.SIGINT, signal.SIGTERM)
# Slurm and other schedulers send SIGUSR1 or SIGUSR2 before a time limit.
_STOPS = (*_ASKED, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# Clears the line and shows the cursor, which a progress bar hides.
_LEAVES_BAR = b"\r\x1b[2K\x1b[?25h"


def owns_process() -> bool:
    """Whether this process runs a command, which may end it."""
    return bool(_program)


# Blocked threads and stopped workers do not delay it. It skips teardown, because
# threads of native code may crash on objects that are gone.
def end(status: int, message: object = None) -> NoReturn:
    """Ends the process now; prints a message, and the command to repeat."""
    # Never released: a second caller waits until the process has ended.
    _last_words.acquire()
    try:
        for worker in multiprocessing.active_children():
            worker.kill()
        # Not through Python's files: another thread may hold their locks forever.
        if os.isatty(_OUTPUT):
            with contextlib.suppress(OSError):  # It may have been hung up.
                os.write(_OUTPUT, _LEAVES_BAR)
        if message:
            said = f"{' '.join(_program[:2])}: {message}\n  {shlex.join(_program)}\n"
            os.write(_ERRORS, said.encode())
    finally:
        os._exit(status)


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


class StopSignals:
    """Hears signals that ask for a stop, also while the main thread is in native code.

    A thread calls `on_first` for the first one. A second one ends the process of a
    command, and raises KeyboardInterrupt in the main thread of any other. Only the last
    entered object hears signals, and only in the main thread, which Python gives them.

    Attributes:
      received: The first signal, once the main thread knows of it; None before.
      signums: The signals that it hears.
    """

    def __init__(self, on_first: Callable[[int], None], *, without: Sequence[int] = ()):
        self._on_first, self._without = on_first, without
        self._heard = 0  # By the thread, perhaps before the handler runs.
        self.received: int | None = None
        self.signums: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        descriptor = self._writer.fileno()
        self._before = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        for signum in filter(_is_free, {*_STOPS} - {*self._without}):
            self.signums[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        if self.signums:
            for signum, handler in self.signums.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(self._before)
            self._writer.close()
            self._thread.join()
            self._reader.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and not owns_process():
            raise KeyboardInterrupt
        self.received = self.received or signum

    def _listen(self) -> None:
        while numbers := self._reader.recv(64):
            for signum in numbers:
                if signum in self.signums:
                    self._hear(signum)

    def _hear(self, signum: int) -> None:
        self._heard += 1
        if signum == signal.SIGHUP and owns_process():
            drop_lost_outputs()
        if self._heard == 1:
            self._on_first(signum)
        elif owns_process():
            name = signal.Signals(signum).name
            what = f"ended at once by a second signal, {name}, without saving"
            again = "run the same command to resume from the last checkpoint"
            end(128 + signum, f"{what}; {again}")


def _is_free(signum: int) -> bool:
    """Whether the program neither ignores a signal, as with ``nohup``, nor needs it."""
    handler = signal.getsignal(signum)
    # In a command the handler belongs to this module or to the code that it runs.
    is_ours = signum in _ASKED or handler == signal.SIG_DFL or owns_process()
    return is_ours and handler != signal.SIG_IGN


@contextlib.contextmanager
def owning_process(argv: Sequence[str]) -> Iterator[None]:
    """Makes this process that of a command: the first signal ends it.

    This holds while nothing needs saving, at the start and the end of the command. In
    between, a run that trains hears the signals.

    Ctrl-C reaches all processes of a terminal, and a scheduler's signal all processes
    of a job. Processes started in this block have these signals blocked from the start:
    otherwise they would end, or print a traceback, while this process needs them.
    SIGTERM is not blocked, because this process ends them with it.
    """
    global _program
    _program = tuple(argv)
    # Python's tracker frees the resources of killed workers and would print it.
    warnings = os.environ.get("PYTHONWARNINGS", "")
    os.environ["PYTHONWARNINGS"] = f"{warnings},ignore:resource_tracker".strip(",")

    def end_now(signum: int) -> None:
        name = signal.Signals(signum).name
        again = "run the same command to resume"
        end(128 + signum, f"interrupted by {name}; {again}")

    with StopSignals(end_now) as signals:
        # Threads and processes inherit the mask. The thread that hears signals, which
        # was started before, still gets them.
        blocked = {*signals.signums} - {signal.SIGTERM}
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        # The tracker's start unblocks Ctrl-C in the current thread.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _program = ()
