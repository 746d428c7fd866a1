"""The order `window_shuffle`: uses leave at random times, within a bounded delay.

A use of item k leaves at a random time between the arrivals of item k and of item
k + delay. It is a shuffle buffer (Choi et al. 2019, section 3) with a limit on the time
that a use stays. So a restore re-reads at most two buffers.

A round is the span of ``delay`` arrivals, and one sort of integers.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.base import Broken, Order, Pairs, Piece

_MAX_DELAY_BITS = 16
_MIN_DELAY_BITS = 10


class WindowShuffle(Order):
    """Emits every use at a random time, at most ``delay`` arrivals after its item."""

    name = "window_shuffle"
    sentence = "at random within the buffer, never later: a bounded delay"
    drifts = True

    def __post_init__(self):
        # Slots that a batch frees serve only the next one, so a batch needs room
        # for its own fresh items. Rarely more come; then the plan cuts the batch.
        batch = self.batch_size / float(self.schedule.min_factor)
        room = min(self.buffer // 4, int(batch + 4 * batch**0.5) + 1)
        self.delay = self.buffer - room
        self._repeat_bits = math.ceil(self.schedule.max_factor - 1).bit_length()
        # Bits for the items of two rounds, for the repeat, and for the last flag.
        self._use_bits = self.delay.bit_length() + self._repeat_bits + 2
        # A use leaves up to two rounds after the start of its own round. A delay is
        # drawn in 2^delay_bits steps.
        left = 62 - self._use_bits - self.delay.bit_length()
        self._delay_bits = min(_MAX_DELAY_BITS, left)
        if self._delay_bits < _MIN_DELAY_BITS:
            fits = 60 - self._repeat_bits - _MIN_DELAY_BITS
            raise ValueError(
                f"buffer={self.buffer} is more than a shuffle of up to "
                f"{math.ceil(self.schedule.max_factor)} uses an item can time; use at "
                f"most {(1 << fits // 2) - 1}"
            )
        # Fresh items of two lanes differ by at most the delay, and by about the root of
        # the buffer; ten times the root is more than ten standard deviations.
        self.drift = min(2 * self.buffer, math.ceil(10 * self.buffer**0.5))
        self.num_slots = self.buffer + 1
        self.window, self.stride = 2 * self.delay + 2, self.delay
        self._key = sequence(self.seed, 1)

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        first = round_ * self.delay
        round_end = self.delay << (self._delay_bits + self._use_bits)
        round_on = round_end + (self.delay << (self._repeat_bits + 1))
        uses, after = self._uses(anchor, first - anchor, first, carry)
        waiting = uses.compress(uses >= 0)
        while True:
            uses, next_carry = self._uses(first, self.delay, first, after)
            now = uses < round_end
            leaving = np.concatenate([waiting, uses.compress(now)])
            leaving.sort()
            waiting = uses.compress(~now)
            waiting -= round_on
            repeat = leaving.astype(np.int32)
            last = (repeat & 1).astype(bool)
            repeat >>= 1
            repeat &= (1 << self._repeat_bits) - 1
            leaving >>= self._repeat_bits + 1
            leaving &= (1 << (self._use_bits - self._repeat_bits - 1)) - 1
            leaving += first - self.delay
            yield Piece(round_, anchor, carry, leaving, repeat, last)
            round_, anchor, carry, after = round_ + 1, first, after, next_carry
            first += self.delay

    def _uses(
        self, start: int, count: int, first: int, carry: int
    ) -> tuple[np.ndarray, int]:
        """Returns the uses of some items as integers, and the carry after them."""
        # From the high bits to the low ones, a use is the time that it leaves after the
        # arrival of item ``first``, its item counted from one round before that item,
        # its repeat, and its last flag. So nothing has to be gathered after the sort.
        num_uses, after = self.schedule.uses(start, count, carry)
        item = np.arange(start, start + count)
        repeat = np.arange(num_uses.max(initial=0))[:, None]
        is_due = repeat < num_uses
        # An item's delays in ascending order: the first of its uses to leave is repeat
        # 0, whichever was drawn first. Missing uses come last.
        random = mix(self._key, (item << self._repeat_bits) + repeat)
        random >>= np.uint64(64 - self._delay_bits)
        delays = np.where(is_due, random, 0xFFFF).astype(np.uint16)
        _sort_columns(delays)
        uses = delays.astype(np.int64) * (self.delay << self._use_bits)
        uses += (item - first) << (self._delay_bits + self._use_bits)
        uses += (item - (first - self.delay)) << (self._repeat_bits + 1)
        uses += 2 * repeat + (repeat + 1 == num_uses)
        return uses[is_due], after

    def most_rereads(self) -> int:
        return 2 * self.buffer

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """No use comes after one of an item that is `buffer` or more younger."""
        newest = -1
        for position, (index, _) in enumerate(uses):
            newest = max(newest, index)
            if newest - index >= self.buffer:
                expected = f"items {newest - self.buffer + 1} to {newest}"
                yield f"at use {position}", expected, f"item {index}"


def _sort_columns(array: np.ndarray) -> None:
    """Sorts each column in place, by comparing whole rows if they are few and long."""
    rows, columns = array.shape
    if 50 * rows**2 > columns:
        return array.sort(axis=0)
    for end in range(rows, 1, -1):
        for low, high in itertools.pairwise(array[:end]):
            larger = np.maximum(low, high)
            np.minimum(low, high, out=low)
            high[:] = larger
