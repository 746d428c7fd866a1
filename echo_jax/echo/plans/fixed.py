"""The plan of a fixed echo: the number of an item determines how often it is used.

With one lane the uses and their order are those of the spec. With several lanes each
one follows the schedule by itself: item j of every lane is used
floor((j+1)e) - floor(je) times. A lane follows an order, and gives the slots of a store
to fresh items, in the order in which the slots get free. So many batches can be decided
at once, before the first of their items is read.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
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
)
from echo_jax.echo.plans.lanes import Lanes, lane_spec
from echo_jax.echo.spec import EchoSpec

__all__ = ["FixedPlan"]

_LEAST_STRIDE = 64
# The most batches that are decided at once, and the most uses beyond one batch.
_BATCHES_AHEAD, _USES_AHEAD = 32, 1 << 15


class FixedPlan(Plan):
    """The plan of a fixed, fractional or scheduled echo.

    It decides many batches at once, as if the upstream had no end. When the end comes,
    it decides the batches again that were not handed out.

    Example:
      >>> plan = FixedPlan(EchoSpec(2, batch_size=4), lanes=Lanes(host_batch=4))
      >>> uses, rows, *_ = plan.decide(4, 0)
      >>> uses.fresh_index[:, :8].tolist(), rows[:8].tolist()
      ([[0, 0, 1, 1, 2, 2, 3, 3]], [4, 4, 4, 4, 4, 4, 4, 4])
    """

    def __init__(
        self,
        spec: EchoSpec,
        *,
        lanes: Lanes | None = None,
        max_batches: int = 1,
        options: tuple[object, ...] = (),
    ):
        # Without lanes items come one by one. ``options`` shape the sequence, too.
        self._by_item = lanes is None
        self._lanes = lanes or Lanes()
        self._lanes.check(batch_size=spec.batch_size)
        self.batch = spec.batch_size // self._lanes.count
        self.max_batches = max_batches
        count = self._lanes.count
        specs = [lane_spec(spec, lane, count) for lane in self._lanes.own]
        ahead = min(_BATCHES_AHEAD, _USES_AHEAD // self.batch)
        self._ahead = max(max_batches, ahead, 1) * self.batch
        if not self._by_item:
            options = (*options, self._lanes.host_batch, count)
        sizes = {"max_batches": max_batches, "uses": self._ahead, "options": options}
        try:
            self._plans = [_FixedLane(each, self._lanes, **sizes) for each in specs]
        except ValueError as error:
            where = f"in each of {count} lanes: " if count > 1 else ""
            raise ValueError(f"{where}{error}") from error
        self.num_slots = self._plans[0].num_slots

    @property
    def row(self) -> int:
        return self._plans[0].written

    def counts(self, uses: int) -> Counts:
        counts = [astuple(plan.counts(uses)) for plan in self._plans]
        return Counts(*map(sum, zip(*counts, strict=True)))

    def decide(self, uses: int, rows: int) -> Decision | None:
        found = [plan.decide(max(uses, self._ahead)) for plan in self._plans]
        decided = [each for each in found if each is not None]
        if len(decided) < len(found):
            return None
        size = min([each.uses.size for each in decided])
        if size > self.batch:
            size -= size % self.batch
        columns = [
            _stacked([getattr(each.uses, name)[:size] for each in decided])
            for name in Uses.__slots__
        ]
        must, most = decided[0].rows[:size], decided[0].most[:size]
        if len(decided) > 1:
            must = np.max([each.rows[:size] for each in decided], axis=0)
            most = np.min([each.most[:size] for each in decided], axis=0)
        if self._lanes.rows > 1:
            must = -(-must // self._lanes.rows) * self._lanes.rows
            if (end := self._plans[0].end) >= 0:
                must = np.minimum(must, end)
        length = min([each.slots.size for each in decided])
        given = _stacked([each.slots[:length] for each in decided])
        columns[1] = self._lanes.global_index(columns[1])
        return Decision(Uses(*columns), must, most, given)

    def settle(self, uses: int, row: int) -> None:
        for plan in self._plans:
            plan.settle(uses, row)

    def end(self, rows: int) -> None:
        for plan in self._plans:
            plan.end_at(plan.written + rows)

    def anchor(self) -> int:
        anchor, rows = min([plan.anchor() for plan in self._plans]), self._lanes.rows
        return anchor // rows * rows

    def oldest(self) -> int:
        # Lanes may differ, so they use the anchor, which they share.
        return self._plans[0].oldest() if self._by_item else self.anchor()

    def next_anchor(self, row: int) -> int:
        return self._plans[0].next_anchor(row)

    def get_state(self) -> dict[str, Any]:
        if self._by_item:
            return self._plans[0].get_state()
        return {
            "lanes": [plan.get_state() for plan in self._plans],
            "written": self._plans[0].written,
        }

    def check_state(self, state: Any) -> None:
        if self._by_item:
            return self._plans[0].check_state(state)
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
            if not 0 <= state["written"] - saved["fresh"] <= self.num_slots:
                raise damaged(state)
        return None

    def _go_to(self, state: Mapping[str, Any]) -> Restored:
        saved, written = [state], state.get("written", state.get("fresh"))
        if not self._by_item:
            saved = state["lanes"]
        self._plans = [copy.copy(plan) for plan in self._plans]
        both = zip(self._plans, saved, strict=True)
        held = [plan.go_to(each, written) for plan, each in both]
        first = self.anchor()
        table = np.full((len(held), written - first), self.num_slots, np.int32)
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
        self._rounds = rounds_of(spec)
        # Items wait in slots for their first use: the rest of a host batch, and the
        # fresh items of all batches that are drawn together, which cannot use slots
        # that they free themselves. Several lanes also wait for each other.
        drawn = max_batches * spec.batch_size
        fresh = math.ceil(drawn / spec.schedule.min_factor) + self._rounds.drift
        if lanes.count == 1:
            fresh = min(fresh, drawn)
        self.num_slots = self._rounds.num_slots + lanes.rows + fresh + 1
        fresh = uses // int(spec.schedule.min_factor) + 1
        span = 1 << (self._rounds.window + 2 * self.num_slots + fresh).bit_length()
        self._wrap = span - 1
        # Upstream states are saved often enough that a restore reads few needless
        # items.
        stride = self._rounds.window // 8
        self._stride = stride if stride >= _LEAST_STRIDE else 0
        self._restart(defaultdict(int, end=-1))

    def _restart(self, state: Mapping[str, int]) -> None:
        # ``fresh`` items were used so far, and ``written`` ones are in slots.
        self.fresh = self.written = state["fresh"]
        self._uses, self._repeats = state["uses"], state["repeats"]
        self.end = state["end"]
        self._slot_of = np.zeros(self._wrap + 1, np.int32)
        self._free = np.arange(self.num_slots, dtype=np.int32)
        self._pieces = self._rounds.pieces(
            state["round"], state["anchor"], state["carry"]
        )
        self._piece = next(self._pieces)
        self._in_round = 0  # uses of the round before the piece
        self._at = 0  # uses of the piece that are handed out
        self._ahead: list[Piece] = []
        # The decision, the number of its uses that are handed out, and the rows before.
        self._decided: Decision | None = None
        self._handed_out = self._before = 0

    def counts(self, uses: int) -> Counts:
        if self._decided is None or uses <= self._handed_out:
            return Counts(self.fresh, self._uses, self._repeats)
        fresh = max(self.fresh, int(self._decided.rows[uses - 1]))
        more = self._decided.uses.repeat[self._handed_out : uses]
        repeats = self._repeats + int(np.count_nonzero(more))
        return Counts(fresh, self._uses + more.size, repeats)

    def anchor(self) -> int:
        return self._where()[1]

    def oldest(self) -> int:
        # With a small buffer the anchor is good enough: there is little to save.
        if not self._stride:
            return self.anchor()
        items = np.arange(self.anchor(), self.written)
        # A slot holds the last item that it was given to.
        held = np.full(self.num_slots + 1, self.fresh)
        held[self._slot_of[items & self._wrap]] = items
        held[self._free] = held[-1] = self.fresh
        return min(self.fresh, int(held.min()))

    def next_anchor(self, index: int) -> int:
        anchor = self._rounds.next_anchor(index)
        if not self._stride:
            return anchor
        return min(anchor, -(-index // self._stride) * self._stride)

    def end_at(self, total: int) -> None:
        """Sets the number of items of the whole upstream; what is decided is void."""
        self.end = total
        self._piece = self._within_end(self._piece)
        self._ahead = [self._within_end(p) for p in self._ahead if p.anchor < total]
        self._decided, self._handed_out = None, 0

    def decide(self, uses: int) -> Decision | None:
        """Decides up to ``uses`` next uses, as if all their items came."""
        # The arrays have no axis of lanes.
        self._decided, self._handed_out, self._before = None, 0, self.written
        runs = self._runs(uses)
        if not runs:
            return None
        index, repeat, last, newest = runs[0]
        if len(runs) > 1:
            index, repeat, last, newest = map(np.concatenate, zip(*runs, strict=True))
            newest = np.maximum.accumulate(newest)
        rows = np.maximum(newest + 1, self.fresh)
        given = self._give(index.compress(last))
        if rows[-1] > self.written + given.size:
            raise AssertionError("an echo plan ran out of slots; this is a bug")
        most = np.empty(last.size, np.int64)
        most[0] = self.written + self._free.size
        np.cumsum(last[:-1], out=most[1:])
        most[1:] += most[0]
        slots = self._slot_of.take(index & self._wrap)
        found = Uses(slots, index, repeat, last)
        self._decided = Decision(found, rows, most, given)
        return self._decided

    def _runs(self, n: int) -> list[tuple[np.ndarray, ...]]:
        """Returns the next ``n`` uses in parts: index, repeat, last, newest item."""
        runs = []
        for piece, at in self._upcoming():
            part = slice(at, at + n)
            if size := piece.index[part].size:
                columns = piece.index, piece.repeat, piece.last, piece.newest
                runs.append(tuple(column[part] for column in columns))
                n -= size
            if n == 0:
                break
        return runs

    def _upcoming(self) -> Iterator[tuple[Piece, int]]:
        """Yields this piece and those ahead, with their uses that were handed out."""
        yield self._piece, self._at
        yield from ((piece, 0) for piece in self._ahead)
        while (following := self._look_ahead()) is not None:
            yield following, 0

    def _look_ahead(self) -> Piece | None:
        """Returns one more piece; None after the end."""
        following = next(self._pieces)
        if 0 <= self.end <= following.anchor:
            return None
        self._ahead.append(self._within_end(following))
        return self._ahead[-1]

    def _give(self, ending: np.ndarray) -> np.ndarray:
        """Returns slots for the next rows: the free ones, then those of some items."""
        given = np.concatenate([self._free, np.empty(ending.size, np.int32)])
        self._assign(self.written, self._free)
        # Items that get their slot here may end here, too.
        at, row = self._free.size, self.written + self._free.size
        newest = np.maximum.accumulate(ending)
        while at < given.size:
            done = at - self._free.size
            stop = int(newest.searchsorted(row))
            if stop == done:
                raise AssertionError("an echo plan ran out of slots; this is a bug")
            slots = self._slot_of.take(ending[done:stop] & self._wrap)
            given[at : at + slots.size] = slots
            self._assign(row, slots)
            at, row = at + slots.size, row + slots.size
        return given

    def _assign(self, row: int, slots: np.ndarray) -> None:
        """Gives slots to some rows."""
        start = row & self._wrap
        before_wrap = self._slot_of.size - start
        self._slot_of[start : start + slots.size] = slots[:before_wrap]
        if slots.size > before_wrap:
            self._slot_of[: slots.size - before_wrap] = slots[before_wrap:]

    def settle(self, uses: int, written: int) -> None:
        decided = self._decided
        if decided is None:
            return
        if uses > self._handed_out:
            found = self.counts(uses)
            self.fresh, self._repeats = found.fresh, found.repeats
            self._advance(uses - self._handed_out)
            self._handed_out = uses
        self.written = written
        freed = decided.slots.size
        if uses < decided.uses.size:
            freed = int(decided.most[uses]) - self._before
        self._free = decided.slots[written - self._before : freed]

    def _advance(self, n: int) -> None:
        """Moves on by ``n`` uses, and to the next piece if one is done."""
        self._at += n
        self._uses += n
        while self._at >= self._piece.index.size and self._ahead:
            done, self._piece = self._piece, self._ahead.pop(0)
            self._at -= done.index.size
            same = done.round == self._piece.round
            self._in_round = self._in_round + done.index.size if same else 0

    def _within_end(self, piece: Piece) -> Piece:
        if self.end < 0:
            return piece
        keep = piece.index < self.end
        if keep.all():
            return piece
        index, repeat, last = piece.index[keep], piece.repeat[keep], piece.last[keep]
        return replace(piece, index=index, repeat=repeat, last=last)

    def _where(self) -> tuple[int, int, int, int]:
        """Returns the round, its anchor, its carry, and its number of emitted uses."""
        piece, at = self._piece, self._at
        if not self._rounds.by_item:
            return piece.round, piece.anchor, piece.carry, self._in_round + at
        if at < piece.index.size:
            item, position = int(piece.index[at]), int(piece.repeat[at])
        else:
            item, position = int(piece.index[-1]) + 1 if at else piece.anchor, 0
        schedule = self._rounds.schedule
        _, carry = schedule.uses(piece.anchor, item - piece.anchor, piece.carry)
        return item, item, carry, position

    def get_state(self) -> dict[str, int]:
        round_, anchor, carry, position = self._where()
        return {
            "anchor": anchor,
            "carry": carry,
            "end": self.end,
            "fresh": self.fresh,
            "position": position,
            "repeats": self._repeats,
            "round": round_,
            "spec": self._fingerprint,
            "uses": self._uses,
        }

    def check_state(self, state: Any) -> None:
        check_keys(state, {*self.get_state()}, "an echo plan")
        check_origin(state["spec"], self._fingerprint, self._spec)
        schedule, window = self._spec.schedule, self._rounds.window
        most = (window + self.num_slots) * math.ceil(schedule.max_factor)
        if not (
            0 <= state["anchor"] <= state["fresh"] <= state["anchor"] + window
            and 0 <= state["repeats"] <= state["uses"]
            and 0 <= state["position"] <= min(state["uses"], most)
            and state["carry"] >= 0
            and state["carry"] // schedule.denominator <= self._rounds.max_departed
            and 0 <= state["round"] <= state["fresh"] + state["uses"] + window
            and (state["end"] == -1 or state["end"] >= state["fresh"])
            and state["anchor"] == self._rounds.next_anchor(state["anchor"])
        ):
            raise damaged(state)

    def go_to(
        self, state: Mapping[str, int], written: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Goes to a state; returns the items that have slots, and these slots."""
        self._restart(state)
        self._piece = self._within_end(self._piece)
        self._at = state["position"]
        while self._at > self._piece.index.size:
            if self._look_ahead() is None:
                raise ValueError(f"there are no {state['position']} uses")
            self._advance(0)
        # Slots are assigned again, in ascending order of the items.
        items = np.concatenate([self._in_use(), np.arange(self.fresh, written)])
        slots, self._free = np.split(self._free, [items.size])
        # `oldest` must not take items that have no slot for those in slot 0.
        self._slot_of[:] = self.num_slots
        self._slot_of[items & self._wrap] = slots
        self.written = written
        return items, slots

    def _in_use(self) -> np.ndarray:
        """Returns the taken items that the rest of the order uses, ``int64[n]``."""
        first = self.anchor()
        used = np.zeros(self.fresh - first, bool)
        for piece, at in self._upcoming():
            if piece.anchor >= self.fresh:
                break
            rest = piece.index[at:]
            used[rest[rest < self.fresh] - first] = True
        return np.flatnonzero(used) + first


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns ``np.stack`` of arrays, in a tenth of the time for one array."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
