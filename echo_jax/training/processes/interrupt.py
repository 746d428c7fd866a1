"""Stops a run on a signal and saves it."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

import jax
from jax.experimental import multihost_utils

from echo_jax.terminal import ending
from echo_jax.training.processes import peers


class Interrupted(Exception):
    """A signal stopped the run; exit_code is 128 + signum, as a shell reports it."""

    def __init__(self, update: int, signum: int, *, unsaved: str = ""):
        self.update = update
        self.signum = signum
        self.exit_code = 128 + signum
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name} after update {update}, {_rest(unsaved)}")


class DataTimeoutError(Exception):
    """The data did not come for ``config.data.timeout_s`` seconds."""

    # As in sysexits.h: another attempt may succeed.
    exit_code = 75

    def __init__(self, what: str, update: int, *, unsaved: str = ""):
        self.update = update
        waited = f"{peers.here().name} waited".strip()
        super().__init__(
            f"{waited} {what}, which is longer than --config.data.timeout_s allows; "
            f"stopped after update {update}, {_rest(unsaved)}"
        )


def _rest(unsaved: str) -> str:
    if unsaved:
        return f"and not saved: {unsaved}"
    return "and saved; run the same command again to resume"


class StopSignal:
    """Turns the first stop signal into a flag, `received`; a second one aborts."""

    # A thread calls `on_first`, also while the main thread is busy. If several
    # processes share a run, jax's runtime hears of the signal instead.
    def __init__(self, on_first: Callable[[int], None] = lambda signum: None):
        self.received: int | None = None
        self._before = {}
        self._is_shared = jax.process_count() > 1
        self._on_first = on_first
        self._heard = 0  # The thread may hear of a signal before its handler runs.
        self._listener = ending.SignalThread(self._hear)

    def __enter__(self) -> Self:
        # Python gives signals to the main thread only.
        if threading.current_thread() is threading.main_thread():
            self._listener.__enter__()
            for signum in ending.stop_signals():
                # jax's runtime handles SIGTERM if it connects several processes.
                if not (self._is_shared and signum == signal.SIGTERM):
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._listener.__exit__()

    def asked(self, update: int) -> int | None:
        """Returns the signal that asked for a stop after an update; None to go on."""
        if not self._is_shared:
            return self.received
        # jax's runtime finds an update that no process has reached yet.
        reached = multihost_utils.reached_preemption_sync_point(update)
        return signal.SIGTERM if reached else None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.received:
            self._abort(signum)
            raise KeyboardInterrupt
        self.received = signum
        if signum == signal.SIGHUP and ending.owns_process():
            ending.drop_lost_outputs()

    def _hear(self, signum: int) -> None:
        if signum not in self._before:
            return
        self._heard += 1
        if self._heard > 1:
            self._abort(signum)
        elif self._is_shared:
            # jax's runtime listens to SIGTERM.
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self._on_first(signum)

    def _abort(self, signum: int) -> None:
        if ending.owns_process():
            name = signal.Signals(signum).name
            what = f"ended at once by a second signal, {name}, without saving"
            again = "run the same command to resume from the last checkpoint"
            ending.end(128 + signum, f"{what}; {again}", resumes=True)
