"""The order `shuffle_buffer`: repeats that pass through the paper's shuffle buffer.

The buffer has M uses, as in tf.data and Choi et al. 2019. Uses are numbered
0, 1, 2, ..., those of an item back to back. At first, use n < M is in slot n. Draw t
takes the use in a random slot, and use M + t replaces it. The slot of draw t follows
from the seed and t alone, so the content of a slot follows from its last draw. No
content has to be saved: a restore looks back until it has found a draw of every slot.

The first use of an item that leaves is repeat 0, whichever it was. The plan drops uses
of items after the end of the stream. The remaining uses then leave at random, as from
tf.data's buffer.

The carry of a round is the schedule's carry plus a number in whole units: the uses of
the items from the anchor on that left before the round.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.base import Piece, stable_argsort
from echo_jax.echo.schedule import Schedule

__all__ = ["ShuffleBuffer"]

# Slots are chosen with 32 random bits.
_MAX_BUFFER = 1 << 31
# A use stays longer than buffer * (ln buffer + this) draws with a probability of
# exp(-40) / buffer, about 4e-18 / buffer.
_SURELY_GONE = 40
_BATCHES_PER_ROUND = 8
_ANCHORS_PER_BUFFER = 8


@dataclass
class ShuffleBuffer:
    """Emits repeats through a shuffle buffer of ``buffer`` uses."""

    schedule: Schedule
    buffer: int
    batch_size: int
    seed: int

    def __post_init__(self):
        if self.buffer > _MAX_BUFFER:
            raise ValueError(
                f"buffer={self.buffer} is more than order='shuffle_buffer' can draw "
                f"from; use at most {_MAX_BUFFER}"
            )
        self.round_length = max(self.buffer, _BATCHES_PER_ROUND * self.batch_size)
        # Every anchor is a multiple of it, so that few upstream states are kept.
        self.stride = -(-self.buffer // _ANCHORS_PER_BUFFER)
        least = self.schedule.min_factor
        # The items in the buffer, and the items that enter it during a batch.
        self.num_slots = self.buffer + math.ceil(self.batch_size / least) + 1
        oldest = math.ceil(self.buffer * (math.log(self.buffer) + _SURELY_GONE))
        self.window = math.ceil((oldest + self.round_length) / least) + 1
        self.max_departed = self.window * math.ceil(self.schedule.max_factor)
        self.key = sequence(self.seed, 3)

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        left_before, carry = divmod(carry, self.schedule.denominator)
        incoming = _Incoming(self.schedule, anchor, carry)
        first_draw = round_ * self.round_length
        entered = incoming.take(self.buffer + left_before)
        slots = entered[self._numbers(first_draw) - (first_draw - left_before)]
        num_items = incoming.uses.size
        left = np.bincount(entered - anchor, minlength=num_items)
        left -= np.bincount(slots - anchor, minlength=num_items)
        del entered
        while True:
            oldest = int(slots.min())
            passed = oldest // self.stride * self.stride - anchor
            _, carry = self.schedule.uses(anchor, passed, carry)
            anchor, left = anchor + passed, left[passed:]
            incoming.forget(passed)
            state = int(left.sum()) * self.schedule.denominator + carry
            entering = incoming.take(self.round_length)
            if int(entering[-1]) - oldest >= self.window:
                raise RuntimeError(
                    f"item {oldest} has stayed in a shuffle buffer of {self.buffer} "
                    f"until item {entering[-1]} came, which the plan has no room for; "
                    "use another seed"
                )
            drawn = self._slots(first_draw, first_draw + self.round_length)
            index = _exchange(slots, drawn, entering)
            left = np.pad(left, (0, incoming.uses.size - left.size))
            repeat = _count_off(index - anchor, left)
            last = repeat + 1 == incoming.uses[index - anchor]
            newest = np.maximum.accumulate(index)
            yield Piece(round_, anchor, state, index, repeat, last, newest)
            round_, first_draw = round_ + 1, first_draw + self.round_length

    def next_anchor(self, index: int) -> int:
        return -(-index // self.stride) * self.stride

    def _slots(self, start: int, stop: int) -> np.ndarray:
        """Returns the slots of consecutive draws, ``int64[stop - start]``."""
        random = mix(self.key, np.arange(start, stop))
        random >>= np.uint64(32)
        random *= np.uint64(self.buffer)
        random >>= np.uint64(32)
        return random.view(np.int64)

    def _numbers(self, draw: int) -> np.ndarray:
        """Returns the number of the use in each slot before a draw, ``int64[M]``."""
        numbers = np.arange(self.buffer)
        # A number below M is a use from the start, or its draw is not found yet.
        while draw > 0 and numbers.min() < self.buffer:
            start = max(0, draw - self.round_length)
            entered = np.arange(start, draw) + self.buffer
            np.maximum.at(numbers, self._slots(start, draw), entered)
            draw = start
        return numbers


class _Incoming:
    """The items of all uses in order, from one item on."""

    def __init__(self, schedule: Schedule, item: int, carry: int):
        self._schedule = schedule
        self._next_item, self._carry = item, carry
        # ``uses`` has those of the items from the first one not forgotten on, int64[n].
        self._waiting = self.uses = np.zeros(0, np.int64)

    def take(self, count: int) -> np.ndarray:
        """Returns the items of the next ``count`` uses, ``int64[count]``."""
        parts, uses = [self._waiting], [self.uses]
        missing = count - self._waiting.size
        size = int(max(0, missing) / self._schedule.max_factor) + 1
        while missing > 0:
            found, self._carry = self._schedule.uses(self._next_item, size, self._carry)
            items = np.arange(self._next_item, self._next_item + size)
            parts.append(np.repeat(items, found))
            uses.append(found)
            missing -= parts[-1].size
            self._next_item += size
            # The factor may be far below its bound.
            size *= 2
        items = np.concatenate(parts)
        self._waiting = items[count:].copy()
        self.uses = np.concatenate(uses)
        return items[:count]

    def forget(self, count: int) -> None:
        """Forgets the numbers of uses of the first ``count`` items."""
        self.uses = self.uses[count:]


def _exchange(slots: np.ndarray, drawn: np.ndarray, entering: np.ndarray) -> np.ndarray:
    """Puts items into the slots ``drawn`` in turn; returns the items that leave."""
    order = stable_argsort(drawn)
    slot, entering = drawn[order], entering[order]
    changes = np.flatnonzero(slot[1:] != slot[:-1]) + 1
    first = np.concatenate([[0], changes])
    # The item that the draw before put in, or the item in the slot until now.
    leaving = np.empty_like(entering)
    leaving[1:] = entering[:-1]
    leaving[first] = slots[slot[first]]
    last = np.concatenate([changes - 1, [slot.size - 1]])
    slots[slot[last]] = entering[last]
    in_turn = np.empty_like(leaving)
    in_turn[order] = leaving
    return in_turn


def _count_off(items: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Returns each item's number of earlier uses, ``int32[n]``; updates ``left``."""
    # ``left`` has the number of uses of each item before all of these.
    order = stable_argsort(items)
    item = items[order]
    first = np.concatenate([[0], np.flatnonzero(item[1:] != item[:-1]) + 1])
    counts = np.diff(first, append=item.size)
    repeat = np.empty(items.size, np.int32)
    repeat[order] = np.arange(item.size) - np.repeat(first - left[item[first]], counts)
    left[item[first]] += counts
    return repeat
