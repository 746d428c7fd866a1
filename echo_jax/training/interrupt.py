"""Stopping a run by Ctrl-C or SIGTERM, without losing it."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

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
        self._is_shared = jax.process_count() > 1

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            # SIGTERM belongs to jax's runtime where it connects several processes.
            for signum in self._SIGNALS[: 1 if self._is_shared else None]:
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

    def asked(self, update: int) -> int | None:
        """Returns the signal that asked for a stop here; None to go on.

        Several processes stop at the same update, whichever of them has got the
        signal: jax's runtime finds one that all of them have still before them.

        Args:
          update: Updates done; more at every call.
        """
        if not self._is_shared:
            return self.received
        reached = multihost_utils.reached_preemption_sync_point(update)
        return signal.SIGTERM if reached else None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signum
        if self._is_shared:
            # The runtime listens to this one.
            os.kill(os.getpid(), signal.SIGTERM)
