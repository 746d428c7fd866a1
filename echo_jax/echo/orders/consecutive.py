"""The order `consecutive`: all uses of an item back to back."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from echo_jax.echo.orders.base import Piece
from echo_jax.echo.schedule import Schedule

__all__ = ["Consecutive"]

# At large factors a piece has fewer items, so that its arrays stay small: one item at
# the largest factor takes tens of MB.
_ITEMS_PER_PIECE = 1024
_USES_PER_PIECE = 65_536


@dataclass
class Consecutive:
    """Emits all uses of an item back to back; each round is one item."""

    schedule: Schedule
    buffer: int
    batch_size: int
    seed: int
    max_departed: int = field(default=0, init=False)

    def __post_init__(self):
        # All items of a batch: each takes a slot until the batch ends.
        self.num_slots = self.batch_size // int(self.schedule.min_factor) + 2
        self.window = self.num_slots + 1

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        while True:
            uses, after = self.schedule.uses(anchor, _ITEMS_PER_PIECE, carry)
            ends = np.cumsum(uses)
            if ends[-1] > _USES_PER_PIECE:
                fitting = int(np.searchsorted(ends, _USES_PER_PIECE, side="right"))
                uses, after = self.schedule.uses(anchor, max(fitting, 1), carry)
                ends = np.cumsum(uses)
            index = np.repeat(np.arange(anchor, anchor + uses.size), uses)
            repeat = (np.arange(ends[-1]) - np.repeat(ends - uses, uses)).astype(
                np.int32
            )
            last = np.zeros(ends[-1], bool)
            last[ends - 1] = True
            yield Piece(anchor, anchor, carry, index, repeat, last, newest=index)
            anchor, carry = anchor + uses.size, after

    def next_anchor(self, index: int) -> int:
        return index
