"""Which fresh items of a stream are bad, so that others are used in their places."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BadItem", "BadItems"]


@dataclass(frozen=True, order=True)
class BadItem:
    """A fresh item that is never used.

    Attributes:
      index: Its fresh index: its place in the stream, over all processes.
      record: The number of its record.
      what: Is wrong with it.
    """

    index: int
    record: int
    what: str

    def __str__(self) -> str:
        return f"fresh item {self.index} (record {self.record}): {self.what}"


class BadItems:
    """Remembers the bad items of a stream, from when they are read until they count.

    What reads ahead finds them earlier or later. So they count by the first use of what
    took their place: how many were skipped then follows from the uses alone, and what a
    restored stream reads again counts once.

    Example:
      >>> bad_items = BadItems()
      >>> bad_items.add([BadItem(5, 81, "item['x'] holds 1 NaN in 4 values")])
      >>> for bad in bad_items.take(np.array([4, 5, 3]), repeat=np.array([0, 0, 1])):
      ...     print(bad)
      fresh item 5 (record 81): item['x'] holds 1 NaN in 4 values
    """

    def __init__(self, items_per_index: int = 1):
        """Knows of none.

        Args:
          items_per_index: Over how many items the echo's fresh index counts once: over
            the examples of a batch where batches are echoed.
        """
        self._items_per_index = items_per_index
        # By their fresh index. Threads add to it.
        self._found: dict[int, BadItem] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, bad: Sequence[BadItem]) -> None:
        """Remembers some, before what took their place is used."""
        for each in bad:
            self._found[each.index] = each

    def take(self, fresh_index: np.ndarray, repeat: np.ndarray) -> list[BadItem]:
        """Returns those whose places are used for the first time, and forgets them.

        Args:
          fresh_index: The echo's tag of every example of some updates, of any shape.
          repeat: Which use of its item each of them is, of the same shape.
        """
        first = set(fresh_index[repeat == 0].tolist())
        # A copy in one step: a thread may add to it.
        found = sorted(self._found.copy().values())
        used = [each for each in found if each.index // self._items_per_index in first]
        for each in used:
            del self._found[each.index]
        return used
