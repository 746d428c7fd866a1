"""The orders `spread` and `window_shuffle` as TensorFlow graph operations.

They make the same uses, round by round, as `echo_jax.echo.orders.spread` and
`echo_jax.echo.orders.window_shuffle` do with NumPy, in the same integer arithmetic.
Those modules explain the orders. This one has only the needs of a graph: a state of
tensors, and all cohorts side by side in one table instead of one object each.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echo_jax.echo.adapters.tensorflow_extra import tf
from echo_jax.echo.orders.spread import Spread
from echo_jax.echo.orders.window_shuffle import WindowShuffle
from echo_jax.echo.schedule import Schedule

__all__ = ["GraphSchedule", "GraphShuffle", "GraphSpread", "RoundUses", "Windows"]

_GOLDEN = 0x9E3779B97F4A7C15
_POWERS_OF_TWO = 1 << np.arange(63)


class RoundUses(NamedTuple):
    """The uses of a round in order: ``int64[n]`` twice, and ``bool[n]``."""

    index: Any
    repeat: Any
    last: Any


class Windows:
    """The fresh items of each round: a few windows of given sizes, then equal ones."""

    def __init__(self, warm: Sequence[int], steady: int):
        self.num_warm = len(warm)
        self._sizes = np.array([*warm, steady], np.int64)
        self._starts = np.cumsum([0, *warm], dtype=np.int64)
        self._gaps = np.zeros(len(warm) + 1, np.int64)
        for number in reversed(range(len(warm))):
            empty = self._sizes[number + 1] == 0
            self._gaps[number] = self._gaps[number + 1] + 1 if empty else 0

    def number_of(self, index: Any) -> Any:
        """Returns the window that holds an item, ``int64[]``; never an empty window."""
        if not self.num_warm:
            return index // self._sizes[-1]
        beyond = tf.maximum(index - self._starts[-1], 0)
        warm = tf.searchsorted(self._starts, [index], side="right")[0]
        return tf.cast(warm, tf.int64) - 1 + beyond // self._sizes[-1]

    def size(self, number: Any) -> Any:
        return tf.gather(self._sizes, tf.minimum(number, self.num_warm))

    def start(self, number: Any) -> Any:
        """Returns the fresh index of the first item of a window."""
        start = tf.gather(self._starts, tf.minimum(number, self.num_warm))
        return start + tf.maximum(number - self.num_warm, 0) * self._sizes[-1]

    def gap(self, number: Any) -> Any:
        """Returns how many windows without an item follow a window."""
        return tf.gather(self._gaps, tf.minimum(number, self.num_warm))


class GraphSchedule:
    """`Schedule.uses` in graph operations, for constant and piecewise factors."""

    def __init__(self, schedule: Schedule):
        self._starts = np.array(schedule.starts, np.int64)
        self._denominator = schedule.denominator
        self._units = np.array(
            [int(factor * schedule.denominator) for factor in schedule.factors],
            np.int64,
        )

    def uses_of(self, item: Any, carry: Any) -> tuple[Any, Any]:
        """Returns the number of uses of one item, and the carry after it."""
        unit = self._units[0]
        if len(self._units) > 1:
            piece = tf.searchsorted(self._starts, [item], side="right")[0] - 1
            unit = tf.gather(self._units, piece)
        total = carry + unit
        uses = total // self._denominator
        return uses, total - uses * self._denominator

    def uses(self, start: Any, count: Any, carry: Any) -> tuple[Any, Any]:
        """Returns the numbers of uses of items, ``int64[count]``, and the carry."""
        items = tf.range(start, start + count)
        piece = tf.searchsorted(self._starts, items, side="right") - 1
        units = tf.cumsum(tf.gather(self._units, piece))
        total = tf.concat([[carry], carry + units], 0)
        whole = total // self._denominator
        return whole[1:] - whole[:-1], tf.math.floormod(total[-1], self._denominator)


class _SpreadState(NamedTuple):
    """The cohort, item and item's uses of each seat of all live cohorts, in order."""

    # The seats of a cohort only swap items of the same number of uses, so the uses stay
    # with the seat.

    round: Any
    carry: Any
    cohort: Any
    seat: Any
    uses: Any
    index: Any


