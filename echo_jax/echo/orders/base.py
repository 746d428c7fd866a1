"""Orders: rounds of uses that follow from a few integers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from echo_jax.echo.schedule import Schedule

_NO_KEY = np.uint64(0)
# The place of a broken promise, the expected value, and the one found.
Broken = tuple[str, object, object]
# (fresh index, repeat) of the uses of a whole stream, in output order.
Pairs = Sequence[tuple[int, int]]


@dataclass
class Piece:
    """The uses of a round, in output order."""

    round: int
    anchor: int  # the oldest item that the round may use
    carry: int  # the schedule's, before the anchor, and any other state of the order
    index: np.ndarray  # fresh index of every use, int64[n]
    repeat: np.ndarray  # number of the use of its item, from 0, int32[n]
    last: np.ndarray  # whether it is the item's last use, bool[n]

    def __getitem__(self, where: Any) -> "Piece":
        """Returns some of the uses."""
        index, repeat, last = self.index[where], self.repeat[where], self.last[where]
        return replace(self, index=index, repeat=repeat, last=last)


@dataclass
class Order:
    """An order, as plans use it and laws check it."""

    name: ClassVar[str]
    sentence: ClassVar[str]  # on the repeats of an item, for the docs and errors
    drifts: ClassVar[bool] = False  # whether it takes fresh items at random batches
    by_item: ClassVar[bool] = False  # whether rounds are items, and pieces many rounds

    schedule: Schedule
    buffer: int
    batch_size: int
    seed: int

    num_slots = 0  # for the items in use between batches, and a batch's fresh ones
    drift = 0  # fresh items by which two lanes, or a batch and their mean, may differ
    window = 0  # the indices of two items in use differ by less than it
    stride = 1  # anchors are multiples of it
    # Uses of items from the anchor on that may have left before a round, at most. If it
    # is above 0, the carry includes their number.
    max_departed = 0

    def __post_init__(self):
        """Sets the sizes above; ValueError if the buffer does not fit."""
        raise NotImplementedError

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """Yields all uses from the start of a round on, without end."""
        raise NotImplementedError

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become an anchor."""
        return -(-index // self.stride) * self.stride

    def most_rereads(self) -> int:
        """Returns how many items a restore may read again (law 4)."""
        raise NotImplementedError

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """Yields broken promises on lags (law 6); item k is ``due[k]`` times used."""
        raise NotImplementedError


def lags(uses: Pairs) -> Iterator[tuple[int, int, int, int]]:
    """Yields the positions of two uses of an item in turn, the item and their lag."""
    latest: dict[int, int] = {}
    for position, (index, _) in enumerate(uses):
        before = latest.get(index, position)
        if before < position:
            yield before, position, index, position - before
        latest[index] = position


def grouped_argsort(
    group: np.ndarray, key: np.ndarray | np.uint64 = _NO_KEY
) -> np.ndarray:
    """Returns an order by group, then by a random key or as they come, ``int64[n]``."""
    # Several times as fast as NumPy's stable argsort. Of the key it uses as many high
    # bits as fit beside group and place in 64 bits.
    bits = max(0, group.size - 1).bit_length()
    group_bits = int(group.max(initial=0)).bit_length()
    if group_bits + bits > 64:  # Without keys, in a `shuffle_buffer` of over 2^29 uses.
        return np.argsort(group, kind="stable")
    packed = (key >> np.uint64(group_bits + bits)) << np.uint64(bits)
    packed = packed | np.arange(group.size, dtype=np.uint64)
    packed |= group.astype(np.uint64) << np.uint64(64 - group_bits)
    packed.sort()
    return (packed & np.uint64((1 << bits) - 1)).view(np.int64)
