"""Rates: how long updates take, what a repeat is worth, and the factor that follows.

The model is from Choi et al. 2019, section 2: a fresh batch in t_up and a step in
t_down run in parallel, so that a fresh batch and its e updates take max(t_up, e t_down)
(Eq. 1). Where the two share cores or take turns, a fresh batch delays the step by a
part c of t_up, to t_down + c t_up / e. Both times vary there, so where they are alike
an update takes longer than the larger one, t: t (1 + (other / t)^p)^(1/p). Of the
powers p that were tried, max(6, 3 / c) was nearest to trainings beside real decoding
(docs/benchmarks.md).
"""

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = [
    "FED_RATIO",
    "RepeatWorth",
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
"""R up to here counts as fed: machines vary, and an echo could gain no more."""

LEAST_WORTH = 0.74
"""Fresh examples that a repeat replaces at least, in the studies of docs/results.md."""

# A time is slowed, or a step slow, from this many times the usual on; less is noise.
SLOWED, _SLOW = 1.15, 2.0

# 97.5 % points of Student's t, by degrees of freedom.
_STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776}


def seconds_per_update(
    t_up_s: float, t_down_s: float, factor: float, contention: float = 0.0
) -> float:
    """Returns the seconds that an update takes: max(t_up / e, t_down) if c is 0.

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
      >>> round(seconds_per_update(0.4, 0.1, 1, contention=1), 3)
      0.52
    """
    for name, value in (("t_up_s", t_up_s), ("t_down_s", t_down_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value} must be positive and finite")
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor={factor} must be an echo factor, at least 1")
    fresh_s = t_up_s / factor
    less_s, more_s = sorted((fresh_s, t_down_s + contention * fresh_s))
    if not contention:
        return more_s
    power = max(6.0, 3 / contention)
    return more_s * (1 + (less_s / more_s) ** power) ** (1 / power)


def contention(
    t_up_s: float, t_down_s: float, measured: Mapping[float, float]
) -> float:
    """Returns c, the part of t_up by which a fresh batch delays the step.

    It is 0 where the accelerator leaves the host's cores to the loader, and about 1
    where loader and step take turns. It is the c up to 2, in steps of 0.01, whose
    predictions have the least squares of relative errors; 0 if it changes none by more
    than 5 %.

    Args:
      t_up_s: As for `seconds_per_update`, of the loader alone.
      t_down_s: The same, of the step alone.
      measured: Seconds per update of both together, by echo factor.

    Example:
      >>> contention(0.04, 0.03, {1: 0.054, 2: 0.042})
      0.57
    """
    update_s = functools.partial(seconds_per_update, t_up_s, t_down_s)

    def error(part: float) -> float:
        return sum((update_s(e, part) / s - 1) ** 2 for e, s in measured.items())

    found = min((hundredths / 100 for hundredths in range(201)), key=error)
    matters = any(update_s(e, found) > FED_RATIO * update_s(e) for e in measured)
    return found if matters else 0.0


def advised_factor(
    ratio: float,
    max_uses: float = 4,
    contention: float = 0.0,
    worth: float = LEAST_WORTH,
) -> float:
    """Returns the echo factor with which a second teaches most; 1 for no echo.

    Without contention it is R, up to `max_uses`: the updates that it adds cost no time,
    and more slow down fresh data. It is 1 if updates become at most 5 % faster.

    Args:
      ratio: R, seconds per fresh batch over seconds per training step.
      max_uses: Uses after which a repeat is worth nothing, at least 1. Choi et al. 2019
        (figure 5) found 4 on LM1B at batch 1024, and at least 16 at batch 4096.
      contention: From `contention`.
      worth: Fresh examples that a repeat replaces, from 0 to 1.

    Raises:
      ValueError: A number is out of its range.

    Example:
      >>> [advised_factor(r) for r in (0.5, 2.6, 9.0)]
      [1.0, 2.6, 4.0]
      >>> [advised_factor(1.5, contention=c) for c in (0.2, 0.6)]
      [1.5, 4.0]
    """
    if not (0 < ratio < math.inf and max_uses >= 1):
        said = f"ratio={ratio} must be positive, and max_uses={max_uses} at least 1"
        raise ValueError(said)

    def update_s(factor: float) -> float:
        return seconds_per_update(ratio, 1.0, factor, contention)

    def learned_per_s(factor: float) -> float:
        return (1 / factor + worth * (1 - 1 / factor)) / update_s(factor)

    factors = {1.0, ratio, max_uses, *map(float, range(2, math.floor(max_uses)))}
    possible = sorted(each for each in factors if 1 <= each <= max_uses)
    best = float(max(possible, key=learned_per_s))
    return best if update_s(1) > FED_RATIO * update_s(best) else 1.0


# --- The value of a repeat.


@dataclasses.dataclass(frozen=True)
class RepeatWorth:
    """Two trainings from one state, with the same number of updates.

    Attributes:
      start: The loss on held-out data before both; any number that learning lowers.
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
        """Fresh examples that a repeat replaces; see `mean_worth`."""
        return mean_worth([self])


def mean_worth(branches: Sequence[RepeatWorth]) -> float:
    """Returns the value of a repeat: 1 for as good as fresh, 0 for useless.

    An update with repeats gets ``fresh_part + worth * (1 - fresh_part)`` times the
    progress of an update on fresh examples. Losses of several branches of a training
    are summed before they are divided, so a branch counts by how much there was to
    learn. It is NaN if nothing was repeated, or fresh data did not help.

    Example:
      >>> at_start = RepeatWorth(start=5.0, echoed=4.2, fresh=4.0, fresh_part=0.5)
      >>> later = RepeatWorth(start=3.0, echoed=2.9, fresh=2.8, fresh_part=0.5)
      >>> round(mean_worth([at_start, later]), 3)
      0.5
    """
    fell = sum(each.start - each.fresh for each in branches)
    repeats = sum((1 - of.fresh_part) * (of.start - of.fresh) for of in branches)
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
    """Measures the value of a repeat at one point of your training.

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
      fresh_part: As in `RepeatWorth`.

    Raises:
      ValueError: The two have different numbers of batches, or none.

    Example:
      >>> def step(weight, batch):
      ...     return weight - 0.1 * (weight - batch)
      >>> sets = {"echoed": [0.5, 0.5], "fresh": [0.0, 0.0], "fresh_part": 0.5}
      >>> round(worth_of_repeats(step, 1.0, score=lambda w: w**2, **sets).worth, 3)
      0.052
    """
    if not 0 <= fresh_part <= 1:
        raise ValueError(f"fresh_part={fresh_part} must be from 0 to 1; 1 / e is it")

    def trained(batches: Iterable[Any]) -> tuple[float, int]:
        count, then = 0, state
        for batch in batches:
            then, count = step(then, batch), count + 1
        return float(score(then)), count

    start = float(score(state))
    (by_echo, num_echoed), (by_fresh, num_fresh) = trained(echoed), trained(fresh)
    if num_echoed != num_fresh or not num_fresh:
        raise ValueError(
            f"{num_echoed} echoed batches and {num_fresh} fresh ones: give as many of "
            "both, and at least one"
        )
    return RepeatWorth(start, by_echo, by_fresh, fresh_part)


# --- The mean time of a step.


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The seconds of a step; a slow one takes over twice the median of its round."""

    timed: int  # How many steps.
    slow: int  # How many of them were slow,
    slow_s: float  # their mean, 0 without any,
    others_s: float  # and the mean of the others.
    recur: bool  # Whether most rounds have slow steps, so that the step causes them.
    mean_s: float  # The mean, with slow steps if they recur,
    least_s: float  # the least and the most that it may be,
    most_s: float
    round_means_s: tuple[float, ...]  # and the mean of each round.


def step_times(rounds: Sequence[Sequence[float]]) -> StepTimes:
    """Returns the mean seconds of steps, given the steps of each round."""
    fast = [[s for s in of if s <= _SLOW * statistics.median_low(of)] for of in rounds]
    every, others = [*itertools.chain(*rounds)], [*itertools.chain(*fast)]
    all_s, others_s = statistics.fmean(every), statistics.fmean(others)
    slow = len(every) - len(others)
    slow_s = (sum(every) - sum(others)) / slow if slow else 0.0
    have_slow = sum(len(of) > len(rest) for of, rest in zip(rounds, fast, strict=True))
    recur = have_slow > len(rounds) / 2
    mean_s = all_s if recur else others_s
    # Each round may have seen one slow step more, or one less, than its part of them.
    open_s = max(slow_s - others_s, 0) * len(rounds) / len(every)
    return StepTimes(
        timed=len(every),
        slow=slow,
        slow_s=slow_s,
        others_s=others_s,
        recur=recur,
        mean_s=mean_s,
        least_s=max(mean_s - open_s, others_s),
        most_s=all_s + open_s,
        round_means_s=tuple(map(statistics.fmean, rounds if recur else fast)),
    )


def ratio_interval(
    ups: Sequence[Sequence[float]], steps: StepTimes
) -> tuple[float, float]:
    """Returns the 95 % interval of R from the seconds per batch of each round."""
    # Student's interval over the rounds: times within a round may correlate, such as in
    # bursts; rounds hardly do. It also spans what is open about slow steps.
    pairs = zip(ups, steps.round_means_s, strict=True)
    ratios = [statistics.fmean(up) / down_s for up, down_s in pairs]
    ratio = statistics.fmean(itertools.chain(*ups)) / steps.mean_s
    reach = _STUDENT_T[len(ratios) - 1] * statistics.stdev(ratios) / len(ratios) ** 0.5
    low, high = max(ratio - reach, 0.0), ratio + reach
    return low * steps.mean_s / steps.most_s, high * steps.mean_s / steps.least_s
