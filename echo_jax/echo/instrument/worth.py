"""What a repeat is worth now: the same model, trained on repeats and on fresh data.

A repeat is worth less than a fresh example (Choi et al. 2019, section 2), and how much
less decides which factor pays. From the losses of one training it cannot be read: that
the loss of a repeat is smaller says that the model knows it, not what it still learns
from it. So two trainings part from one state. One goes on as planned, with its echo;
the other one makes as many updates on examples that are all fresh. Their losses on
held-out data say what the repeats among the first one's examples were worth.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["RepeatWorth", "mean_worth", "worth_of_repeats"]

State = TypeVar("State")


@dataclass(frozen=True)
class RepeatWorth:
    """Two trainings from one state, of equally many updates.

    Attributes:
      start: The loss on held-out data before both; any number that falls as the model
        learns.
      echoed: After the updates with the echo.
      fresh: After those on fresh examples.
      fresh_part: Which part of the first one's examples was fresh: 1 / e.
    """

    start: float
    echoed: float
    fresh: float
    fresh_part: float

    @property
    def worth(self) -> float:
        """Fresh examples that a repeat replaces: 1, as good as fresh; 0, nothing.

        NaN where nothing was repeated, or fresh data did not help either.
        """
        return mean_worth([self])


def mean_worth(branches: Sequence[RepeatWorth]) -> float:
    """Returns what a repeat was worth in several branches of a training, together.

    An update with repeats gets ``fresh_part + worth * (1 - fresh_part)`` of what one on
    fresh examples gets. Losses are summed before they are divided, so that a branch
    counts by how much there was to learn.

    Args:
      branches: Of one training.

    Returns:
      NaN where nothing was repeated, or fresh data did not help.

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
    """Measures what a repeat is worth at one point of a training of yours.

    It costs as many updates as both have batches, and three scores. One point says
    little: do it at several, and join them by `mean_worth`. Take at least
    ``4 / (1 - momentum)`` batches, or the momentum that was gathered before hides the
    difference.

    Args:
      step: ``(state, batch) -> state``. It must leave its argument as it is: jit it
        without ``donate_argnums``.
      state: Where the training is.
      echoed: The batches that it would see next.
      fresh: As many that it has never seen.
      score: ``(state) -> float``, the loss on held-out data, always the same.
      fresh_part: Which part of the echoed examples is fresh: 1 / e.

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
