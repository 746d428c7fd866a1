"""Echo factors: how many times each fresh item is used, exactly.

A factor is a rule from the index of a fresh item to its number of uses. All
arithmetic is in integers, because floats miscount: ``floor(100 * 1.15)`` is 114,
not 115.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from echo_jax.echo.arguments import integer

_MAX_DENOMINATOR = 10**6
_MAX_FACTOR = 10**6


def exact_fraction(value: int | float | str | Fraction) -> Fraction:
    """Returns the factor, at least 1, that a number or a string such as "7/3" means.

    A float means the nearest fraction whose denominator is at most 10^6, so that
    ``1.15`` is 23/20. Raises TypeError if the value is not a number or string, and
    ValueError if it is not in [1, 10^6] or has a denominator over 10^6.
    """
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
    if isinstance(value, float):
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
    """The numbers of uses of all items, as a pure function with a carry.

    C(k) is as in `FactorByItem`. The carry is the fraction of C(k), in units of
    1 / ``denominator``; it is the whole state.
    """

    # The first fresh index and the factor of each piece; if a function gives the
    # factors, one piece with their bound.
    starts: tuple[int, ...]
    factors: tuple[Fraction, ...]
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
        """Returns the uses of the first items; None if a function gives the factor.

        Example:
          >>> as_schedule({0: 1, 2: 2.5}).total(5)
          9
        """
        if self.by_item is not None:
            return None
        ends = [min(start, num_items) for start in (*self.starts, num_items)]
        counts = [end - start for start, end in itertools.pairwise(ends)]
        return math.floor(sum(map(operator.mul, self.factors, counts)))

    def uses(self, start: int, count: int, carry: int) -> tuple[np.ndarray, int]:
        """Returns the uses of items from ``start`` on, and the carry after them.

        Args:
          start: Index of the first item.
          count: How many items.
          carry: The carry before item ``start``; 0 before item 0.

        Returns:
          ``int64[count]``, and the carry before item ``start + count``.

        Example:
          >>> as_schedule(2.5).uses(0, 4, 0)
          (array([2, 3, 2, 3]), 0)
        """
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
