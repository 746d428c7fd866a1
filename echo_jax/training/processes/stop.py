"""Stops a run after a signal, which saves it, or while it waits for its data.

Between two updates the loop asks `StopSignal`. The thread of a `Watchdog` watches the
wait that the trainer is in. In the process of a command it ends the process. In any
other program it sends the main thread a signal whose handler raises: that ends every
wait in Python, and none in native code. Neither saves the run, because nobody knows
where its data stands.
"""

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from echo_jax.config.run import RunSpec
from echo_jax.terminal import ending

# A wait is reported after this time, then after twice as long, and so on.
_NOTE_S = 30.0
# How long a stopped run waits for its input: docker kills after 10 s, most others
# after 30 s.
_STOPPING_S = 8.0
# Ignored by default; neither Python nor jax uses it.
_WAKE = signal.SIGURG

# Data that hangs, kept for as long as the process lives: to delete it would hang, too.
_ABANDONED: list[Any] = []

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


# A context of its own, since `contextlib` costs more in each update.
class _Wait:
    def __init__(self, watchdog: "Watchdog", what: str):
        self._watchdog, self.what = watchdog, what
        self.began_s, self.next_note_s = watchdog.now(), _NOTE_S

    def __enter__(self) -> None:
        self._watchdog.wait = self

    def __exit__(self, *error: object) -> None:
        self._watchdog.wait = None


class Watchdog:
    """Watches the waits of a run for its data; see the module."""

    now = staticmethod(time.monotonic)
    look_every_s = 0.5

    def __init__(self, config: RunSpec, note: Callable[[str], Any]):
        data, fields = config.data, ("pipeline", "workers", "threads")
        said = "".join(f", data.{name}={getattr(data, name)}" for name in fields)
        self._data = f"of {data.source or config.workload}{said}"
        self._timeout_s, self._note = data.timeout_s, note
        self.wait: _Wait | None = None
        self._signal: tuple[int, float] | None = None
        self._ended: tuple[_Wait, Exception] | None = None
        self._done = threading.Event()
        self._main: int | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._main = threading.get_ident()
            self._before = signal.signal(_WAKE, self._handle)
        self._thread = threading.Thread(
            target=self._watch, name="watchdog", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()
        if self._main is not None:
            signal.signal(_WAKE, self._before)

    def waiting(self, what: str) -> _Wait:
        """Returns a context for a wait, which may be ended at any line of it."""
        return _Wait(self, what)

    def each(self, items: Iterable[Any], what: str) -> Iterator[Any]:
        """Yields items, and watches the wait for each of them."""
        iterator = iter(items)
        with contextlib.suppress(StopIteration):
            while True:
                with self.waiting(what):
                    item = next(iterator)
                yield item

    @contextlib.contextmanager
    def closing(self, data: Any) -> Iterator[Any]:
        """Closes the data at the end, unless a wait for it was ended."""
        try:
            yield data
        finally:
            if self._ended is None:
                data.close()
            else:
                _ABANDONED.append(data)

    def stop(self, signum: int) -> None:
        """Ends waits soon, because a signal asked for a stop."""
        self._signal = (signum, self.now())

    def look(self) -> None:
        """Looks at the wait once: reports it, or ends it."""
        wait, now = self.wait, self.now()
        if wait is None:
            return
        waited_s = now - wait.began_s
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        said = f"for {wait.what} since {since}, for {waited_s:.0f} s ({self._data})"
        if waited_s >= wait.next_note_s:
            while wait.next_note_s <= waited_s:
                wait.next_note_s *= 2
            # The terminal may have been hung up; the run continues.
            with contextlib.suppress(OSError):
                self._note(f"waits {said}")
        # An evaluation waits often, and shortly: only a wait that lasts is ended.
        signum, asked_s = self._signal or (0, math.inf)
        if now - max(asked_s, wait.began_s) >= _STOPPING_S:
            self._end(wait, Interrupted(0, signum, waited=said))
        elif 0 < self._timeout_s <= waited_s:
            self._end(wait, DataTimeoutError(said))

    def _end(self, wait: _Wait, error: Interrupted | DataTimeoutError) -> None:
        if ending.owns_process():
            ending.end(error.exit_code, error)
        # Outside of the main thread waits are only reported.
        if self._main is not None:
            self._ended = wait, error
            signal.pthread_kill(self._main, _WAKE)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._ended is not None and self._ended[0] is self.wait:
            raise self._ended[1]

    def _watch(self) -> None:
        while not self._done.wait(self.look_every_s):
            self.look()
