"""The order `spread`: uses of an item evenly far apart, at a constant feed.

The output is cut into rounds. A round takes a cohort of fresh items and emits one use
of every item that still has one: the first use of its own cohort, the second use of the
cohort before, and so on. The cohorts are merged evenly by position, so fresh items come
at a constant rate.

From round to round a cohort keeps its positions, except for a random permutation within
segments. A segment is at most half a round long, and its borders shift. So uses of an
item are half to one and a half rounds apart, and its neighbours change.

Only items with the same number of uses swap places. So the positions that end an item's
life, and the number of items alive, do not depend on chance.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.orders.base import Piece, grouped_argsort, stable_argsort
from echo_jax.echo.schedule import Schedule

__all__ = ["CohortSizes", "Spread"]

_INTERVALS_PER_PIECE = 8192
_MAX_USES = 10_000


class CohortSizes:
    """The number of fresh items of each round: a short warm-up, then a constant."""

    # ``warm`` has the sizes of the first rounds, and all later ones are ``steady``. The
    # first round is the first batch. Rounds then grow until the buffer is full, so a
    # large buffer does not delay the first echo.

    def __init__(self, schedule: Schedule, buffer: int, batch_size: int):
        self.max_uses = math.ceil(schedule.max_factor)
        # A round has a cohort for each use of an item, and each is laid out apart.
        if self.max_uses > _MAX_USES:
            raise ValueError(
                f"order='spread' takes factors of at most {_MAX_USES}, and this one is "
                f"up to {self.max_uses}; use a smaller factor, or another order"
            )
        self._low, self._high = schedule.min_factor, schedule.max_factor
        self._even = schedule.constant is not None
        # The rounds that an item stays after its own, on average or at most.
        self._lived = (schedule.constant or self.max_uses) - 1
        self._batch_size = batch_size
        # Rounding of merged cohorts moves a use by at most this many places.
        self.slack = self.max_uses + 2 if batch_size > 1 else 0
        self._margin = self.max_uses + 1
        # The size of cohorts at which no batch has two uses of an item.
        self._needed = math.ceil((batch_size + self.slack) / self._low)
        candidates = itertools.count(max(buffer, self._least()))
        workable = next(size for size in candidates if self._grow(size))
        if workable > buffer:
            factor = schedule.constant or f"up to {self.max_uses}"
            raise ValueError(
                f"buffer={buffer} is too small for order='spread' without twins in a "
                f"batch of {batch_size} at factor {factor}; use buffer={workable} or "
                "more, or a smaller batch_size"
            )
        self._lengths = [
            self._length(round_) for round_ in range(len(self.warm) + self.max_uses)
        ]

    def size(self, cohort: int) -> int:
        return self.warm[cohort] if cohort < len(self.warm) else self.steady

    def start(self, cohort: int) -> int:
        """Returns the fresh index of a cohort's first item."""
        beyond = cohort - len(self.warm)
        if beyond < 0:
            return self._starts[cohort]
        return self._starts[-1] + beyond * self.steady

    def widest(self, cohorts: int) -> int:
        """Returns the most items of ``cohorts`` consecutive cohorts."""
        return max(
            self.start(end) - self.start(max(0, end - cohorts))
            for end in range(1, len(self.warm) + cohorts + 1)
        )

    def cohort_from(self, index: int) -> int:
        """Returns the first cohort that starts at ``index`` or later."""
        if index >= self._starts[-1]:
            return len(self.warm) - (self._starts[-1] - index) // self.steady
        return next(c for c, start in enumerate(self._starts) if start >= index)

    def round_length(self, round_: int) -> int:
        """Returns a lower bound on the uses in a round."""
        # Once all cohorts of a round are steady, every round is as long.
        return self._lengths[min(round_, len(self._lengths) - 1)]

    def _length(self, round_: int) -> int:
        return self._alive(round_, range(min(self.max_uses, round_ + 1)))[0]

    def _alive(self, round_: int, ages: range, later: int = 0) -> tuple[int, int]:
        """Returns bounds on the live items of some ages in a round, or later."""
        # At every age but one, all items are alive or none. So it sums runs of cohorts.
        whole = math.floor(self._high) if self._even else self.max_uses
        least = self._in_cohorts(round_, ages, math.floor(self._low) - later)
        most = self._in_cohorts(round_, ages, whole - later)
        if self._even and whole - later in ages:
            size = self.size(round_ - (whole - later))
            fewest, largest = self._survivors(size, whole)
            least, most = least + fewest, most + largest
        return least, most

    def _in_cohorts(self, round_: int, ages: range, below: int) -> int:
        """Returns the number of items of these ages that are younger than ``below``."""
        stop = min(ages.stop, below)
        if stop <= ages.start:
            return 0
        return self.start(round_ - ages.start + 1) - self.start(round_ - stop + 1)

    def _survivors(self, size: int, age: int) -> tuple[int, int]:
        """Returns bounds on the items of a cohort that have more than ``age`` uses."""
        # In integers: the warm-up asks this many times, and fractions are slow.
        low = self._low.numerator - age * self._low.denominator
        high = self._high.numerator - age * self._high.denominator
        if low >= self._low.denominator:
            least = size
        else:
            least = size * max(0, low) // self._low.denominator if self._even else 0
        if high >= self._high.denominator:
            most = size
        elif high > 0 and self._even:
            most = min(size, -(-size * high // self._high.denominator) + 1)
        else:
            most = size if high > 0 else 0
        return least, most

    def _least(self) -> int:
        """A lower bound on the buffer."""
        return max(
            math.ceil(self._lived * self._needed) + self._margin,
            math.ceil(self._needed / 2),
            self._survivors(self._batch_size, 1)[1] + self._margin,
        )

    def _grow(self, buffer: int) -> bool:
        """Sets the sizes for a buffer; returns whether rounds reach the steady size."""
        # Slots that a batch frees serve only the next batch, so a batch needs room for
        # its own fresh items as well.
        reserve = math.ceil(self._batch_size / self._low) + 1
        roomy = int((buffer - self._margin - reserve) / self._lived)
        # Beyond two buffers of items in a round a restore would re-read too much.
        self.steady = min(max(roomy, self._needed), 2 * buffer)
        self.warm = [min(self._batch_size, self.steady * self.max_uses)]
        self._starts = [0, self.warm[0]]
        steady_rounds = int(self.warm[0] == self.steady)
        seen: list[int] = []
        at_round = self.max_uses
        while steady_rounds < self.max_uses:
            # The next size follows from the last sizes alone. If all of these recur,
            # growth has ended. Brent's search for cycles keeps only few of them.
            if not steady_rounds and len(self.warm) >= self.max_uses:
                last = self.warm[-self.max_uses :]
                if last == seen:
                    return False
                if len(self.warm) >= at_round:
                    seen, at_round = last, 2 * len(self.warm)
            size = self._next_size(buffer - self._margin)
            self.warm.append(size)
            self._starts.append(self._starts[-1] + size)
            steady_rounds = steady_rounds + 1 if size == self.steady else 0
        return True

    def _next_size(self, room: int) -> int:
        # Echoes take up to half of the places that they take later.
        top = float(self._high)
        feed = min((top + 1) / (2 * top), 1.5 / top)
        round_ = len(self.warm)
        ages = range(1, min(self.max_uses, round_ + 1))
        least, most = self._alive(round_, ages)
        _, kept = self._alive(round_, ages, later=1)
        wanted = min(self.steady, math.ceil(most * feed / (1 - feed)))
        if self._batch_size > 1:
            wanted = max(wanted, self._batch_size + self.slack - least)
        return max(0, min(wanted, self._affordable(room - kept)))

    def _affordable(self, room: int) -> int:
        """Returns the largest cohort of which at most ``room`` items live on."""
        share = float(min(1, self._lived)) if self._even else 1.0
        return int(max(0, room - 1) / share) if share < 1 else room


@dataclass
class _Cohort:
    """Items that arrived in the same round."""

    number: int  # of the round
    start: int  # fresh index of the first item
    carry: int  # the schedule's, before the first item
    uses: np.ndarray  # number of uses of each item, int64[n]
    seats: np.ndarray  # the items in order of their positions, from `start` on


class Spread:
    """Spreads the uses of an item evenly; an `echo_jax.echo.orders.OrderRounds`."""

    def __init__(self, schedule: Schedule, buffer: int, batch_size: int, seed: int):
        self.schedule = schedule
        self.batch_size = batch_size
        self.sizes = CohortSizes(schedule, buffer, batch_size)
        # For each age of a cohort, the start of its random sequence.
        self.keys = [sequence(seed, 2, age) for age in range(self.sizes.max_uses)]
        factor = schedule.constant
        # Whether all items have the same number of uses.
        self.uniform = factor is not None and factor.denominator == 1
        self.num_slots = buffer
        self.max_departed = 0
        self.window = self.sizes.widest(self.sizes.max_uses + 1)

    def next_anchor(self, index: int) -> int:
        return self.sizes.start(self.sizes.cohort_from(index))

    def pieces(self, round_: int, anchor: int, carry: int) -> Iterator[Piece]:
        cohorts: deque[_Cohort] = deque()
        for now in range(max(0, round_ - self.sizes.max_uses + 1), round_):
            carry = self._advance(cohorts, now, carry)
        while True:
            carry = self._advance(cohorts, round_, carry)
            yield from self._round(cohorts, round_)
            round_ += 1

    def _advance(self, cohorts: deque[_Cohort], round_: int, carry: int) -> int:
        """Moves the cohorts to a round and adds its own; returns the carry after it."""
        while cohorts and round_ - cohorts[0].number >= self.sizes.max_uses:
            cohorts.popleft()
        share = self.swap_share(round_)
        for cohort in cohorts:
            self._permute(cohort, round_, share)
        size = self.sizes.size(round_)
        uses, after = self.schedule.uses(self.sizes.start(round_), size, carry)
        cohorts.append(
            _Cohort(round_, self.sizes.start(round_), carry, uses, np.arange(size))
        )
        return after

    def _permute(self, cohort: _Cohort, round_: int, share: float) -> None:
        age = round_ - cohort.number
        length = int(cohort.seats.size * share)
        if length < 2:
            return
        position = np.arange(cohort.seats.size)
        # Borders shift every other round, so that items can cross them.
        segment = (position + (length // 2 if age % 2 else 0)) // length
        key = mix(self.keys[age], cohort.seats + cohort.start)
        if self.uniform:
            cohort.seats = cohort.seats[grouped_argsort(segment, key)]
            return
        # Within a segment, only items of the same number of uses swap seats.
        group = segment * (self.sizes.max_uses + 1) + cohort.uses[cohort.seats]
        seats = np.empty_like(cohort.seats)
        seats[stable_argsort(group)] = cohort.seats[grouped_argsort(group, key)]
        cohort.seats = seats

    def swap_share(self, round_: int) -> float:
        """Returns the share of a cohort's seats within which items swap."""
        if round_ == 0 or self.batch_size == 1:
            return 0.5
        length = min(self.sizes.round_length(r) for r in (round_ - 1, round_))
        near = self.batch_size + self.sizes.slack
        return min(0.5, 1 - near / max(near, length))

    def _round(self, cohorts: deque[_Cohort], round_: int) -> Iterator[Piece]:
        """Merges the cohorts by position."""
        sizes = {cohort.seats.size for cohort in cohorts}
        if len(sizes) == 1:
            size = sizes.pop()
            for low in range(0, max(size, 1), _INTERVALS_PER_PIECE):
                yield self._intervals(cohorts, round_, low)
        else:
            # A seat's time is its share of the round.
            time = [np.arange(c.seats.size) / max(1, c.seats.size) for c in cohorts]
            order = np.argsort(np.concatenate(time), kind="stable")
            index = np.concatenate([c.seats + c.start for c in cohorts])[order]
            ages = np.array([round_ - c.number for c in cohorts], np.int32)
            repeat = np.repeat(ages, [c.seats.size for c in cohorts])[order]
            uses = np.concatenate([c.uses[c.seats] for c in cohorts])[order]
            newest = np.maximum.accumulate(index)
            yield self._piece(cohorts, round_, index, repeat, newest, uses)

    def _intervals(self, cohorts: deque[_Cohort], round_: int, low: int) -> Piece:
        """Returns a use of each cohort, oldest first, per interval from ``low`` on."""
        part, first = slice(low, low + _INTERVALS_PER_PIECE), cohorts[-1].start + low
        size = cohorts[-1].seats[part].size
        index = np.empty((size, len(cohorts)), np.int64)
        for at, cohort in enumerate(cohorts):
            np.add(cohort.seats[part], cohort.start, out=index[:, at])
        ages = np.array([round_ - cohort.number for cohort in cohorts], np.int32)
        # The round's own items come in their order.
        newest = np.empty_like(index)
        newest[:, :-1] = np.arange(first - 1, first - 1 + size)[:, None]
        newest[:, -1] = index[:, -1]
        uses = None
        if not self.uniform:
            uses = np.stack([c.uses[c.seats[part]] for c in cohorts], axis=1)
            uses = uses.reshape(-1)
        columns = index.reshape(-1), np.tile(ages, size), newest.reshape(-1)
        return self._piece(cohorts, round_, *columns, uses)

    def _piece(
        self,
        cohorts: deque[_Cohort],
        round_: int,
        index: np.ndarray,
        repeat: np.ndarray,
        newest: np.ndarray,
        uses: np.ndarray | None,
    ) -> Piece:
        """Returns the uses at some seats, without items that are used up."""
        if self.uniform:
            last = repeat == self.sizes.max_uses - 1
        else:
            assert uses is not None
            left = uses - repeat
            alive = left > 0
            index, repeat, newest = index[alive], repeat[alive], newest[alive]
            last = left[alive] == 1
        first = cohorts[0]
        return Piece(round_, first.start, first.carry, index, repeat, last, newest)
