"""Rates: how long updates take, what a repeat is worth, and the factor that follows.

The model is that of Choi et al. 2019, section 2: an upstream that makes a fresh
batch in t_up and a training step of t_down run in parallel, so that one fresh batch
and its e updates take max(t_up, e t_down) (Eq. 1). It holds for constant rates, and for
an accelerator that leaves the host's cores to the loader. Where loader and step share
cores, a fresh batch delays the step by a part c of t_up, so that an update takes at
least t_down + c t_up / e.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = [
    "FED_RATIO",
    "RepeatWorth",
    "SlowSteps",
    "StepTimes",
    "advised_factor",
    "contention",
    "mean_worth",
    "ratio_interval",
    "seconds_per_update",
    "step_times",
    "worth_of_repeats",
]

State = TypeVar("State")

FED_RATIO = 1.05
"""R up to here counts as fed: machines vary by a few per cent, and an echo could gain
no more than that."""

LEAST_WORTH = 0.74
"""Fresh examples that a repeat replaces at least, in the studies of docs/results.md."""

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


def seconds_per_update(
    t_up_s: float, t_down_s: float, factor: float, contention: float = 0.0
) -> float:
    """Returns the seconds that an update takes: max(t_up / e, t_down + c t_up / e).

    Args:
      t_up_s: Seconds per fresh batch upstream.
      t_down_s: Seconds per training step.
      factor: Updates for each fresh batch, e, at least 1.
      contention: c, the part of t_up by which a fresh batch delays the step.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> [seconds_per_update(0.4, 0.1, factor) for factor in (1, 2, 4, 8)]
      [0.4, 0.2, 0.1, 0.1]
    """
    _check_positive(t_up_s=t_up_s, t_down_s=t_down_s)
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be an echo factor, at least 1")
    fresh_s = t_up_s / factor
    return max(fresh_s, t_down_s + contention * fresh_s)


def contention(
    t_up_s: float, t_down_s: float, measured: Mapping[float, float]
) -> float:
    """Returns c, the part of t_up by which a fresh batch delays the step.

    It is 0 where the accelerator leaves the host's cores to the loader, and 1 where
    loader and step take turns. It is the c, in steps of 0.01, whose predictions have
    the least squares of relative errors; 0 if it changes none by more than 5 %.

    Args:
      t_up_s: Seconds per fresh batch of the loader alone.
      t_down_s: Seconds per step alone.
      measured: Seconds per update of both together, by echo factor.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> contention(0.04, 0.03, {1: 0.054, 2: 0.042})
      0.6
    """

    def predicted(factor: float, part: float = 0.0) -> float:
        return seconds_per_update(t_up_s, t_down_s, factor, part)

    def error(part: float) -> float:
        return sum((predicted(e, part) / s - 1) ** 2 for e, s in measured.items())

    found = min((hundredths / 100 for hundredths in range(101)), key=error)
    matters = any(predicted(e, found) > FED_RATIO * predicted(e) for e in measured)
    return found if matters else 0.0


def advised_factor(
    ratio: float,
    max_uses: float = 4,
    contention: float = 0.0,
    worth: float = LEAST_WORTH,
) -> float:
    """Returns the echo factor to use: the one with which a second teaches most.

    Where loader and step share no cores, it is R, but at most `max_uses`: the updates
    that echoing adds cost no time below R, and slow down fresh data above it.

    `max_uses` is the number of uses after which a repeat is worth nothing. According to
    Choi et al. 2019 (figure 5) it is about 4 for a Transformer on LM1B at batch 1024,
    and at least 16 at batch 4096. Their own advice, e = R, is wrong for an R above it.

    Args:
      ratio: R, seconds per fresh batch over seconds per training step.
      max_uses: The largest factor that is worth its updates, at least 1.
      contention: From `contention`.
      worth: Fresh examples that a repeat replaces, from 0 to 1.

    Returns:
      The factor; 1 for no echo, also if an echo makes updates at most 5 % faster.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> [advised_factor(r) for r in (0.5, 2.6, 9.0)]
      [1.0, 2.6, 4.0]
      >>> [advised_factor(1.5, contention=c) for c in (0.2, 0.6)]
      [1.5, 4.0]
    """
    _check_positive(ratio=ratio)
    if not max_uses >= 1:
        raise ValueError(f"max_uses={max_uses} must be at least 1")

    def update_s(factor: float) -> float:
        return seconds_per_update(ratio, 1.0, factor, contention)

    def learned_per_s(factor: float) -> float:
        return (1 / factor + worth * (1 - 1 / factor)) / update_s(factor)

    factors = {1.0, ratio, max_uses, *map(float, range(2, math.floor(max_uses)))}
    possible = sorted(each for each in factors if 1 <= each <= max_uses)
    best = float(max(possible, key=learned_per_s))
    return best if update_s(1) > FED_RATIO * update_s(best) else 1.0


# --- The worth of a repeat.


@dataclasses.dataclass(frozen=True)
class RepeatWorth:
    """Two trainings from one state, with the same number of updates.

    Attributes:
      start: The loss on held-out data before both; any number that falls as the model
        learns.
      echoed: The loss after the updates with the echo.
      fresh: The loss after the updates on fresh examples.
      fresh_part: The fresh part of the echoed examples: 1 / e.
    """

    start: float
    echoed: float
    fresh: float
    fresh_part: float

    @property
    def worth(self) -> float:
        """Fresh examples that a repeat replaces: 1 for as good as fresh, 0 for useless.

        NaN if nothing was repeated, or fresh data did not help either.
        """
        return mean_worth([self])


def mean_worth(branches: Sequence[RepeatWorth]) -> float:
    """Returns the worth of a repeat over several branches of a training.

    An update with repeats gets ``fresh_part + worth * (1 - fresh_part)`` times the
    progress of an update on fresh examples. Losses are summed before they are divided,
    so a branch counts by how much there was to learn.

    Args:
      branches: Measurements at several points of one training.

    Returns:
      NaN if nothing was repeated, or fresh data did not help.

    Example:
      >>> at_start = RepeatWorth(start=5.0, echoed=4.2, fresh=4.0, fresh_part=0.5)
      >>> later = RepeatWorth(start=3.0, echoed=2.9, fresh=2.8, fresh_part=0.5)
      >>> round(mean_worth([at_start, later]), 3)
      0.5
    """
    fell = sum(each.start - each.fresh for each in branches)
    repeats = sum(
        (1 - each.fresh_part) * (each.start - each.fresh) for each in branches
    )
    if not fell > 0 or not repeats > 0:
        return math.nan
    return 1 - sum(each.echoed - each.fresh for each in branches) / repeats


def worth_of_repeats(
    step: Callable[[State, Any], State],
    state: State,
    *,
    echoed: Iterable[Any],
    fresh: Iterable[Any],
    score: Callable[[State], float],
    fresh_part: float,
) -> RepeatWorth:
    """Measures the worth of a repeat at one point of your training.

    It costs the updates of both sets of batches, and three scores. One point says
    little: measure at several, and join them with `mean_worth`. Use at least ``4 / (1 -
    momentum)`` batches, or the earlier momentum hides the difference.

    Args:
      step: ``(state, batch) -> state``. It must not change its argument: jit it without
        ``donate_argnums``.
      state: The training's current state.
      echoed: The batches that the training would see next.
      fresh: The same number of batches that it has never seen.
      score: ``(state) -> float``, the loss on held-out data, always the same.
      fresh_part: The fresh part of the echoed examples: 1 / e.

    Raises:
      ValueError: The two have different numbers of batches, or none.

    Example:
      >>> found = worth_of_repeats(
      ...     lambda weight, batch: weight - 0.1 * (weight - batch),
      ...     1.0,
      ...     echoed=[0.5, 0.5],
      ...     fresh=[0.0, 0.0],
      ...     score=lambda weight: weight**2,
      ...     fresh_part=0.5,
      ... )
      >>> round(found.worth, 3)
      0.052
    """
    if not 0 <= fresh_part <= 1:
        raise ValueError(f"fresh_part={fresh_part} must be from 0 to 1; 1 / e is it")
    start = float(score(state))
    by_echo, num_echoed = _trained(step, state, echoed)
    by_fresh, num_fresh = _trained(step, state, fresh)
    if num_echoed != num_fresh or not num_fresh:
        raise ValueError(
            f"{num_echoed} echoed batches and {num_fresh} fresh ones: give as many of "
            "both, and at least one"
        )
    return RepeatWorth(start, float(score(by_echo)), float(score(by_fresh)), fresh_part)


def _trained(
    step: Callable[[State, Any], State], state: State, batches: Iterable[Any]
) -> tuple[State, int]:
    count = 0
    for batch in batches:
        state, count = step(state, batch), count + 1
    return state, count


# --- The mean time of a step.


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


def _check_positive(**numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
