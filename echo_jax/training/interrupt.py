"""Stopping a run by Ctrl-C or SIGTERM, without losing it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

__all__ = ["Interrupted", "StopSignal"]


class Interrupted(Exception):
    """A run was stopped by a signal and saved; the same command resumes it.

    A run on one held batch is never saved; the same command starts it anew.

    Attributes:
      update: Updates done.
      signum: The signal.
      exit_code: What a command should exit with, as a shell reports it: 130 after
        Ctrl-C, 143 after SIGTERM.
    """

    def __init__(self, update: int, signum: int, *, saved: bool = True):
        self.update = update
        self.signum = signum
        self.exit_code = 128 + signum
        rest = (
            "and saved; run the same command again to resume"
            if saved
            else "and not saved: a run with data.hold_batch=True never is"
        )
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after update {update}, {rest}")


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into a flag; a second Ctrl-C aborts.

    Outside of the main thread, where Python gives no signals, it does nothing.

    Attributes:
      received: The signal that asked for a stop; None while there was none.

    Example:
      >>> with StopSignal() as stop:
      ...     while not stop.received:
      ...         work()
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.received: int | None = None
        self._before = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in self._SIGNALS:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum
