"""The protocol of an order: rounds of uses that follow from a few integers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo_jax.echo.schedule import Schedule

__all__ = ["OrderRounds", "Piece"]


@dataclass
class Piece:
    """A run of uses of one round, in output order.

    Attributes:
      anchor: The oldest item that the round may use.
      carry: The schedule's carry before the anchor, plus any other state of the order.
      index: Fresh index of every use, ``int64[n]``.
      repeat: Number of the use of its item, from 0, ``int32[n]``.
      last: Whether it is the item's last use, ``bool[n]``.
      newest: The largest fresh index so far in the piece, ``int64[n]``.
    """

    round: int
    anchor: int
    carry: int
    index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray
    newest: np.ndarray


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
