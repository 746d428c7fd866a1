"""What an order is: rounds of uses that follow from a few integers."""

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
      round: The round it belongs to.
      anchor: The oldest item that the round may use.
      carry: The schedule's carry before the anchor, and what else the order needs
        to make the round again, in one integer.
      index: Fresh index of every use, ``int64[n]``.
      repeat: Which use of the item it is, ``int32[n]``.
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
    """What a plan needs of an order.

    Attributes:
      schedule: How often each item is used.
      num_slots: Slots that hold all items in use between two batches, and the
        fresh items of the batch.
      window: The indices of two items in use differ by less than this.
      max_departed: How many uses of the items from the anchor on may have left before a
        round begins; where it is above 0, the carry says how many did.
    """

    schedule: Schedule
    num_slots: int
    window: int
    max_departed: int

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """Makes all uses from the start of a round on, without end.

        Args:
          round_: The round to start with.
          anchor: Its anchor.
          carry: Its carry.
        """
        ...

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become an anchor."""
        ...
