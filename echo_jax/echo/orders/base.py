"""The protocol of an order: rounds of uses that follow from a few integers.

It also has two sorts of integers, several times faster than NumPy's stable argsort.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo_jax.echo.schedule import Schedule

__all__ = ["OrderRounds", "Piece", "grouped_argsort", "stable_argsort"]


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


class OrderRounds(Protocol):
    """An order, as a plan uses it.

    Attributes:
      num_slots: Slots for all items in use between two batches, and for the fresh
        items of the batch.
      window: The indices of two items in use differ by less than this.
      max_departed: The most uses of items from the anchor on that may leave before a
        round begins. If it is above 0, the carry includes their number.
    """

    schedule: Schedule
    num_slots: int
    window: int
    max_departed: int

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """Yields all uses from the start of a round on, without end."""
        ...

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become an anchor."""
        ...


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Returns ``np.argsort(values, kind="stable")`` of non-negative integers."""
    # It is several times faster: value and place are sorted as one integer if both fit
    # into 63 bits.
    if values.size == 0:
        return np.zeros(0, np.int64)
    bits = int(values.size - 1).bit_length()
    if int(values.max()).bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    packed = (values << bits) | np.arange(values.size)
    packed.sort()
    return packed & ((1 << bits) - 1)


def grouped_argsort(group: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns an order by group, and at random within a group, ``int64[n]``."""
    # The high bits of the key count, as many as fit beside group and place in 64 bits.
    if group.size == 0:
        return np.zeros(0, np.int64)
    bits = int(key.size - 1).bit_length()
    group_bits = int(group.max()).bit_length()
    packed = (key >> np.uint64(group_bits + bits)) << np.uint64(bits)
    packed |= np.arange(key.size, dtype=np.uint64)
    if group_bits:
        packed |= group.astype(np.uint64) << np.uint64(64 - group_bits)
    packed.sort()
    return (packed & np.uint64((1 << bits) - 1)).view(np.int64)
