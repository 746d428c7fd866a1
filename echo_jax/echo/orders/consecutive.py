"""The order `consecutive`: all uses of an item back to back."""

from collections.abc import Iterator, Sequence

import numpy as np

from echo_jax.echo.orders.base import Broken, Order, Pairs, Piece

__all__ = ["Consecutive"]

# At large factors a piece has fewer items, so that its arrays stay small: one item at
# the largest factor takes tens of MB.
_ITEMS_PER_PIECE = 1024
_USES_PER_PIECE = 65_536


class Consecutive(Order):
    """Emits all uses of an item back to back; each round is one item."""

    name = "consecutive"
    sentence = "back to back"

    def __post_init__(self):
        # All items of a batch: each takes a slot until the batch ends.
        self.num_slots = self.batch_size // int(self.schedule.min_factor) + 2
        self.window = self.num_slots + 1

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        while True:
            uses, after = self.schedule.uses(anchor, _ITEMS_PER_PIECE, carry)
            if uses.sum() > _USES_PER_PIECE:
                fitting = int(np.count_nonzero(np.cumsum(uses) <= _USES_PER_PIECE))
                uses, after = self.schedule.uses(anchor, max(fitting, 1), carry)
            ends = np.cumsum(uses)
            index = np.repeat(np.arange(anchor, anchor + uses.size), uses)
            repeat = np.arange(ends[-1]) - np.repeat(ends - uses, uses)
            last = np.zeros(ends[-1], bool)
            last[ends - 1] = True
            repeat = repeat.astype(np.int32)
            yield Piece(anchor, anchor, carry, index, repeat, last, newest=index)
            anchor, carry = anchor + uses.size, after

    def most_rereads(self) -> int:
        return 1

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """All uses of an item are adjacent."""
        latest: dict[int, int] = {}
        for position, (index, _) in enumerate(uses):
            lag = position - latest.get(index, position - 1)
            if lag > 1:
                yield f"at use {position}", f"a lag of 1 for item {index}", lag
            latest[index] = position
