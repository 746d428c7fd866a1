"""The time of a fresh batch, seen by its consumer while a run trains.

A consumer waits for an element, and then does something else: it keeps the element, or
waits for room. While it waits, the pipeline works at full speed. In between, the
pipeline may work ahead, or have no room itself. So the elements cost the pipeline at
least the waiting time, and at most the whole time. An uncertainty remains: the elements
that the pipeline can hold ready may be older or not taken yet.

In a starved run the consumer only waits, and the bounds meet. In a fed run they are
far apart: the pipeline is fast enough, but how fast cannot be seen.

The first element is left out, because threads start and caches fill before it.
"""

import math
import time
from collections.abc import Callable, Sequence

__all__ = ["UNSEEN", "FreshTime", "bounds_of_all", "within"]

UNSEEN = (0.0, math.inf)
"""Bounds on a time of which nothing was seen."""


class FreshTime:
    """Bounds on the seconds that a pipeline takes for a fresh batch, its t_up."""

    def __init__(
        self,
        *,
        elements_per_batch: float,
        held: int,
        now: Callable[[], float] = time.perf_counter,
    ):
        """``held`` is the most elements that the pipeline has in progress or ready."""
        self.now = now
        self._per_batch, self._held = elements_per_batch, held
        # Elements, the seconds waited for them, and all seconds. They are one tuple,
        # because another thread reads it.
        self._seen = (0, 0.0, 0.0)
        self._last_s: float | None = None

    @property
    def held_batches(self) -> int:
        """The most fresh batches that the pipeline has in progress or ready."""
        return math.ceil(self._held / self._per_batch)

    def took(self, began_s: float) -> None:
        """Counts an element that has just come, after a wait since ``began_s``."""
        end_s = self.now()
        if self._last_s is not None:
            elements, waited_s, passed_s = self._seen
            waited_s += end_s - began_s
            passed_s += end_s - self._last_s
            self._seen = (elements + 1, waited_s, passed_s)
        self._last_s = end_s

    def restart(self) -> None:
        """Treats the next element as a first one again."""
        self._last_s = None

    def bounds(self) -> tuple[float, float]:
        """Returns the least and the most seconds that a fresh batch takes."""
        elements, waited_s, passed_s = self._seen
        # The least and the most elements that were made in the time.
        least, most = elements - self._held, elements + self._held
        low_s = waited_s / most if most else 0.0
        high_s = passed_s / least if least > 0 else math.inf
        return low_s * self._per_batch, high_s * self._per_batch


def bounds_of_all(bounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns bounds on the time of the slowest of several pipelines."""
    return max(low for low, _ in bounds), max(high for _, high in bounds)


def within(seconds: float, bounds: tuple[float, float]) -> float:
    """Returns an earlier measurement, moved into the bounds."""
    low, high = bounds
    return min(max(seconds, low), high)
