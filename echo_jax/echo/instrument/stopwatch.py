"""Times batches and updates from outside, and finds their means and R's interval.

A loader is timed by taking batches from it, a step by waiting for its output. Both are
calls that `time_calls` repeats.

Some steps are slow on purpose: every fourth one applies the gradients, every hundredth
one logs. Throughput follows from their mean, and a median would hide them. Others are
slow because another process used the machine once. They would spoil a mean. Slow steps
of the first kind recur; the others do not.
"""

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import numpy as np

from echo_jax.echo.tree import flatten

__all__ = [
    "MAX_IN_FLIGHT",
    "BoundedSteps",
    "SlowSteps",
    "StepTimes",
    "endless",
    "ratio_interval",
    "step_times",
    "time_calls",
    "wait_for",
]

MAX_IN_FLIGHT = 2
"""Dispatches that may be under way whenever a loop waits, in training as here.

Enough to hide the host's work. With more, a host that runs ahead would be mistaken
for a fast device, and collectives of many queued steps can hang on few CPU cores."""

# Types of values that are computed when a step returns them.
_COMPUTED = (np.ndarray, np.generic, bool, int, float, complex)

# A slow step takes more than _SLOW times the median, of all steps and of its window,
# and more than _PART_OF_SLOW of the median slow step, so that noise does not count.
_SLOW, _PART_OF_SLOW = 2.0, 0.5
# Slow steps recur if more than half of _PARTS equal parts of the measurement have one,
# or if they are more than the share _OFTEN of all steps. Otherwise they are left out.
_PARTS, _OFTEN = 5, 0.1
# They are periodic if _LEAST_GAPS gaps were seen, and _EQUAL_GAPS of them are equal.
# Then each window counts them as often as whole periods do, wherever it begins.
_LEAST_GAPS, _EQUAL_GAPS = 3, 0.75
# With fewer per window, gaps do not separate periodic slow steps from irregular ones.
_FEW = 3

# 97.5 % points of Student's t, by degrees of freedom.
_STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776}


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


def endless(upstream: Iterable[Any]) -> Generator[Any, None, None]:
    """Yields the items of an iterable again and again; an iterator must not end."""
    iterator, taken = iter(upstream), 0
    # The caller's iterator is not closed here, and cannot start again.
    owned = iterator is not upstream
    while True:
        before = taken
        try:
            for item in iterator:
                taken += 1
                yield item
        finally:
            if owned and hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        if not owned:
            raise ValueError(
                f"the upstream, an iterator, ended after {taken} batches; give the "
                "iterable that it is from, which can be started again"
            )
        if taken == before:
            raise ValueError("the upstream is empty; give an iterable of batches")
        iterator = iter(upstream)


