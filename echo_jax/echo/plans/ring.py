"""Rings: the slots of lanes that always hold their last items.

Item i of a lane is in slot i mod ``num_slots``, until item i + ``num_slots`` comes.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["Ring"]


@dataclass(frozen=True)
class Ring:
    """Maps the items of all lanes to slots and back.

    Attributes:
      num_lanes: Number of lanes, G.
      num_slots: Slots of each lane.
      rows: Items that come together in a lane, u.

    Example:
      >>> Ring(num_lanes=2, num_slots=6, rows=4).slots_of(4, 8).tolist()
      [[4, 5, 0, 1], [4, 5, 0, 1]]
    """

    num_lanes: int
    num_slots: int
    rows: int

    def slots(self, items: np.ndarray) -> np.ndarray:
        """Returns the slots of items of a lane, ``int32``."""
        return (items % self.num_slots).astype(np.int32)

    def items(self, slots: np.ndarray, num_items: int) -> np.ndarray:
        """Returns the items in written slots, after ``num_items`` items, ``int64``."""
        newest = num_items - 1
        return newest - (newest - slots.astype(np.int64)) % self.num_slots

    def slots_of(self, first: int, end: int) -> np.ndarray:
        """Returns the slots of items [first, end), writable ``int32[G, n]``."""
        return np.tile(self.slots(np.arange(first, end)), (self.num_lanes, 1))

    def first_held(self, num_items: int) -> int:
        """Returns the oldest of ``num_items`` items that a lane still holds."""
        return max(0, num_items - self.num_slots)

    def anchor(self, num_items: int) -> int:
        """Returns the first item that came together with the oldest one held."""
        return self.first_held(num_items) // self.rows * self.rows

    def held(self, num_items: int) -> np.ndarray:
        """Returns the slots of the items from the anchor on, ``int32[G, n]``."""
        # ``num_slots`` stands for items that are not held any more.
        anchor, first = self.anchor(num_items), self.first_held(num_items)
        slots = self.slots_of(anchor, num_items)
        slots[:, : first - anchor] = self.num_slots
        return slots
