"""The bad items of a stream: remembered until their replacements are used."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class BadItem:
    """A fresh item that is never used: its place in the stream, record and fault."""

    index: int
    record: int
    what: str

    def __str__(self) -> str:
        return f"fresh item {self.index} (record {self.record}): {self.what}"


class BadItems:
    """Remembers the bad items of a stream, from when they are read until they count."""

    # A thread that reads ahead finds them earlier or later. So a bad item counts at the
    # first use of its replacement: the number of skipped items then follows from the
    # uses alone, and an item that a restored stream reads again counts once.

    def __init__(self, items_per_index: int = 1):
        """Takes the examples of a fresh index: a batch's if batches are echoed."""
        self._items_per_index = items_per_index
        self._found: dict[int, BadItem] = {}  # by fresh index; threads add to it

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, bad: Sequence[BadItem]) -> None:
        """Remembers bad items; must be called before their replacements are used."""
        self._found.update((each.index, each) for each in bad)

    def take(self, fresh_index: np.ndarray, repeat: np.ndarray) -> list[BadItem]:
        """Returns and forgets bad items at the first use of their replacements."""
        first = set(fresh_index[repeat == 0].tolist())
        # `list` copies in one step: a thread may add to it.
        used = [k for k in list(self._found) if k // self._items_per_index in first]
        return [self._found.pop(index) for index in sorted(used)]
