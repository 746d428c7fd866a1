"""The order `consecutive`: all uses of an item back to back."""

from collections.abc import Iterator, Sequence

import numpy as np

from echo_jax.echo.orders.base import Broken, Order, Pairs, Piece, lags

# At large factors a piece has fewer items, so that its arrays stay small.
_ITEMS_PER_PIECE, _USES_PER_PIECE = 1024, 65_536


class Consecutive(Order):
    """Emits all uses of an item back to back; each round is one item."""

    name = "consecutive"
    sentence = "back to back"
    by_item = True

    def __post_init__(self):
        # All items of a batch: each takes a slot until the batch ends.
        self.num_slots = self.batch_size // int(self.schedule.min_factor) + 2
        self.window = self.num_slots + 1

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        fitting = int(_USES_PER_PIECE / self.schedule.max_factor)
        count = max(1, min(_ITEMS_PER_PIECE, fitting))
        while True:
            uses, after = self.schedule.uses(anchor, count, carry)
            ends = np.cumsum(uses)
            index = np.repeat(np.arange(anchor, anchor + count), uses)
            repeat = np.arange(ends[-1]) - np.repeat(ends - uses, uses)
            last = np.zeros(ends[-1], bool)
            last[ends - 1] = True
            yield Piece(anchor, anchor, carry, index, repeat.astype(np.int32), last)
            anchor, carry = anchor + count, after

    def most_rereads(self) -> int:
        return 1

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """All uses of an item are adjacent."""
        for _, position, index, lag in lags(uses):
            if lag > 1:
                yield f"at use {position}", f"a lag of 1 for item {index}", lag
