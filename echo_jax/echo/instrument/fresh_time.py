"""How long a fresh batch takes, from what its taker sees while a run trains."""

import math
import time
from collections.abc import Callable, Sequence

__all__ = ["UNSEEN", "FreshTime", "bounds_of_all", "within"]

UNSEEN = (0.0, math.inf)
"""Bounds on a time of which nothing was seen."""


class FreshTime:
    """Bounds on the seconds that a pipeline takes for a fresh batch, its t_up.

    Who takes elements from a pipeline waits for one, and then does something else:
    keeps it, or waits for room. While it waits, the pipeline works at full speed; in
    between it may work ahead, or have no room itself. So the elements that were taken
    cost the pipeline at least the waiting alone, and at most the whole time, but for
    what it can hold ready, which may be older or not taken yet.

    In a run that is starved there is nothing in between, and the bounds meet. In one
    that is fed they lie far apart: how fast a pipeline would be that nobody waits for
    cannot be seen, only that it is fast enough.

    The first element is left out: with it threads start and caches fill.
    """

    def __init__(
        self,
        *,
        elements_per_batch: float,
        held: int,
        now: Callable[[], float] = time.perf_counter,
    ):
        """Nothing was seen yet.

        Args:
          elements_per_batch: Elements in a fresh batch.
          held: How many of them the pipeline has under way, or ready, at most.
          now: The time in seconds; monotonic.
        """
        self.now = now
        self._per_batch, self._held = elements_per_batch, held
        # Elements, and the seconds waited for them and in all: one tuple, for another
        # thread reads it.
        self._seen = (0, 0.0, 0.0)
        self._last_s: float | None = None

    @property
    def held_batches(self) -> int:
        """How many fresh batches the pipeline has under way, or ready, at most."""
        return math.ceil(self._held / self._per_batch)

    def took(self, began_s: float) -> None:
        """Takes note of an element, which has just come.

        Args:
          began_s: When the taker began to wait for it.
        """
        end_s = self.now()
        if self._last_s is not None:
            elements, waited_s, passed_s = self._seen
            waited_s += end_s - began_s
            passed_s += end_s - self._last_s
            self._seen = (elements + 1, waited_s, passed_s)
        self._last_s = end_s

    def restart(self) -> None:
        """Says that the next element is a first one again."""
        self._last_s = None

    def bounds(self) -> tuple[float, float]:
        """Returns the least and the most seconds that a fresh batch takes."""
        elements, waited_s, passed_s = self._seen
        # Of those taken, so many at least were made in the time, and so many at most.
        least, most = elements - self._held, elements + self._held
        low_s = waited_s / most if most else 0.0
        high_s = passed_s / least if least > 0 else math.inf
        return low_s * self._per_batch, high_s * self._per_batch


def bounds_of_all(bounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns bounds on the time of the slowest of several pipelines.

    Args:
      bounds: Of each of them.

    Example:
      >>> bounds_of_all([(1.0, 2.0), (0.5, 3.0)])
      (1.0, 3.0)
    """
    return max(low for low, _ in bounds), max(high for _, high in bounds)


def within(seconds: float, bounds: tuple[float, float]) -> float:
    """Returns what was measured before, corrected by what is certain now.

    Args:
      seconds: As measured.
      bounds: See `FreshTime.bounds`.

    Example:
      >>> within(5.0, (1.0, 2.0)), within(1.5, (1.0, 2.0)), within(5.0, UNSEEN)
      (2.0, 1.5, 5.0)
    """
    low, high = bounds
    return min(max(seconds, low), high)
