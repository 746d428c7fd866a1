"""The order `spread`: uses of an item evenly far apart, at a constant feed.

A round takes a cohort of fresh items and emits one use of every item that still has
one: the first use of its own cohort, the second use of the cohort before, and so on.
The cohorts are merged evenly by position, so fresh items come at a constant rate.

From round to round a cohort is permuted within segments of at most half a round, whose
borders shift. So uses of an item are half to one and a half rounds apart. Only items
with the same number of uses swap places, so the number of items alive does not depend
on chance.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.base import Broken, Order, Pairs, Piece, grouped_argsort, lags

_MAX_USES = 10_000


@dataclass
class _Cohort:
    """Items that arrived in the same round."""

    start: int  # fresh index of the first item
    carry: int  # the schedule's, before the first item
    uses: np.ndarray  # number of uses of each item, int64[n]
    seats: np.ndarray  # the items in order of their positions, from `start` on


class Spread(Order):
    """Spreads the uses of an item evenly."""

    # The first round is the first batch. Rounds grow until the buffer is full, so that
    # a large one does not delay the first echo. `_starts` has the first items of these
    # cohorts. All later ones have `_steady` items.

    name = "spread"
    sentence = "evenly far apart, never two in a batch, at a constant feed"

    def __post_init__(self):
        self._low, high = self.schedule.min_factor, self.schedule.max_factor
        self._max_uses = math.ceil(high)
        # A round has a cohort for each use of an item, and each is laid out apart.
        if self._max_uses > _MAX_USES:
            raise ValueError(
                f"order='spread' takes factors of at most {_MAX_USES}, and this one is "
                f"up to {self._max_uses}; use a smaller factor, or another order"
            )
        factor = self.schedule.constant
        # The uses of every item, and the share of items that have one more; or None.
        self._whole = math.floor(self._low)
        self._part = None if factor is None else factor - self._whole
        # The rounds that an item stays after its own, on average or at most.
        self._lived = (factor or self._max_uses) - 1
        # Rounding of merged cohorts moves a use by at most this many places.
        self._slack = self._max_uses + 2 if self.batch_size > 1 else 0
        self._margin = self._max_uses + 1
        # Echoes take up to half of the places that they take later.
        top = float(high)
        self._feed = min((top + 1) / (2 * top), 1.5 / top)
        self._set_sizes()
        self.num_slots = self.buffer
        self._sizes: list[int] = []
        # The most items of all cohorts that are alive, and of the next one.
        start, width = self._start, self._max_uses + 1
        ends = range(1, len(self._starts) + width)
        self.window = max(start(end) - start(end - width) for end in ends)

    def _set_sizes(self) -> None:
        """Sets the sizes of the cohorts; ValueError if the buffer is too small."""
        # The size of cohorts at which no batch has two uses of an item.
        needed = math.ceil((self.batch_size + self._slack) / self._low)
        kept = self.batch_size
        if self._lived < 1:
            kept = self._some(kept, self._lived)[1]
        kept = max(kept, math.ceil(self._lived * needed)) + self._margin
        sizes = itertools.count(max(self.buffer, kept, math.ceil(needed / 2)))
        workable = next(size for size in sizes if self._grow(size, needed))
        if workable > self.buffer:
            factor = self.schedule.constant or f"up to {self._max_uses}"
            why = f"a batch of {self.batch_size} would hold an item twice"
            if self.batch_size == 1:
                why = "uses of an item would be back to back"
            raise ValueError(
                f"buffer={self.buffer} is too small for order='spread' at factor "
                f"{factor}: {why}. Use buffer={workable} or more, or a smaller factor "
                "or batch_size."
            )

    def _grow(self, buffer: int, needed: int) -> bool:
        """Sets the sizes for a buffer; returns whether rounds reach the steady size."""
        # Slots that a batch frees serve only the next batch, so a batch needs room for
        # its own fresh items as well.
        room = buffer - self._margin
        reserve = math.ceil(self.batch_size / self._low) + 1
        # Beyond two buffers of items in a round a restore would re-read too much.
        roomy = max(int((room - reserve) / self._lived), needed)
        self._steady = min(roomy, 2 * buffer)
        sizes = [min(self.batch_size, self._steady * self._max_uses)]
        self._starts = [0, sizes[0]]
        steady, seen, at_round = [self._steady] * self._max_uses, [], self._max_uses
        while (last := sizes[-self._max_uses :]) != steady:
            # The next size follows from the last sizes alone. If all of these recur,
            # growth has ended. Brent's search for cycles keeps only few of them.
            if last == seen:
                return False
            if len(sizes) >= at_round:
                seen, at_round = last, 2 * len(sizes)
            sizes.append(self._next_size(len(sizes), room))
            self._starts.append(self._starts[-1] + sizes[-1])
        return True

    def _next_size(self, round_: int, room: int) -> int:
        least, most = self._alive(round_, 1)
        _, kept = self._alive(round_, 1, later=1)
        wanted = min(self._steady, math.ceil(most * self._feed / (1 - self._feed)))
        if self.batch_size > 1:
            wanted = max(wanted, self.batch_size + self._slack - least)
        # Of the new items, too, only some live on.
        fits = room - kept
        if self._lived < 1:
            fits = int(max(0, fits - 1) / float(self._lived))
        return max(0, min(wanted, fits))

    def _alive(self, round_: int, youngest: int, later: int = 0) -> tuple[int, int]:
        """Returns bounds on the live items from an age on in a round, or later."""
        # At every age but one, all items are alive or none. So it sums runs of cohorts.
        age = self._whole - later
        least = self._younger(round_, youngest, age)
        if self._part is None:
            return least, self._younger(round_, youngest, self._max_uses - later)
        if not self._part or age < youngest:
            return least, least
        fewest, most = self._some(self._younger(round_, age, age + 1), self._part)
        return least + fewest, least + most

    def _younger(self, round_: int, youngest: int, age: int) -> int:
        """Returns the items of all cohorts from an age on, and below another one."""
        later = self._start(round_ - youngest + 1)
        return max(0, later - self._start(round_ - age + 1))

    def _some(self, size: int, part: Fraction | int) -> tuple[int, int]:
        """Returns bounds on the items with one more use among ``size`` in a row."""
        # In integers: the warm-up asks this many times, and fractions are slow.
        up, down = size * part.numerator, part.denominator
        return up // down, min(size, -(-up // down) + 1)

    def _start(self, cohort: int) -> int:
        """Returns the fresh index of a cohort's first item."""
        beyond = cohort - len(self._starts) + 1
        if beyond < 0:
            return self._starts[max(0, cohort)]
        return self._starts[-1] + beyond * self._steady

    def next_anchor(self, index: int) -> int:
        beyond = index - self._starts[-1]
        if beyond >= 0:
            return self._starts[-1] - (-beyond // self._steady) * self._steady
        return next(start for start in self._starts if start >= index)

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        cohorts: deque[_Cohort] = deque(maxlen=self._max_uses)
        for now in itertools.count(max(0, round_ - self._max_uses + 1)):
            share = self._swap_share(now)
            for age, cohort in enumerate(reversed(cohorts), 1):
                if age < self._max_uses:
                    self._permute(cohort, age, share)
            start = self._start(now)
            size = self._start(now + 1) - start
            uses, after = self.schedule.uses(start, size, carry)
            cohorts.append(_Cohort(start, carry, uses, np.arange(size)))
            carry = after
            if now >= round_:
                yield self._piece(now, cohorts)

    def _swap_share(self, round_: int) -> float:
        """Returns the share of a cohort's seats within which items swap."""
        if round_ == 0 or self.batch_size == 1:
            return 0.5
        length = min(self._alive(each, 0)[0] for each in (round_ - 1, round_))
        near = self.batch_size + self._slack
        return min(0.5, 1 - near / max(near, length))

    def _permute(self, cohort: _Cohort, age: int, share: float) -> None:
        length = int(cohort.seats.size * share)
        if length < 2:
            return
        # Borders shift every other round, so that items can cross them.
        group = np.arange(cohort.seats.size) + (length // 2 if age % 2 else 0)
        group //= length
        places: Any = slice(None)
        if self._part != 0:
            # Within a segment, only items of the same number of uses swap seats.
            group = group * (self._max_uses + 1) + cohort.uses[cohort.seats]
            places = grouped_argsort(group)
        key = mix(sequence(self.seed, 2, age), cohort.seats + cohort.start)
        cohort.seats[places] = cohort.seats[grouped_argsort(group, key)]

    def _piece(self, round_: int, cohorts: deque[_Cohort]) -> Piece:
        """Merges the cohorts by position, without items that are used up."""
        sizes = [cohort.seats.size for cohort in cohorts]
        if sizes != self._sizes:
            # A seat's time is its share of the round.
            time = [np.arange(size) / max(1, size) for size in sizes]
            self._sizes = sizes
            self._merged = np.argsort(np.concatenate(time), kind="stable")
            ages = np.arange(len(sizes), dtype=np.int32)[::-1]
            self._repeat = np.repeat(ages, sizes)[self._merged]

        def merged(columns: list[np.ndarray]) -> np.ndarray:
            return np.concatenate(columns).take(self._merged)

        index = merged([cohort.seats + cohort.start for cohort in cohorts])
        uses = merged([cohort.uses[cohort.seats] for cohort in cohorts])
        left, repeat, first = uses - self._repeat, self._repeat, cohorts[0]
        piece = Piece(round_, first.start, first.carry, index, repeat, left == 1)
        return piece if self._part == 0 else piece[left > 0]

    def most_rereads(self) -> int:
        """Returns the items of the rounds that are still in use."""
        # A round takes at most buffer / (e - 1) items, and at most two buffers. Its
        # items live for ceil(e) rounds. For a varying factor only the bound is known.
        each = min(Fraction(1) / self._lived, 2)
        return math.ceil(self._max_uses * each * self.buffer)

    def broken(self, uses: Pairs, due: Sequence[int]) -> Iterator[Broken]:
        """No duplicates in a batch, late repeats, an even feed, and even lags."""
        size, factor = self.batch_size, self.schedule.constant
        first_uses = [p for p, (_, repeat) in enumerate(uses) if repeat == 0]
        # After the last fresh item, missing items leave gaps.
        end = first_uses[-1] + 1 if first_uses else 0
        num_warm = self._starts[-1]
        warm = first_uses[num_warm] if num_warm < len(first_uses) else end
        for start in range(0, end - size + 1, size):
            where = f"in the batch of uses {start} to {start + size - 1}"
            batch = uses[start : start + size]
            index, count = Counter(index for index, _ in batch).most_common(1)[0]
            if count > 1:
                yield where, f"item {index} once", f"{count} times"
            fresh = sum(repeat == 0 for _, repeat in batch)
            if factor is not None and start >= warm:
                least, most = math.floor(size / factor), math.ceil(size / factor)
                if not least <= fresh <= most:
                    yield where, f"{least} to {most} fresh items", fresh
            if start == size > 1 and min(due[:size]) > 1 and fresh == size:
                yield where, "the first repeats", "only fresh items"
        if factor is None:
            return
        slack, length = self._max_uses + 2, self._steady * factor
        for before, position, _, lag in lags(uses[:end]):
            if before >= warm and abs(lag - length) > length / 2 + slack:
                expected = f"half to one and a half rounds of {float(length):.4g} uses"
                yield f"at use {position}", expected, f"a lag of {lag}"
