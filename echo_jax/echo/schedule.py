"""Schedules: how many times each fresh item is used, and when a batch is fetched.

Uses are counted in integers, because floats miscount: ``floor(100 * 1.15)`` is 114.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from echo_jax.echo.arguments import integer

_MAX_DENOMINATOR = 10**6
_MAX_FACTOR = 10**6


def exact_fraction(value: int | float | str | Fraction) -> Fraction:
    """Returns the factor that a number, or a string such as "7/3", means."""
    what = f"echo factor {value!r}"
    advice = "give a factor of at least 1, such as 2, 2.5 or '7/3'"
    if isinstance(value, np.integer | np.floating):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float | str | Fraction):
        raise TypeError(f"{what} is not a number; {advice}")
    try:
        fraction = Fraction(value)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        raise ValueError(f"{what} is not a finite number; {advice}") from error
    rounded = fraction.limit_denominator(_MAX_DENOMINATOR)
    if isinstance(value, float):  # 1.15 means 23/20.
        fraction = rounded
    if not 1 <= fraction <= _MAX_FACTOR:
        raise ValueError(f"{what} is outside [1, {_MAX_FACTOR}]; {advice}")
    if fraction != rounded:
        raise ValueError(
            f"{what} has a denominator over {_MAX_DENOMINATOR}; give {rounded} instead"
        )
    return fraction


@dataclass(frozen=True)
class FactorByItem:
    """A factor that a function of the fresh index gives.

    Item k is used floor(C(k+1)) - floor(C(k)) times, where C(k) is the sum of the
    values for the items before k, each rounded to a multiple of 10^-6.

    Attributes:
      function: From the index of a fresh item (0, 1, ...) to its factor; pure.
      max_factor: A bound on its values. It sizes the lag of ``spread``.

    Example:
      >>> warm = FactorByItem(lambda k: min(4.0, 1 + k / 1000), max_factor=4)
    """

    function: Callable[[int], float]
    max_factor: float


Factor = int | float | str | Fraction | Mapping[int, int | float | str | Fraction]
"""A constant, or a piecewise constant ``{first fresh index: factor}``."""


@dataclass(frozen=True)
class Schedule:
    """The numbers of uses of all items, as a pure function with a carry."""

    # The carry before item k is the fraction of C(k), as in `FactorByItem`, in units of
    # 1 / denominator. A function gives one piece with the bound of its factors.
    starts: tuple[int, ...]  # The first fresh index of each piece,
    factors: tuple[Fraction, ...]  # and its factor.
    by_item: FactorByItem | None = None
    denominator: int = _MAX_DENOMINATOR

    @property
    def constant(self) -> Fraction | None:
        """The factor, if it is the same for all items."""
        is_constant = self.by_item is None and len(self.factors) == 1
        return self.factors[0] if is_constant else None

    @property
    def min_factor(self) -> Fraction:
        """A lower bound on the factor."""
        return min(self.factors) if self.by_item is None else Fraction(1)

    @property
    def max_factor(self) -> Fraction:
        """An upper bound on the factor."""
        return max(self.factors)

    def total(self, num_items: int) -> int | None:
        """Returns the uses of the first items; None if a function gives the factor."""
        if self.by_item is not None:
            return None
        ends = [min(start, num_items) for start in (*self.starts, num_items)]
        counts = [end - start for start, end in itertools.pairwise(ends)]
        return math.floor(sum(map(operator.mul, self.factors, counts)))

    def uses(self, start: int, count: int, carry: int) -> tuple[np.ndarray, int]:
        """Returns the uses of items, ``int64[count]``, and the carry after them."""
        units = np.cumsum(np.concatenate(([carry], self._units(start, count))))
        whole = units // self.denominator
        return np.diff(whole), int(units[-1] - whole[-1] * self.denominator)

    def _units(self, start: int, count: int) -> np.ndarray:
        """Returns factors in units of 1 / denominator, ``int64[count]``."""
        if self.constant is not None:
            return np.full(count, self.constant.numerator)
        items = np.arange(start, start + count)
        if self.by_item is None:
            units = np.array([int(x * self.denominator) for x in self.factors])
            return units[np.searchsorted(self.starts, items, "right") - 1]
        values = list(map(self.by_item.function, items.tolist()))
        most = self.by_item.max_factor
        for item, value in zip(items, values, strict=True):
            # Compare with the bound as it was given: 1.1 is more than the fraction
            # 11/10. This also catches NaN.
            if not 1 <= value <= most:
                raise ValueError(
                    f"the factor of fresh item {item} is {value!r}, outside "
                    f"[1, max_factor={most}]; mend the function or raise max_factor"
                )
        return np.array([round(x * self.denominator) for x in values], np.int64)


def as_schedule(factor: "Factor | FactorByItem") -> Schedule:
    """Returns the schedule that a factor means; raises if it is not one."""
    if isinstance(factor, FactorByItem):
        return Schedule((0,), (exact_fraction(factor.max_factor),), by_item=factor)
    if callable(factor):
        raise TypeError(
            "a function as echo factor needs a bound; "
            "give FactorByItem(function, max_factor=...)"
        )
    if not isinstance(factor, Mapping):
        factor = {0: factor}
    pieces = {integer("the first item of a piece", k, 0): v for k, v in factor.items()}
    starts = sorted(pieces)
    if starts[:1] != [0]:
        raise ValueError(
            f"the pieces of an echo factor start at {starts}; give a mapping from "
            "fresh indices to factors, with a piece that starts at 0"
        )
    factors = tuple(exact_fraction(pieces[k]) for k in starts)
    denominator = math.lcm(*(each.denominator for each in factors))
    if denominator > 10**9:
        raise ValueError(
            f"the factors {', '.join(map(str, factors))} have the common denominator "
            f"{denominator}, over 10^9; use rounder factors"
        )
    return Schedule(tuple(starts), factors, None, denominator)


Quantity = Literal["p", "e"]
Shape = Literal["constant", "linear", "cosine", "multistep"]


@dataclass(frozen=True)
class FetchSchedule:
    """The probability that a batch is fetched at every update.

    Attributes:
      quantity: Kind of the values: ``p``, the probability of a fetch, or ``e``, its
        reciprocal, the mean number of updates for each fetch.
      schedule: Path of the value from ``start`` to ``end``. ``constant``: it stays at
        ``start``, and ``end`` must be the same. ``linear``: in a straight line.
        ``cosine``: along half a cosine, slow at both ends. ``multistep``: in equal
        ratios at the milestones, such as three halvings from 1 to 1/8.
      start: The value at update 0.
      end: The value from update ``updates`` on.
      updates: Number of updates over which the value changes; at least 1.
      milestones: For ``multistep``, the updates at which the value jumps, ascending and
        at most ``updates``. By default at half and at three quarters.

    Raises:
      TypeError, ValueError: A field has another type or is out of its range.

    Example:
      >>> falling = FetchSchedule("p", "linear", start=1.0, end=0.2, updates=4)
      >>> falling.probability(np.arange(6)).round(3).tolist()
      [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
      >>> FetchSchedule("e", "constant", 4.0, 4.0).probability(np.arange(2)).tolist()
      [0.25, 0.25]
    """

    quantity: Quantity = "p"
    schedule: Shape = "constant"
    start: float = 1.0
    end: float = 1.0
    updates: int = 1
    milestones: tuple[int, ...] = ()

    def __post_init__(self):
        for name, kind in (("quantity", Quantity), ("schedule", Shape)):
            if (value := getattr(self, name)) not in get_args(kind):
                names = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={value!r} is unknown; use one of {names}")
        for name in ("start", "end"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(
                value, int | float | np.number
            ):
                raise TypeError(f"{name}={value!r} must be a number")
            if self.quantity == "p" and not 0 < value <= 1:
                raise ValueError(f"{name}={value} must be a probability, in (0, 1]")
            if self.quantity == "e" and not 1 <= value < math.inf:
                raise ValueError(f"{name}={value} must be an echo factor, at least 1")
        object.__setattr__(self, "updates", integer("updates", self.updates, 1))
        if self.schedule == "constant" and self.start != self.end:
            raise ValueError(
                f"a constant schedule has end={self.end} other than start="
                f"{self.start}; make them equal, or choose another schedule"
            )
        if self.milestones and self.schedule != "multistep":
            raise ValueError(
                f"milestones={self.milestones} belong to schedule='multistep', "
                f"not to {self.schedule!r}"
            )
        marks = tuple(integer("a milestone", mark, 1) for mark in self.milestones)
        object.__setattr__(self, "milestones", marks)
        bounded = (0, *marks, self.updates + 1)
        if any(a >= b for a, b in itertools.pairwise(bounded)):
            raise ValueError(
                f"milestones={marks} must ascend from above 0 to at most "
                f"updates={self.updates}"
            )

    def value(self, updates: np.ndarray) -> np.ndarray:
        """Returns p or e at some updates, ``float64`` of the same shape."""
        if self.schedule == "multistep":
            half = math.ceil(self.updates / 2)
            marks = self.milestones or (half, math.ceil(self.updates * 3 / 4))
            jumps = np.searchsorted(marks, updates, side="right")
            return self.start * (self.end / self.start) ** (jumps / len(marks))
        done = np.minimum(updates, self.updates) / self.updates
        if self.schedule == "cosine":
            done = (1 - np.cos(np.pi * done)) / 2
        return self.start + (self.end - self.start) * done

    def probability(self, updates: np.ndarray) -> np.ndarray:
        """Returns the probability of a fetch at some updates, ``float64``.

        It is a multiple of 2^-32, because the last bits of a cosine may differ between
        machines.
        """
        return self.threshold(updates) / 2.0**32

    def threshold(self, updates: np.ndarray) -> np.ndarray:
        """Returns the bound below which a 32-bit number means a fetch, ``uint64``."""
        value = self.value(updates)
        p = value if self.quantity == "p" else 1 / value
        return np.rint(p * 2.0**32).astype(np.uint64)
