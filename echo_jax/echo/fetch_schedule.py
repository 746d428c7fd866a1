"""Fetch schedules: the probability of a fetch at every update of a stochastic echo."""

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from echo_jax.echo.arguments import integer

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
            is_number = isinstance(value, int | float | np.number)
            if isinstance(value, bool) or not is_number:
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