class GraphSpread:
    """The order `spread`; an item is used within ``num_live`` rounds."""

    def __init__(self, order: Spread):
        sizes = order.sizes
        self.windows = Windows(sizes.warm, sizes.steady)
        self.num_live = sizes.max_uses
        self._schedule = GraphSchedule(order.schedule)
        self._keys = np.array(order.keys, np.uint64)
        self._uniform = order.uniform
        # From this round on, every round is like the one before.
        last = self.windows.num_warm + sizes.max_uses
        self._shares = np.array([order.swap_share(r) for r in range(last + 1)])

    def initial_state(self, item: int, carry: int) -> _SpreadState:
        """Returns the state before the round that begins with an item."""
        now = self.windows.number_of(tf.constant(item, tf.int64))
        none = np.zeros(0, np.int64)
        return _SpreadState(now, np.int64(carry), none, none, none, none)

    def advance(self, state: _SpreadState) -> tuple[_SpreadState, RoundUses]:
        """Makes the uses of the round that the state names."""
        now = state.round
        live = tf.where(now - state.cohort < self.num_live)[:, 0]
        cohort, seat, uses, index = (tf.gather(c, live) for c in state[2:])
        index = self._permuted(now, cohort, seat, uses, index)
        size, start = self.windows.size(now), self.windows.start(now)
        new_uses, carry = self._schedule.uses(start, size, state.carry)
        cohort = tf.concat([cohort, tf.fill([size], now)], 0)
        seat = tf.concat([seat, tf.range(size)], 0)
        uses = tf.concat([uses, new_uses], 0)
        index = tf.concat([index, tf.range(start, start + size)], 0)
        state = _SpreadState(now + 1, carry, cohort, seat, uses, index)

        # A seat's time is its share of the round; of equal times the oldest first.
        time = _float(seat) / _float(self.windows.size(cohort))
        left = uses - (now - cohort)
        order = tf.argsort(time, stable=True)
        order = tf.gather(order, tf.where(tf.gather(left, order) > 0)[:, 0])
        index, repeat, left = (
            tf.gather(column, order) for column in (index, now - cohort, left)
        )
        return state, RoundUses(index, repeat, left == 1)

    def _permuted(self, now: Any, cohort: Any, seat: Any, uses: Any, index: Any) -> Any:
        """Returns the items of all seats after swaps within each group."""
        size, age = self.windows.size(cohort), now - cohort
        share = tf.gather(self._shares, tf.minimum(now, len(self._shares) - 1))
        # In segments of one seat nothing moves.
        length = tf.maximum(tf.cast(_float(size) * share, tf.int64), 1)
        segment = (seat + age % 2 * (length // 2)) // length
        group = segment if self._uniform else segment * (self.num_live + 1) + uses
        # The bits of a key that count are those that fit in `grouped_argsort`.
        highest = tf.math.unsorted_segment_max(group, age, self.num_live)
        bits = _bit_length(size - 1) + _bit_length(tf.gather(highest, age))
        key = tf.bitwise.right_shift(
            _mix(tf.gather(self._keys, age), index), tf.cast(bits, tf.uint64)
        )
        # The cohorts one after the other; within them the groups.
        group -= age * (tf.reduce_max(tf.concat([group, [0]], 0)) + 1)
        by_seat = tf.argsort(group, stable=True)
        by_key = tf.argsort(key, stable=True)
        by_key = tf.gather(by_key, tf.argsort(tf.gather(group, by_key), stable=True))
        return tf.gather(tf.gather(index, by_key), tf.math.invert_permutation(by_seat))


class _ShuffleState(NamedTuple):
    """The uses that have not left yet, of all items up to the next window's end."""

    next_start: Any
    carry: Any
    time: Any
    index: Any
    repeat: Any
    last: Any


class GraphShuffle:
    """The order `window_shuffle`; an item is used within ``num_live`` rounds."""

    # Unlike the rounds of `WindowShuffle`, its rounds end just before the next window's
    # first use. So no window is read before it is needed.

    def __init__(self, order: WindowShuffle):
        self.windows = Windows([], order.delay)
        self.num_live = 2
        self._delay = order.delay
        self._repeat_bits = order.repeat_bits
        self._delay_bits = order.delay_bits
        self._key = tf.constant(order.key, tf.uint64)
        self._schedule = GraphSchedule(order.schedule)

    def initial_state(self, item: int, carry: int) -> _ShuffleState:
        """Returns the state before the round that begins with an item."""
        after, columns = self._timed(np.int64(item), np.int64(carry))
        return _ShuffleState(np.int64(item + self._delay), after, *columns)

    def advance(self, state: _ShuffleState) -> tuple[_ShuffleState, RoundUses]:
        """Makes the uses of the next round."""
        held = state[2:]
        carry, coming = self._timed(state.next_start, state.carry)
        leaves = held[0] < tf.reduce_min(coming[0])
        now, later = tf.where(leaves)[:, 0], tf.where(~leaves)[:, 0]
        now = tf.gather(now, tf.argsort(tf.gather(held[0], now), stable=True))
        columns = (
            tf.concat([tf.gather(old, later), new], 0)
            for old, new in zip(held, coming, strict=True)
        )
        return (
            _ShuffleState(state.next_start + self._delay, carry, *columns),
            RoundUses(*(tf.gather(column, now) for column in held[1:])),
        )

    def _timed(self, start: Any, carry: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns the carry after a window; time, index, repeat, last of its uses."""
        uses, carry = self._schedule.uses(start, self._delay, carry)
        place = tf.range(tf.reduce_sum(uses))
        local = tf.searchsorted(tf.cumsum(uses), place, "right", tf.int64)
        index = start + local
        repeat = place - tf.gather(tf.cumsum(uses, exclusive=True), local)
        random = _mix(self._key, index * (1 << self._repeat_bits) + repeat)
        delay = tf.bitwise.right_shift(random, np.uint64(64 - self._delay_bits))
        # The first use to leave is repeat 0, whichever was drawn first.
        apart = local * (1 << (self._delay_bits + self._delay.bit_length()))
        delay = tf.sort(apart + tf.cast(delay, tf.int64) * self._delay) - apart
        time = index * (1 << self._delay_bits) + delay
        return carry, (time, index, repeat, repeat + 1 == tf.gather(uses, local))


def _mix(start: Any, counter: Any) -> Any:
    """Returns `echo_jax.echo.keys.mix` in graph operations; ``start`` is ``uint64``."""
    z = tf.cast(counter, tf.uint64) * np.uint64(_GOLDEN) + (start + np.uint64(_GOLDEN))
    z = tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, np.uint64(30)))
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z = tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, np.uint64(27)))
    z *= np.uint64(0x94D049BB133111EB)
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, np.uint64(31)))


def _bit_length(values: Any) -> Any:
    """Returns ``int.bit_length`` of non-negative ``int64[n]``."""
    return tf.searchsorted(_POWERS_OF_TWO, values, side="right", out_type=tf.int64)


def _float(values: Any) -> Any:
    return tf.cast(values, tf.float64)
