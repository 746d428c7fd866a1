"""Times the loading of a batch and an update, from outside.

A loader is timed by taking batches from it, a step by waiting for its output. Both are
calls that `time_calls` repeats.
"""

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from echo_jax.echo.tree import flatten

__all__ = ["MAX_IN_FLIGHT", "BoundedSteps", "time_calls", "wait_for"]

MAX_IN_FLIGHT = 2
"""Dispatches that may be under way whenever a loop waits, in training as here.

Enough to hide the host's work. With more, a host that runs ahead would be mistaken
for a fast device, and collectives of many queued steps can hang on few CPU cores."""

# Types of values that are computed when a step returns them.
_COMPUTED = (np.ndarray, np.generic, bool, int, float, complex)


def wait_for(output: Any) -> None:
    """Waits for all arrays in the output of a step; raises TypeError without any."""
    leaves = _leaves(output)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "block_until_ready")]
    if not arrays and not any(isinstance(leaf, _COMPUTED) for leaf in leaves):
        raise TypeError(
            f"the step returned a {type(output).__name__}, which says nothing about "
            "when the update is done; return the loss, or another array that the "
            "update computes"
        )
    for array in arrays:
        array.block_until_ready()


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves; dataclasses count as containers (flax states are such)."""
    leaves = []
    for _, leaf in flatten(tree):
        if hasattr(leaf, "block_until_ready") or not dataclasses.is_dataclass(leaf):
            leaves.append(leaf)
        else:
            fields = dataclasses.fields(leaf)
            leaves += _leaves([getattr(leaf, field.name) for field in fields])
    return leaves


class BoundedSteps:
    """Performs updates with at most two of them in flight."""

    def __init__(
        self, step: Callable[[Any], Any], wait: Callable[[Any], None] = wait_for
    ):
        self._step, self._wait = step, wait
        self._in_flight: deque[Any] = deque()

    def __call__(self, batch: Any) -> None:
        """Starts an update, and waits for the one before the last."""
        self._in_flight.append(self._step(batch))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._wait(self._in_flight.popleft())

    def finish(self) -> None:
        """Waits for all updates."""
        while self._in_flight:
            self._wait(self._in_flight.popleft())


def time_calls(
    call: Callable[[], Any],
    *,
    window_s: float,
    settle_s: float = 0.0,
    settle_calls: int = 0,
    least: int = 2,
    most: int = 10_000,
    stride: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of every call in a window, from end to end."""
    # First come uncounted calls, then the calls of the window. Both end with a call, at
    # a moment that does not depend on later ones. So the expected time of a window is
    # its expected number of calls times the mean call, also if calls differ widely
    # (Wald's identity). For calls that differ in a cycle of `stride`, the window holds
    # whole cycles, unless that takes more than twice its time.
    start = now()
    settled = 0
    while settled < settle_calls or (now() - start < settle_s and settled < most):
        call()
        settled += 1
    ends = [now()]
    while True:
        call()
        ends.append(now())
        calls, elapsed_s = len(ends) - 1, ends[-1] - ends[0]
        if calls < least:
            continue
        is_aligned = calls % stride == 0 or elapsed_s >= 2 * window_s
        if calls >= most or (elapsed_s >= window_s and is_aligned):
            return [end - before for before, end in itertools.pairwise(ends)]
