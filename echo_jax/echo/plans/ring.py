"""Rings: the slots of lanes that always hold their last items.

Item i of a lane lies in slot i mod ``num_slots`` until the item that comes
``num_slots`` after it takes its place. Chunk c brings the items [c*u, (c+1)*u) of
every lane.
"""

from dataclasses import dataclass

import numpy as np

__all__ = ["Ring", "check_draws"]


@dataclass(frozen=True)
class Ring:
    """Where the items of all lanes lie.

    Attributes:
      num_lanes: How many lanes there are, G.
      num_slots: Slots of each.
      lane_chunk: Rows of a chunk that a lane gets, u.

    Example:
      >>> ring = Ring(num_lanes=2, num_slots=6, lane_chunk=4)
      >>> ring.chunk_slots(1).tolist()
      [[4, 5, 0, 1], [4, 5, 0, 1]]
    """

    num_lanes: int
    num_slots: int
    lane_chunk: int

    def slots(self, items: np.ndarray) -> np.ndarray:
        """Returns the slots of some items of a lane, ``int32``."""
        return (items % self.num_slots).astype(np.int32)

    def items(self, slots: np.ndarray, num_items: int) -> np.ndarray:
        """Returns the items that lie in some slots, ``int64``.

        Args:
          slots: Of any shape, written before.
          num_items: Items of the lane so far.
        """
        newest = num_items - 1
        return newest - (newest - slots.astype(np.int64)) % self.num_slots

    def chunk_slots(self, chunk: int, first: int = 0) -> np.ndarray:
        """Returns the slots of a chunk's rows.

        Args:
          chunk: Its number.
          first: The oldest item that a lane still holds; the rows before it get
            ``num_slots``, which says that they need not be kept.

        Returns:
          ``int32[G, u]``, writable.
        """
        items = np.arange(chunk * self.lane_chunk, (chunk + 1) * self.lane_chunk)
        slots = np.where(items < first, self.num_slots, self.slots(items))
        return np.tile(slots.astype(np.int32), (self.num_lanes, 1))

    def first_held(self, num_chunks: int) -> int:
        """Returns the oldest item that a lane holds after so many chunks."""
        return max(0, num_chunks * self.lane_chunk - self.num_slots)

    def first_chunk(self, num_chunks: int) -> int:
        """Returns the oldest of so many chunks of which a lane still holds a row."""
        return self.first_held(num_chunks) // self.lane_chunk

    def held(self, num_chunks: int) -> list[tuple[int, np.ndarray]]:
        """Returns what the lanes hold after so many chunks.

        Returns:
          Chunk numbers, ascending, with the slots of their rows as `chunk_slots`
          returns them.
        """
        first = self.first_held(num_chunks)
        chunks = range(self.first_chunk(num_chunks), num_chunks)
        return [(chunk, self.chunk_slots(chunk, first)) for chunk in chunks]


def check_draws(draws: int, max_draws: int) -> None:
    """Refuses a number of draws that a plan was not made for.

    Raises:
      ValueError: If it is not from 1 to ``max_draws``.
    """
    if not 1 <= draws <= max_draws:
        raise ValueError(
            f"need({draws}) is out of range; draws were announced as at most "
            f"max_draws={max_draws}"
        )
