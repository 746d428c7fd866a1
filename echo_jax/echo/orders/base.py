"""What an order is: rounds of uses that follow from a few integers.

It also has two sorts of integers, several times faster than NumPy's stable argsort.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from echo_jax.echo.schedule import Schedule

__all__ = ["Broken", "Order", "Pairs", "Piece", "grouped_argsort", "stable_argsort"]

# Where a promise is broken, what is expected there, and what is found.
Broken = tuple[str, object, object]
# (fresh index, repeat) of the uses of a whole stream, in output order.
Pairs = Sequence[tuple[int, int]]


@dataclass
class Piece:
    """A run of uses of one round, in output order."""

    round: int
    anchor: int  # the oldest item that the round may use
    carry: int  # the schedule's, before the anchor, and any other state of the order
    index: np.ndarray  # fresh index of every use, int64[n]
    repeat: np.ndarray  # number of the use of its item, from 0, int32[n]
    last: np.ndarray  # whether it is the item's last use, bool[n]
    newest: np.ndarray  # the largest fresh index so far in the piece, int64[n]


@dataclass
class Order:
    """An order, as plans use it and laws check it."""

    name: ClassVar[str]
    sentence: ClassVar[str]  # on the repeats of an item, for the docs and errors
    drifts: ClassVar[bool] = False  # whether it takes fresh items at random batches

    schedule: Schedule
    buffer: int
    batch_size: int
    seed: int

    # Slots for all items in use between two batches, and for the fresh ones of a batch.
    num_slots: int = field(default=0, init=False)
    # The indices of two items in use differ by less than this.
    window: int = field(default=0, init=False)
    # The most uses of items from the anchor on that may leave before a round begins. If
    # it is above 0, the carry includes their number.
    max_departed: int = field(default=0, init=False)

    def __post_init__(self):
        """Sets the sizes above; ValueError if the buffer does not fit."""
        raise NotImplementedError

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """Yields all uses from the start of a round on, without end."""
        raise NotImplementedError

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become an anchor."""
        return index

    def most_rereads(self) -> int:
        """Returns how many items a restore may read again (law 4)."""
        raise NotImplementedError

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """Yields the broken promises about lags in a whole stream (law 6)."""
        # ``due`` has each item's number of uses.
        raise NotImplementedError


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Returns ``np.argsort(values, kind="stable")`` of non-negative integers."""
    # Value and place are sorted as one integer if both fit into 63 bits.
    bits = max(0, values.size - 1).bit_length()
    if int(values.max(initial=0)).bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    packed = (values << bits) | np.arange(values.size)
    packed.sort()
    return packed & ((1 << bits) - 1)


def grouped_argsort(group: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns an order by group, and at random within a group, ``int64[n]``."""
    # The high bits of the key count, as many as fit beside group and place in 64 bits.
    bits = max(0, key.size - 1).bit_length()
    group_bits = int(group.max(initial=0)).bit_length()
    packed = (key >> np.uint64(group_bits + bits)) << np.uint64(bits)
    packed |= np.arange(key.size, dtype=np.uint64)
    if group_bits:
        packed |= group.astype(np.uint64) << np.uint64(64 - group_bits)
    packed.sort()
    return (packed & np.uint64((1 << bits) - 1)).view(np.int64)
