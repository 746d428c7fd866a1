"""The orders of an echo: pure sequences of (fresh index, repeat).

An order is cut into rounds, and everything in a round follows from the seed, the
round's number and the numbers of uses of the items in it. So a round can be made
anew at any time from a few integers. `consecutive` and `shuffle` are here;
`spread` has its own module.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.schedule import Schedule

__all__ = [
    "DELAY_BITS",
    "Consecutive",
    "OrderRounds",
    "Piece",
    "Shuffle",
    "grouped_argsort",
    "stable_argsort",
]

_ITEMS_PER_PIECE = 1024
DELAY_BITS = 16
_MAX_DELAY = 1 << 23


@dataclass
class Piece:
    """A run of uses of one round, in output order.

    Attributes:
      round: The round it belongs to.
      anchor: The oldest item that the round may use.
      carry: The schedule's carry before the anchor.
      index: Fresh index of every use, ``int64[n]``.
      repeat: Which use of the item it is, ``int32[n]``.
      last: Whether it is the item's last use, ``bool[n]``.
    """

    round: int
    anchor: int
    carry: int
    index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray


class OrderRounds(Protocol):
    """What a plan needs of an order.

    Attributes:
      num_slots: Slots that hold all items in use between two batches, and the
        fresh items of the batch.
      window: The indices of two items in use differ by less than this.
    """

    num_slots: int
    window: int

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """Makes all uses from the start of a round on, without end.

        Args:
          round_: The round to start with.
          anchor: Its anchor.
          carry: The schedule's carry before the anchor.
        """
        ...

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become an anchor."""
        ...


@dataclass
class Consecutive:
    """All uses of an item back to back; a round is an item."""

    schedule: Schedule
    batch_size: int

    def __post_init__(self):
        # All items that a batch touches: each takes a slot until the batch ends.
        self.num_slots = self.batch_size // int(self.schedule.min_factor) + 2
        self.window = self.num_slots + 1

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """See `OrderRounds`."""
        while True:
            uses, after = self.schedule.uses(anchor, _ITEMS_PER_PIECE, carry)
            ends = np.cumsum(uses)
            index = np.repeat(np.arange(anchor, anchor + uses.size), uses)
            repeat = (np.arange(ends[-1]) - np.repeat(ends - uses, uses)).astype(
                np.int32
            )
            last = np.zeros(ends[-1], bool)
            last[ends - 1] = True
            yield Piece(anchor, anchor, carry, index, repeat, last)
            anchor, carry = anchor + uses.size, after

    def next_anchor(self, index: int) -> int:
        """See `OrderRounds`: every item."""
        return index


@dataclass
class Shuffle:
    """Repeats that pass through a shuffle buffer of ``delay`` items.

    A use of item k leaves at a random time between the arrival of item k and that
    of item k + delay: a shuffle buffer (Choi et al. 2019, section 3) in which
    nothing stays longer than the buffer is large, so that a restore re-reads at
    most two buffers. A round is the span of ``delay`` arrivals.

    Attributes:
      delay: The longest time that a use stays, in arrivals of fresh items.
      key: The start of the random sequence.
      repeat_bits: How many bits a repeat takes beside its item.
    """

    schedule: Schedule
    buffer: int
    batch_size: int
    seed: int

    def __post_init__(self):
        # Slots that a batch frees serve only the next one, so a batch needs room
        # for its own fresh items. Rarely more come; then the plan cuts the batch.
        batch = self.batch_size / float(self.schedule.min_factor)
        reserve = min(self.buffer // 4, int(batch + 4 * batch**0.5) + 1)
        self.delay = self.buffer - reserve
        if self.delay > _MAX_DELAY:
            raise ValueError(
                f"buffer={self.buffer} is more than a shuffle can time; use at most "
                f"{_MAX_DELAY}, which is far beyond what longer lags gain"
            )
        self.repeat_bits = math.ceil(self.schedule.max_factor - 1).bit_length()
        self.num_slots = self.buffer + 1
        self.window = 2 * self.delay + 2
        self.key = sequence(self.seed, 1)

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        """See `OrderRounds`."""
        time, use, after = self._uses(anchor, round_ * self.delay - anchor, carry)
        held = time >= self._time(round_)
        time, use = time[held], use[held]
        while True:
            first, start = round_ * self.delay, self._time(round_)
            new_time, new_use, next_carry = self._uses(first, self.delay, after)
            now = new_time < self._time(round_ + 1)
            order = stable_argsort(np.concatenate([time, new_time[now]]) - start)
            leaving = np.concatenate([use, new_use[now]])[order]
            time, use = new_time[~now], new_use[~now]
            item = leaving >> (self.repeat_bits + 1)
            repeat = (leaving >> 1).astype(np.int32) & ((1 << self.repeat_bits) - 1)
            last = (leaving & 1).astype(bool)
            del new_time, new_use, now, order, leaving
            yield Piece(round_, anchor, carry, item, repeat, last)
            round_, anchor, carry, after = round_ + 1, first, after, next_carry

    def next_anchor(self, index: int) -> int:
        """See `OrderRounds`: the first item of a round."""
        return -(-index // self.delay) * self.delay

    def _time(self, round_: int) -> int:
        return (round_ * self.delay) << DELAY_BITS

    def _uses(
        self, start: int, count: int, carry: int
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Times and uses of some items, and the carry after them.

        A use is an integer: item, repeat, and whether it is the last, bit by bit.
        """
        if count <= 0:
            return np.zeros(0, np.int64), np.zeros(0, np.int64), carry
        uses, after = self.schedule.uses(start, count, carry)
        ends = np.cumsum(uses)
        item = np.repeat(np.arange(start, start + count), uses)
        use = np.arange(item.size)
        use -= np.repeat(ends - uses, uses)
        use |= item << self.repeat_bits
        delay = mix(self.key, use)
        delay >>= np.uint64(64 - DELAY_BITS)
        time = delay.view(np.int64)
        time *= self.delay
        # An item's delays in ascending order: the first of its uses to leave is
        # repeat 0, whichever was drawn first. Items stay apart in the sort.
        item -= start
        bits = DELAY_BITS + self.delay.bit_length()
        apart = item << bits
        time += apart
        time.sort()
        time -= apart
        item += start
        item <<= DELAY_BITS
        time += item
        use <<= 1
        use[ends - 1] += 1
        return time, use, after


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Returns ``np.argsort(values, kind="stable")``, several times faster.

    Value and place are sorted as one integer where both fit into 63 bits.

    Args:
      values: Non-negative ``int64[n]``.

    Returns:
      ``int64[n]``.
    """
    if values.size == 0:
        return np.zeros(0, np.int64)
    bits = int(values.size - 1).bit_length()
    if int(values.max()).bit_length() + bits > 63:
        return np.argsort(values, kind="stable")
    packed = (values << bits) | np.arange(values.size)
    packed.sort()
    return packed & ((1 << bits) - 1)


def grouped_argsort(group: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Returns an order by group, and at random within a group.

    Args:
      group: Non-negative ``int64[n]``.
      key: Random ``uint64[n]``; as many of its high bits count as fit beside group
        and place in 64 bits.

    Returns:
      ``int64[n]``.
    """
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
