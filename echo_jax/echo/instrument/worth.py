"""The worth of a repeat: the same model, trained on repeats and on fresh data.

A repeat is worth less than a fresh example (Choi et al. 2019, section 2). How much less
decides which factor pays. The losses of one training do not show it: a smaller loss on
a repeat shows that the model knows it, not how much it still learns from it. So two
trainings start from one state. One continues as planned, with its echo. The other one
makes as many updates on fresh examples only. Their losses on held-out data show how
much the repeats among the first one's examples were worth.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["RepeatWorth", "mean_worth", "worth_of_repeats"]

State = TypeVar("State")


@dataclass(frozen=True)
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
