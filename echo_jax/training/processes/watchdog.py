"""Reports what a run waits for, and ends a wait after a signal or a timeout.

A thread watches the wait that the trainer is in. To end the wait, it sends the main
thread a signal whose handler raises, which ends every wait in Python. That may happen
at any line, so the read data is not used afterwards. The data continues from the state
that was noted before the wait.

A handler cannot end a wait in native code. In the process of a command, the thread
then saves the run itself, and ends the process.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Self, TypeVar

from echo_jax.config.run import RunSpec
from echo_jax.terminal import ending
from echo_jax.training.processes.interrupt import DataTimeoutError

# A wait is reported after this time, then after twice as long, and so on.
_NOTE_S = 30.0
# How long a stopped run waits for its input. A grace period is at least 10 s (docker)
# and usually 30 s.
_STOPPING_S = 2.0
# The same if several processes share the run: it is saved only if all data comes.
_STOPPING_TOGETHER_S = 12.0
# How long a wait may take to end after the signal to end it.
_STUCK_S = 2.0
# Ignored by default; neither Python nor jax uses it.
_WAKE = signal.SIGURG

# Data that hangs, kept for as long as the process lives.
_ABANDONED: list[Any] = []

_Item = TypeVar("_Item")


class Stalled(NamedTuple):
    """A wait that was ended."""

    what: str  # The awaited data, and since when.
    # The signal that asked for a stop; None if the wait took too long.
    signum: int | None
    state: Any  # The feed's state before the wait; None if the feed itself knows it.
    is_known: bool  # Whether the feed can be asked while the main thread waits.
    is_stuck: bool = False  # Whether the main thread could not leave the wait.


class _GivenUp(BaseException):
    """Ends a wait; not an Exception, so that nobody takes it for a failed read."""


class _Wait(NamedTuple):
    what: str  # The awaited data.
    began_s: float  # Its start.
    state: Any  # The feed's state before it.
    anywhere: bool  # Whether it may be ended at any line, and not only in a lock.


class Watchdog:
    """Watches the waits of a run for its data; see the module."""

    now = staticmethod(time.monotonic)
    look_every_s = 0.5

    # `end` saves the run and returns the exception to raise. It runs in the main
    # thread, or in the watchdog's while that is stuck. timeout_s=0 never ends a wait.
    def __init__(
        self,
        data: str = "",
        *,
        timeout_s: float = 0.0,
        is_shared: bool = False,
        note: Callable[[str], None] = lambda line: None,
        end: Callable[[Stalled], Any] = lambda stalled: TimeoutError(stalled.what),
    ):
        self._note, self.end = note, end
        self._data, self._timeout_s = data, timeout_s
        self._stopping_s = _STOPPING_TOGETHER_S if is_shared else _STOPPING_S
        self._wait: _Wait | None = None
        self._looked_at: _Wait | None = None
        self._next_note_s = _NOTE_S
        self._signal: tuple[int, float] | None = None
        self._given_up: tuple[_Wait, Stalled, float] | None = None
        self._is_taken_over = False
        self._is_abandoned = False
        self._done = threading.Event()
        self._main: int | None = None

    @classmethod
    def of_data(cls, config: RunSpec, note: Callable[[str], Any]) -> Self:
        """Returns a watchdog for a reader of data that has nothing to save."""

        def end(stalled: Stalled) -> DataTimeoutError:
            return DataTimeoutError(
                stalled.what, 0, unsaved="there was nothing to save"
            )

        return cls(
            describe_data(config), timeout_s=config.data.timeout_s, note=note, end=end
        )

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

    def waiting(
        self, what: str, state: Any = None, *, anywhere: bool = True
    ) -> "_Waiting":
        """Returns a context for a wait; raises the exception of ``end``."""
        return _Waiting(self, _Wait(what, self.now(), state, anywhere))

    def each(self, items: Iterable[_Item], what: str) -> Iterator[_Item]:
        """Yields items, and watches the wait for each of them."""
        iterator = iter(items)
        while True:
            with self.waiting(what):
                item = next(iterator, self)
            if item is self:
                return
            yield item  # type: ignore[misc]

    @contextlib.contextmanager
    def closing(self, data: Any) -> Iterator[Any]:
        """Closes the data at the end, unless a wait for it was abandoned."""
        try:
            yield data
        finally:
            # To close or delete data that hangs would hang, too. Its daemon threads do
            # not keep the process alive.
            if self._is_abandoned:
                _ABANDONED.append(data)
            else:
                data.close()

    def stop(self, signum: int) -> None:
        """Ends waits soon, because a signal asked for a stop."""
        self._signal = (signum, self.now())

    def look(self) -> None:
        """Looks at the wait once: reports it, or ends it."""
        wait = self._wait
        if wait is None:
            return
        if wait is not self._looked_at:
            self._looked_at, self._next_note_s = wait, _NOTE_S
        now = self.now()
        waited_s = now - wait.began_s
        if waited_s >= self._next_note_s:
            while self._next_note_s <= waited_s:
                self._next_note_s *= 2
            # The terminal may have been hung up; the run continues.
            with contextlib.suppress(OSError):
                self._note(f"waits {self._said(wait, waited_s)}")
        if self._given_up is not None and self._given_up[0] is wait:
            self._wake(wait, *self._given_up[1:])
        elif self._signal is not None and now - self._signal[1] >= self._stopping_s:
            self._give_up(wait, now, self._signal[0])
        elif 0 < self._timeout_s <= waited_s:
            self._give_up(wait, now, None)

    def _said(self, wait: _Wait, waited_s: float) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited_s))
        data = f" ({self._data})" if self._data else ""
        return f"for {wait.what} since {since}, for {waited_s:.0f} s{data}"

    def _give_up(self, wait: _Wait, now: float, signum: int | None) -> None:
        said = self._said(wait, now - wait.began_s)
        stalled = Stalled(said, signum, wait.state, wait.anywhere)
        self._given_up = (wait, stalled, now)
        self._wake(wait, *self._given_up[1:])

    def _wake(self, wait: _Wait, stalled: Stalled, since_s: float) -> None:
        # Outside of the main thread waits are only reported.
        if self._main is None:
            return
        if self.now() - since_s < _STUCK_S or not ending.owns_process():
            signal.pthread_kill(self._main, _WAKE)
            return
        # One thread sees the other: the main thread clears its wait before it checks.
        self._is_taken_over = True
        if self._wait is wait:
            self._end_process(stalled._replace(is_stuck=True))
        self._is_taken_over = False

    def _end_process(self, stalled: Stalled) -> NoReturn:
        try:
            error = self.end(stalled)
        except BaseException as failed:
            error = failed
        ending.end(getattr(error, "exit_code", 1), error, resumes=True)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        wait = self._wait
        if wait is None or self._given_up is None or self._given_up[0] is not wait:
            return
        assert frame is not None
        is_in_lock = frame.f_code.co_filename == threading.__file__
        # On entry and exit of the wait nobody would catch it.
        if is_in_lock or (wait.anywhere and frame.f_code not in _EDGES):
            raise _GivenUp

    def _watch(self) -> None:
        while not self._done.wait(self.look_every_s):
            self.look()


class _Waiting:
    def __init__(self, watchdog: Watchdog, wait: _Wait):
        self._watchdog, self._wait = watchdog, wait

    def __enter__(self) -> None:
        self._watchdog._wait = self._wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
        watchdog = self._watchdog
        watchdog._wait = None
        while watchdog._is_taken_over:
            time.sleep(watchdog.look_every_s)
        if error is not None and not isinstance(error, Exception):
            watchdog._is_abandoned = True
        if isinstance(error, _GivenUp):
            assert watchdog._given_up is not None
            raise watchdog.end(watchdog._given_up[1]) from None


_EDGES = (_Waiting.__enter__.__code__, _Waiting.__exit__.__code__)


def describe_data(config: RunSpec) -> str:
    """Describes where the data of a run comes from, and which pipeline reads it."""
    data = config.data
    source = f"data.source={data.source}" if data.source else f"of {config.workload}"
    return (
        f"{source}, read with data.pipeline={data.pipeline}, "
        f"data.workers={data.workers}, data.threads={data.threads}"
    )
