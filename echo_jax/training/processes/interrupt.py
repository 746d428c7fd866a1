"""Stops a run on a signal and saves it."""

import os
import signal
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils

from echo_jax.terminal import ending

_AGAIN = "run the same command again to go on from the last checkpoint"


class Interrupted(Exception):
    """A signal stopped the run; exit_code is 128 + signum, as a shell reports it."""

    # With `waited`, the run waited for this and is not saved.
    def __init__(self, update: int, signum: int, *, waited: str = ""):
        self.update, self.signum = update, signum
        self.exit_code = 128 + signum
        how = f"after update {update}, and saved; run the same command again to resume"
        if waited:
            how = f"while it waited {waited}; not saved: {_AGAIN}"
        super().__init__(f"stopped by {signal.Signals(signum).name} {how}")


class DataTimeoutError(Exception):
    """The data did not come for ``config.data.timeout_s`` seconds."""

    # As in sysexits.h: another attempt may succeed.
    exit_code = 75

    def __init__(self, waited: str):
        super().__init__(
            f"waited {waited}, which is longer than --config.data.timeout_s allows; "
            f"not saved: {_AGAIN}"
        )


class StopSignal(ending.StopSignals):
    """Asks a run to stop and save; if several processes share it, all of them."""

    # A thread calls `on_first`, also while the main thread is busy.
    def __init__(self, on_first: Callable[[int], None] = lambda signum: None):
        self._is_shared = jax.process_count() > 1

        def hear(signum: int) -> None:
            on_first(signum)
            if self._is_shared:
                # jax's runtime listens to SIGTERM, and tells the other processes.
                os.kill(os.getpid(), signal.SIGTERM)

        super().__init__(hear, without=[signal.SIGTERM] if self._is_shared else [])

    def asked(self, update: int) -> int | None:
        """Returns the signal that asked for a stop after an update; None to go on."""
        if not self._is_shared:
            return self.received
        # jax's runtime finds an update that no process has reached yet.
        reached = multihost_utils.reached_preemption_sync_point(update)
        return signal.SIGTERM if reached else None
