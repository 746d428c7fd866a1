"""The mean time of a step, if some steps are slow.

Some steps are slow on purpose: every fourth one applies the gradients, every hundredth
one logs. Throughput follows from their mean, and a median would hide them. Others are
slow because another process used the machine once. They would spoil a mean. Slow steps
of the first kind recur; the others do not.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SlowSteps", "StepTimes", "step_times"]

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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class StepTimes:
    """The mean time of a step.

    Attributes:
      timed: How many steps were timed.
      mean_s: Mean seconds per step: over whole periods if slow steps are periodic,
        without them if they do not recur.
      window_means_s: The same, for every window.
      slow: The slow steps; None if there are none.
      unseen_s: Possible error of the mean if slow steps are periodic and each window
        holds one too many, or one too few; 0 if enough of them were seen.
    """

    timed: int
    mean_s: float
    window_means_s: tuple[float, ...]
    slow: SlowSteps | None
    unseen_s: float


def step_times(windows: Sequence[Sequence[float]]) -> StepTimes:
    """Returns the mean seconds of steps, given the steps of each window."""
    every = [seconds for window in windows for seconds in window]
    is_slow = _are_slow(windows)
    slow = _slow_steps(windows, is_slow)
    means = [
        _mean(window, window_is_slow, slow)
        for window, window_is_slow in zip(windows, is_slow, strict=True)
    ]
    everywhere = [slow_one for window in is_slow for slow_one in window]
    unseen_s = 0.0
    if slow and slow.are_few:
        unseen_s = (slow.mean_s - slow.others_s) * len(windows) / len(every)
    mean_s = _mean(every, everywhere, slow)
    return StepTimes(len(every), mean_s, tuple(means), slow, unseen_s)


def _are_slow(windows: Sequence[Sequence[float]]) -> list[list[bool]]:
    typical_s = statistics.median_low(itertools.chain.from_iterable(windows))
    # If the whole machine is slow in a window, none of its steps counts as slow.
    limits_s = [
        _SLOW * max(typical_s, statistics.median_low(window)) for window in windows
    ]
    slow = [
        seconds
        for window, limit_s in zip(windows, limits_s, strict=True)
        for seconds in window
        if seconds > limit_s
    ]
    least_s = _PART_OF_SLOW * statistics.median(slow) if slow else 0.0
    return [
        [seconds > max(limit_s, least_s) for seconds in window]
        for window, limit_s in zip(windows, limits_s, strict=True)
    ]


def _slow_steps(
    windows: Sequence[Sequence[float]], is_slow: Sequence[Sequence[bool]]
) -> SlowSteps | None:
    every = [seconds for window in windows for seconds in window]
    flags = [flag for window in is_slow for flag in window]
    if not any(flags):
        return None
    slow = list(itertools.compress(every, flags))
    parts = {
        at * _PARTS // len(every) for at in itertools.compress(itertools.count(), flags)
    }
    recur = len(parts) > _PARTS / 2 or len(slow) > _OFTEN * len(every)
    period = _period(is_slow) if recur else 0
    return SlowSteps(
        count=len(slow),
        mean_s=statistics.fmean(slow),
        others_s=statistics.fmean(
            s for s, slow_one in zip(every, flags, strict=True) if not slow_one
        ),
        recur=recur,
        period=period,
        are_few=recur and not period and len(slow) < _FEW * len(windows),
    )


def _period(is_slow: Sequence[Sequence[bool]]) -> int:
    """Returns the gap between slow steps if it is nearly always the same, else 0."""
    gaps = []
    for window in is_slow:
        slow_at = itertools.compress(itertools.count(), window)
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
    others_s = statistics.fmean(
        s for s, slow_one in zip(window, is_slow, strict=True) if not slow_one
    )
    if not slow.recur:
        return others_s
    own = list(itertools.compress(window, is_slow))
    # A window that is shorter than a period may have no slow step.
    slow_s = statistics.fmean(own) if own else slow.mean_s
    return ((slow.period - 1) * others_s + slow_s) / slow.period
