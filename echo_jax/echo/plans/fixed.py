"""The plan of a fixed echo: the number of an item determines how often it is used.

With one lane the uses and their order are as in the spec. With several lanes each
one follows the schedule by itself: item j of every lane is used
floor((j+1)e) - floor(je) times. A lane follows an order, and gives the slots of a store
to fresh items, in the order in which the slots get free. So many batches can be decided
at once, before the first of their items is read.
"""

import copy
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.keys import fingerprint
from echo_jax.echo.orders import Piece, rounds_of
from echo_jax.echo.plans.base import (
    Decision,
    Plan,
    Restored,
    Uses,
    check_keys,
    check_origin,
    damaged,
    stacked,
)
from echo_jax.echo.plans.lanes import Lanes, epoch_spec, lane_spec
from echo_jax.echo.spec import EchoSpec, completed
from echo_jax.echo.stats import Counts

# The most batches that are decided at once, and the most uses beyond one batch.
_BATCHES_AHEAD, _USES_AHEAD = 32, 1 << 15


class FixedPlan(Plan):
    """The plan of a fixed, fractional or scheduled echo."""

    # It decides many batches at once, as if the upstream had no end. When the end
    # comes, it decides the batches again that were not handed out.

    def __init__(
        self,
        spec: EchoSpec,
        *,
        lanes: Lanes | None = None,
        max_batches: int = 1,
        options: tuple[object, ...] = (),
    ):
        # Without lanes items come one by one. ``options`` shape the sequence, too.
        spec, self._in_lanes = completed(spec), lanes is not None
        self.spec, self._options = spec, options
        self._lanes = lanes or Lanes()
        self._lanes.check(batch_size=spec.batch_size)
        self.batch = spec.batch_size // self._lanes.count
        self.max_batches = max_batches
        count = self._lanes.count
        specs = [lane_spec(spec, lane, count) for lane in self._lanes.own]
        ahead = min(_BATCHES_AHEAD, _USES_AHEAD // self.batch)
        self._ahead = max(max_batches, ahead, 1) * self.batch
        if self._in_lanes:
            options = (*options, self._lanes.host_batch, count)
        sizes = {"max_batches": max_batches, "uses": self._ahead, "options": options}
        try:
            self._plans = [_FixedLane(each, self._lanes, **sizes) for each in specs]
        except ValueError as error:
            where = f"in each of {count} lanes: " if count > 1 else ""
            raise ValueError(f"{where}{error}") from error
        self.num_slots, self.row = self._plans[0].num_slots, 0

    def counts(self, uses: int) -> Counts:
        counts = zip(*[plan.counts(uses) for plan in self._plans], strict=True)
        return Counts(*map(sum, counts))

    def decide(self, uses: int, rows: int) -> Decision | None:
        found = [plan.decide(max(uses, self._ahead)) for plan in self._plans]
        size = min([each.uses.size for each in found])
        if not size:
            return None
        if size > self.batch:
            size -= size % self.batch
        columns = [
            stacked([getattr(each.uses, name)[:size] for each in found])
            for name in Uses.__slots__
        ]
        must = functools.reduce(np.maximum, [each.rows[:size] for each in found])
        most = functools.reduce(np.minimum, [each.most[:size] for each in found])
        if self._lanes.rows > 1:
            must = -(-must // self._lanes.rows) * self._lanes.rows
            if (end := self._plans[0].end) >= 0:
                must = np.minimum(must, end)
        length = min([each.slots.size for each in found])
        given = stacked([each.slots[:length] for each in found])
        columns[1] = self._lanes.global_index(columns[1])
        return Decision(Uses(*columns), must, most, given)

    def settle(self, uses: int, row: int) -> None:
        self.row = row
        for plan in self._plans:
            plan.settle(uses, row)

    def end(self, rows: int) -> None:
        for plan in self._plans:
            plan.end_at(self.row + rows)

    def of_epoch(self, number: int, fresh: int, uses: int) -> "FixedPlan":
        first = fresh * self._lanes.count
        lanes = replace(self._lanes, first=first)
        plan = FixedPlan(
            epoch_spec(self.spec, number, first),
            lanes=lanes if self._in_lanes else None,
            max_batches=self.max_batches,
            options=self._options,
        )
        plan._lanes = lanes
        return plan

    def anchor(self) -> int:
        anchor, rows = min([plan.anchor() for plan in self._plans]), self._lanes.rows
        return anchor // rows * rows

    def next_anchor(self, row: int) -> int:
        return self._plans[0].rounds.next_anchor(row)

    def get_state(self) -> dict[str, Any]:
        states = [plan.get_state() for plan in self._plans]
        return {"lanes": states, "written": self.row} if self._in_lanes else states[0]

    def check_state(self, state: Any) -> None:
        lanes = [state]
        if self._in_lanes:
            check_keys(state, {*self.get_state()}, "a fixed echo in lanes")
            lanes = state["lanes"]
        if not isinstance(lanes, list) or len(lanes) != len(self._plans):
            raise ValueError(
                f"the state has {len(lanes) if isinstance(lanes, list) else lanes!r} "
                f"lanes, this echo has {len(self._plans)}; restore with as many lanes "
                "as it was saved with"
            )
        for plan, saved in zip(self._plans, lanes, strict=True):
            plan.check_state(saved)

    def _go_to(self, state: Mapping[str, Any]) -> Restored:
        saved = state.get("lanes", [state])
        self.row = state["written"] if self._in_lanes else state["fresh"]
        self._plans = [copy.copy(plan) for plan in self._plans]
        both = zip(self._plans, saved, strict=True)
        held = [plan.go_to(each, self.row) for plan, each in both]
        first = self.anchor()
        table = np.full((len(held), self.row - first), self.num_slots, np.int32)
        for row, (items, slots) in zip(table, held, strict=True):
            row[items - first] = slots
        return Restored(first, table)


class _FixedLane:
    """A lane of a fixed, fractional or scheduled echo."""

    def __init__(
        self,
        spec: EchoSpec,
        lanes: Lanes,
        *,
        max_batches: int,
        uses: int,
        options: tuple[object, ...],
    ):
        # At most ``uses`` are decided at once.
        self._spec = spec
        self._fingerprint = spec.fingerprint
        if options:
            self._fingerprint = fingerprint(spec.fingerprint, *options)
        self.rounds = rounds_of(spec)
        # Items wait in slots for their first use: the rest of a host batch, and the
        # fresh items of all batches that are drawn together, which cannot use slots
        # that they free themselves. Several lanes also wait for each other.
        drawn = max_batches * spec.batch_size
        fresh = math.ceil(drawn / spec.schedule.min_factor) + self.rounds.drift
        if lanes.count == 1:
            fresh = min(fresh, drawn)
        self.num_slots = self.rounds.num_slots + lanes.rows + fresh + 1
        fresh = uses // int(spec.schedule.min_factor) + 1
        span = 1 << (self.rounds.window + 2 * self.num_slots + fresh).bit_length()
        self._wrap = span - 1
        self.go_to(defaultdict(int, end=-1), 0)

    def counts(self, uses: int) -> tuple[int, int, int]:
        """Returns fresh items, uses and repeats."""
        more = self._decided.uses.repeat[self._handed_out : uses]
        if not more.size:
            return self._fresh, self._uses, self._repeats
        repeats = self._repeats + int(np.count_nonzero(more))
        return int(self._decided.rows[uses - 1]), self._uses + more.size, repeats

    def anchor(self) -> int:
        return self._place()[0]

    def end_at(self, total: int) -> None:
        """Sets the number of items of the whole upstream; what is decided is void."""
        self.end = total
        self._pieces = itertools.chain(self._ahead[1:], self._pieces)
        self._ahead = [self._within_end(self._ahead[0])]
        self.decide(0)

    def decide(self, uses: int) -> Decision:
        """Decides up to ``uses`` next uses, as if all their items came."""
        # The arrays have no axis of lanes.
        parts = []
        for piece in self._upcoming():
            part = piece[:uses]
            parts.append((part.index, part.repeat, part.last))
            uses -= part.index.size
            if not uses:
                break
        index, repeat, last = map(np.concatenate, zip(*parts, strict=True))
        freed = int(self._decided.most[self._handed_out])
        free = self._decided.slots[self.written - self._before : freed - self._before]
        rows = index + 1
        rows[:1] = np.maximum(rows[:1], self._fresh)
        np.maximum.accumulate(rows, out=rows)
        most = np.empty(last.size + 1, np.int64)
        most[0], most[1:] = self.written + free.size, last
        most.cumsum(out=most)
        given = self._give(free, index.compress(last))
        slots = self._slot_of.take(index & self._wrap)
        # Its ``most`` has one more entry, for the uses after it.
        self._decided = Decision(Uses(slots, index, repeat, last), rows, most, given)
        self._handed_out, self._before = 0, self.written
        return self._decided

    def _upcoming(self) -> Iterator[Piece]:
        """Yields the rest of the current piece and those after it."""
        yield self._ahead[0][self._at :]
        yield from self._ahead[1:]
        for piece in self._pieces:
            if 0 <= self.end <= piece.anchor:
                return
            self._ahead.append(self._within_end(piece))
            yield self._ahead[-1]

    def _within_end(self, piece: Piece) -> Piece:
        return piece if self.end < 0 else piece[piece.index < self.end]

    def _give(self, free: np.ndarray, ending: np.ndarray) -> np.ndarray:
        """Returns slots for the next rows: the free ones, then some items' slots."""
        given, row = [free], self.written
        # Items that get their slot here may end here, too.
        newest = np.maximum.accumulate(ending)
        while True:
            rows = np.arange(row, row + given[-1].size)
            self._slot_of[rows & self._wrap] = given[-1]
            row += rows.size
            if not ending.size:
                return np.concatenate(given)
            known = int(newest.searchsorted(row))
            if not known:
                raise AssertionError("an echo plan ran out of slots; this is a bug")
            given.append(self._slot_of.take(ending[:known] & self._wrap))
            ending, newest = ending[known:], newest[known:]

    def settle(self, uses: int, written: int) -> None:
        before, self.written = self._uses, written
        self._fresh, self._uses, self._repeats = self.counts(uses)
        self._handed_out += self._uses - before
        self._at += self._uses - before
        while self._at >= self._ahead[0].index.size and len(self._ahead) > 1:
            self._at -= self._ahead.pop(0).index.size

    def _place(self) -> tuple[int, int]:
        """Returns the anchor, and the uses from it on that are handed out."""
        piece, at = self._ahead[0], self._at
        if not self.rounds.by_item:
            return piece.anchor, at
        if at < piece.index.size:
            return int(piece.index[at]), int(piece.repeat[at])
        return int(piece.index[-1]) + 1 if at else piece.anchor, 0

    def get_state(self) -> dict[str, int]:
        piece, (anchor, position) = self._ahead[0], self._place()
        passed, carry = anchor - piece.anchor, piece.carry
        if passed:
            _, carry = self.rounds.schedule.uses(piece.anchor, passed, carry)
        return {
            "anchor": anchor,
            "carry": carry,
            "end": self.end,
            "fresh": self._fresh,
            "position": position,
            "repeats": self._repeats,
            "round": piece.round + passed,
            "spec": self._fingerprint,
            "uses": self._uses,
        }

    def check_state(self, state: Any) -> None:
        check_keys(state, {*self.get_state()}, "an echo plan")
        check_origin(state["spec"], self._fingerprint, self._spec)
        schedule, window = self._spec.schedule, self.rounds.window
        most = (window + self.num_slots) * math.ceil(schedule.max_factor)
        if not (
            0 <= state["anchor"] <= state["fresh"] <= state["anchor"] + window
            and 0 <= state["repeats"] <= state["uses"]
            and 0 <= state["position"] <= min(state["uses"], most)
            and state["carry"] >= 0
            and state["carry"] // schedule.denominator <= self.rounds.max_departed
            and 0 <= state["round"] <= state["fresh"] + state["uses"] + window
            and (state["end"] == -1 or state["end"] >= state["fresh"])
            and state["anchor"] == self.rounds.next_anchor(state["anchor"])
        ):
            raise damaged(state)

    def go_to(
        self, state: Mapping[str, int], written: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Goes to a state; returns the items that have slots, and these slots."""
        if not 0 <= written - state["fresh"] <= self.num_slots:
            raise ValueError(f"there are no slots for {written} items")
        self.end, self._fresh = state["end"], state["fresh"]
        self._uses, self._repeats = state["uses"], state["repeats"]
        self._pieces = self.rounds.pieces(
            state["round"], state["anchor"], state["carry"]
        )
        # The current piece and those made after it, and how many uses of the current
        # one are handed out.
        self._ahead = [self._within_end(next(self._pieces))]
        self._at = state["position"]
        if self._at > self._ahead[0].index.size:
            raise ValueError(f"there are no {self._at} uses")
        first = self.anchor()
        in_use = np.arange(first, written) >= self._fresh
        for piece in self._upcoming():
            if piece.anchor >= self._fresh:
                break
            in_use[piece.index[piece.index < self._fresh] - first] = True
        # Slots are assigned again, in ascending order of the items, and hold the
        # ``written`` first items until their last use.
        items = np.flatnonzero(in_use) + first
        every = np.arange(self.num_slots, dtype=np.int32)
        slots, free = np.split(every, [items.size])
        self._slot_of = np.full(self._wrap + 1, self.num_slots, np.int32)
        self._slot_of[items & self._wrap] = slots
        most, none = np.array([written + free.size]), Uses.none()[0]
        self._decided = Decision(none, none.fresh_index, most, free)
        self._handed_out, self._before, self.written = 0, written, written
        return items, slots
