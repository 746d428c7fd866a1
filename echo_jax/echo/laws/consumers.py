"""Law 11 of an echo: one consumer at a time, and no leftover threads."""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from echo_jax.echo.laws.harness import Record, Trial, close, uses_of

__all__ = ["one_consumer"]

# Limits for events that take milliseconds if the law holds: an answer to a second
# thread, and the end of an unneeded thread.
_ANSWER_S = 10.0
_END_S = 10.0


class _Blocking(Sequence[Any]):
    """Items whose first read sets one event, and waits for the other."""

    def __init__(self, items: list[Any], started: Any, released: Any):
        self._items, self._started, self._released = items, started, released

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if not self._started.is_set():
            self._started.set()
            # Longer than the check waits for the other thread.
            self._released.wait(4 * _ANSWER_S)
        return self._items[index]


def one_consumer(trial: Trial, record: Record) -> None:
    """Law 11: a second thread is refused, a close is final, no thread stays."""
    if not trial.num_items:
        return
    _check_two_threads(trial, record)
    _check_close(trial, lambda echo: echo.close(), "after a close")
    _check_close(trial, lambda echo: echo.__exit__(None, None, None), "after a with")
    _check_threads(trial, close, "that was closed")
    _check_threads(trial, lambda _: None, "that was dropped")


def _check_two_threads(trial: Trial, record: Record) -> None:
    """Requests an output while another thread waits for one."""
    started, released = threading.Event(), threading.Event()
    echo, _ = trial.start(wrap=lambda items: _Blocking(items, started, released))
    first, second = [_in_thread(echo) for _ in range(2)]
    first[0].start()
    where = "where another thread waits for an output"
    try:
        if not started.wait(4 * _ANSWER_S):
            trial.fail(11, "at the start", "a read of the upstream", "none")
        second[0].start()
        second[0].join(_ANSWER_S)
        if not second[1]:
            trial.fail(11, where, "a ValueError at once", "waiting")
        if not isinstance(second[1][0], ValueError):
            trial.fail(11, where, "a ValueError", second[1][0])
    finally:
        released.set()
        first[0].join(4 * _ANSWER_S)
    outputs = [*first[1], *map(uses_of, trial.limited(echo))]
    close(echo)
    trial.compare(11, "after another thread was refused", record.outputs, outputs)


def _in_thread(echo: Any) -> tuple[threading.Thread, list[Any]]:
    """Returns a thread that requests one output, and the list of its result."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(uses_of(next(echo)))
        except BaseException as error:
            found.append(error)

    return threading.Thread(target=ask, daemon=True), found


def _check_close(trial: Trial, shut: Callable[[Any], None], what: str) -> None:
    """Closes an echo in the middle, twice, and requests more."""
    for outputs in (0, 1):
        echo, _ = trial.start()
        missing = [
            name
            for name in ("close", "__enter__", "__exit__")
            if not hasattr(echo, name)
        ]
        if missing:
            trial.fail(11, "of a new echo", "a context manager with close", missing)
        if echo.__enter__() is not echo:
            trial.fail(11, "at the start of a with", "the echo itself", "another")
        for _ in range(outputs):
            next(echo)
        shut(echo)
        shut(echo)
        for _ in range(2):
            try:
                found = uses_of(next(echo))
            except ValueError:
                continue
            except BaseException as error:
                found = repr(error)
            trial.fail(11, what, "a ValueError", found)


def _check_threads(trial: Trial, end: Callable[[Any], None], what: str) -> None:
    """Fails if an echo leaves a thread behind."""
    before = set(threading.enumerate())
    echo, _ = trial.start()
    next(echo)
    end(echo)
    del echo
    deadline = time.monotonic() + _END_S
    while left := set(threading.enumerate()) - before:
        if time.monotonic() > deadline:
            trial.fail(
                11, f"of an echo {what}", "no thread left", sorted(map(str, left))
            )
        gc.collect()
        time.sleep(0.001)
