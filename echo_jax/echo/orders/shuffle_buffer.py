"""The order `shuffle_buffer`: repeats that pass through the paper's shuffle buffer.

The buffer has M uses, as in tf.data and Choi et al. 2019. Uses are numbered
0, 1, 2, ..., all uses of an item back to back. At first, use n < M is in slot n. Draw t
takes the use in a random slot, and use M + t replaces it. The slot of draw t follows
from the seed and t alone, so the content of a slot follows from its last draw. No
content has to be saved: a restore looks back until it has found a draw of every slot.

The first use of an item that leaves is repeat 0, whichever it was. After the end of the
stream the remaining uses leave at random, as from tf.data's buffer.

The carry of a round is the schedule's carry plus a number in whole units: the uses of
the items from the anchor on that left before the round.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.base import Broken, Order, Pairs, Piece, grouped_argsort

# Slots are chosen with 32 random bits.
_MAX_BUFFER = 1 << 31
# A use stays longer than buffer * (ln buffer + this) draws with a probability of
# exp(-40) / buffer, about 4e-18 / buffer.
_SURELY_GONE = 40
_BATCHES_PER_ROUND = 8
_ANCHORS_PER_BUFFER = 8  # So few upstream states are kept.


class ShuffleBuffer(Order):
    """Emits repeats through a shuffle buffer of ``buffer`` uses."""

    name = "shuffle_buffer"
    sentence = "the paper's own shuffle buffer: of `buffer` uses a random one leaves"
    drifts = True

    def __post_init__(self):
        if self.buffer > _MAX_BUFFER:
            raise ValueError(
                f"buffer={self.buffer} is more than order='shuffle_buffer' can draw "
                f"from; use at most {_MAX_BUFFER}"
            )
        self._round_length = max(self.buffer, _BATCHES_PER_ROUND * self.batch_size)
        self.stride = -(-self.buffer // _ANCHORS_PER_BUFFER)
        least = self.schedule.min_factor
        # The items in the buffer, and the items that enter it during a batch.
        self.num_slots = self.buffer + math.ceil(self.batch_size / least) + 1
        oldest = math.ceil(self.buffer * (math.log(self.buffer) + _SURELY_GONE))
        self.window = math.ceil((oldest + self._round_length) / least) + 1
        self.max_departed = self.window * math.ceil(self.schedule.max_factor)
        self._key = sequence(self.seed, 3)

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        left_before, carry = divmod(carry, self.schedule.denominator)
        draw = round_ * self._round_length
        # The number of the anchor's first use, the uses of the items from the anchor
        # on, and the carry after these items.
        base, uses, after = draw - left_before, np.zeros(0, np.int64), carry
        uses, after = self._more(uses, anchor, after, self.buffer + left_before)
        slots = self._numbers(draw) - base
        slots = anchor + np.searchsorted(np.cumsum(uses), slots, "right")
        while True:
            oldest = int(slots.min())
            passed = oldest // self.stride * self.stride - anchor
            _, carry = self.schedule.uses(anchor, passed, carry)
            base += int(uses[:passed].sum())
            anchor, uses = anchor + passed, uses[passed:]
            entered = draw + self.buffer - base
            stop = entered + self._round_length
            uses, after = self._more(uses, anchor, after, stop)
            items = np.arange(anchor, anchor + uses.size)
            entering = np.repeat(items, uses)[entered:stop]
            if int(entering[-1]) - oldest >= self.window:
                raise RuntimeError(
                    f"item {oldest} has stayed in a shuffle buffer of {self.buffer} "
                    f"until item {entering[-1]} came, which the plan has no room for; "
                    "use another seed"
                )
            # Of every item, the uses that have entered, but those in the buffer.
            left = np.clip(entered - np.cumsum(uses) + uses, 0, uses)
            left -= np.bincount(slots - anchor, minlength=uses.size)
            drawn = self._slots(draw, draw + self._round_length)
            index = _exchange(slots, drawn, entering)
            repeat = _count_off(index - anchor, left)
            last = repeat + 1 == uses[index - anchor]
            state = (draw - base) * self.schedule.denominator + carry
            yield Piece(round_, anchor, state, index, repeat, last)
            round_, draw = round_ + 1, draw + self._round_length

    def _more(
        self, uses: np.ndarray, anchor: int, carry: int, total: int
    ) -> tuple[np.ndarray, int]:
        """Adds numbers of uses of later items until they are ``total`` or more."""
        count = math.ceil((total - uses.sum()) / float(self.schedule.min_factor))
        more, carry = self.schedule.uses(anchor + uses.size, max(0, count), carry)
        return np.append(uses, more), carry

    def _slots(self, start: int, stop: int) -> np.ndarray:
        """Returns the slots of consecutive draws, ``int64[stop - start]``."""
        random = mix(self._key, np.arange(start, stop)) >> np.uint64(32)
        return ((random * np.uint64(self.buffer)) >> np.uint64(32)).view(np.int64)

    def _numbers(self, draw: int) -> np.ndarray:
        """Returns the number of the use in each slot before a draw, ``int64[M]``."""
        numbers = np.arange(self.buffer)
        # A number below M is a use from the start, or its draw is not found yet.
        while draw > 0 and numbers.min() < self.buffer:
            start = max(0, draw - self._round_length)
            entered = np.arange(start, draw) + self.buffer
            np.maximum.at(numbers, self._slots(start, draw), entered)
            draw = start
        return numbers

    def most_rereads(self) -> int:
        """Returns the items from the anchor to the end of a round."""
        return self.window + self.stride + 1

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """No use leaves the buffer before it has entered."""
        # After the end of the stream some draws find nothing, but then all uses have
        # entered.
        first = list(itertools.accumulate(due, initial=0))
        for position, (index, repeat) in enumerate(uses):
            number, entered = first[index] + repeat, position + self.buffer
            if number >= entered:
                found = f"use {number}, item {index} repeat {repeat}"
                yield f"at use {position}", f"one of the first {entered} uses", found


def _grouped(values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a stable order, the values in it, and where each value begins."""
    order = grouped_argsort(values)
    in_order = values[order]
    changes = np.flatnonzero(in_order[1:] != in_order[:-1])
    return order, in_order, np.concatenate([[0], changes + 1])


def _exchange(slots: np.ndarray, drawn: np.ndarray, entering: np.ndarray) -> np.ndarray:
    """Puts items into the slots ``drawn`` in turn; returns the items that leave."""
    order, slot, first = _grouped(drawn)
    entering = entering[order]
    # The item that the draw before put in, or the item in the slot until now.
    leaving = np.roll(entering, 1)
    leaving[first] = slots[slot[first]]
    slots[slot[first]] = entering[np.append(first[1:], slot.size) - 1]
    in_turn = np.empty_like(leaving)
    in_turn[order] = leaving
    return in_turn


def _count_off(items: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Returns each item's number of earlier uses, ``left`` of them before these."""
    order, item, first = _grouped(items)
    start = np.repeat(first - left[item[first]], np.diff(first, append=item.size))
    repeat = np.empty(items.size, np.int32)
    repeat[order] = np.arange(item.size) - start
    return repeat