@dataclasses.dataclass(frozen=True)
class SlowSteps:
    """The steps that took more than twice as long as the median.

    Attributes:
      count: How many were seen.
      mean_s: Their mean seconds.
      others_s: Mean seconds of the other steps.
      recur: Whether they come again and again, so that the step itself causes them.
      period: One step in this many is slow, at equal gaps; 0 if gaps are not equal.
      are_few: Whether they recur, but too few were seen to know how often.
    """

    count: int
    mean_s: float
    others_s: float
    recur: bool
    period: int
    are_few: bool


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The mean time of a step."""

    timed: int  # steps
    # Over whole periods if slow steps are periodic, without them if they do not recur.
    mean_s: float
    window_means_s: tuple[float, ...]
    slow: SlowSteps | None
    # Possible error of the mean if slow steps are periodic and each window holds one
    # too many, or one too few; 0 if enough of them were seen.
    unseen_s: float


def step_times(windows: Sequence[Sequence[float]]) -> StepTimes:
    """Returns the mean seconds of steps, given the steps of each window."""
    every = [seconds for window in windows for seconds in window]
    is_slow = _are_slow(windows)
    everywhere = [flag for window in is_slow for flag in window]
    slow = _slow_steps(every, everywhere, _period(is_slow), len(windows))
    means = [_mean(*of, slow) for of in zip(windows, is_slow, strict=True)]
    unseen_s = 0.0
    if slow and slow.are_few:
        unseen_s = (slow.mean_s - slow.others_s) * len(windows) / len(every)
    mean_s = _mean(every, everywhere, slow)
    return StepTimes(len(every), mean_s, tuple(means), slow, unseen_s)


def _are_slow(windows: Sequence[Sequence[float]]) -> list[list[bool]]:
    typical_s = statistics.median_low(itertools.chain.from_iterable(windows))
    # If the whole machine is slow in a window, none of its steps counts as slow.
    limited = [
        (window, _SLOW * max(typical_s, statistics.median_low(window)))
        for window in windows
    ]
    slow = [s for window, limit_s in limited for s in window if s > limit_s]
    least_s = _PART_OF_SLOW * statistics.median(slow) if slow else 0.0
    return [[s > max(limit_s, least_s) for s in window] for window, limit_s in limited]


def _slow_steps(
    every: Sequence[float], flags: Sequence[bool], period: int, num_windows: int
) -> SlowSteps | None:
    slow, others = _split(every, flags)
    if not slow:
        return None
    parts = {at * _PARTS // len(every) for at, flag in enumerate(flags) if flag}
    recur = len(parts) > _PARTS / 2 or len(slow) > _OFTEN * len(every)
    return SlowSteps(
        count=len(slow),
        mean_s=statistics.fmean(slow),
        others_s=statistics.fmean(others),
        recur=recur,
        period=period if recur else 0,
        are_few=recur and not period and len(slow) < _FEW * num_windows,
    )


def _split(steps: Sequence[float], flags: Sequence[bool]) -> tuple[list[float], ...]:
    """Returns the slow steps and the others."""
    others = [s for s, flag in zip(steps, flags, strict=True) if not flag]
    return list(itertools.compress(steps, flags)), others


def _period(is_slow: Sequence[Sequence[bool]]) -> int:
    """Returns the gap between slow steps if it is nearly always the same, else 0."""
    gaps = []
    for window in is_slow:
        slow_at = [at for at, flag in enumerate(window) if flag]
        gaps += [after - before for before, after in itertools.pairwise(slow_at)]
    if len(gaps) < _LEAST_GAPS:
        return 0
    period = statistics.mode(gaps)
    num_slow, num_steps = sum(map(sum, is_slow)), sum(map(len, is_slow))
    # A window may begin and end anywhere in a period, so each may be one off.
    is_everywhere = num_slow + len(is_slow) >= _EQUAL_GAPS * num_steps / period
    is_constant = gaps.count(period) >= _EQUAL_GAPS * len(gaps)
    return period if period > 1 and is_constant and is_everywhere else 0


def _mean(
    window: Sequence[float], is_slow: Sequence[bool], slow: SlowSteps | None
) -> float:
    if slow is None or (slow.recur and not slow.period):
        return statistics.fmean(window)
    own, others = _split(window, is_slow)
    others_s = statistics.fmean(others)
    if not slow.recur:
        return others_s
    # A window that is shorter than a period may have no slow step.
    slow_s = statistics.fmean(own) if own else slow.mean_s
    return ((slow.period - 1) * others_s + slow_s) / slow.period


def ratio_interval(
    ups: Sequence[Sequence[float]], downs: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Returns the 95 % interval of R from seconds per batch and step of each round."""
    # Student's interval over the rounds: times within a round may correlate, such as in
    # bursts and periods; rounds hardly do. It also spans two unknowns: whether slow
    # steps that do not recur are the step's own, and how often slow steps come if few
    # were seen.
    times = step_times(downs)
    low, high = _student(ups, times.mean_s, times.window_means_s)
    if times.slow and not times.slow.recur:
        mean_s = statistics.fmean(itertools.chain.from_iterable(downs))
        counted = _student(ups, mean_s, [statistics.fmean(down) for down in downs])
        low = min(low, counted[0])
    most_s = times.mean_s + times.unseen_s
    least_s = times.mean_s - times.unseen_s
    if times.slow:
        least_s = max(least_s, min(times.mean_s, times.slow.others_s))
    return low * times.mean_s / most_s, high * times.mean_s / least_s


def _student(
    ups: Sequence[Sequence[float]], down_s: float, down_means_s: Sequence[float]
) -> tuple[float, float]:
    ratios = [
        statistics.fmean(up) / mean_s
        for up, mean_s in zip(ups, down_means_s, strict=True)
    ]
    ratio = statistics.fmean(itertools.chain.from_iterable(ups)) / down_s
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    reach = _STUDENT_T[len(ratios) - 1] * error
    return max(ratio - reach, 0.0), ratio + reach
