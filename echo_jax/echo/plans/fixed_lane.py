"""One lane of a fixed echo: a pure state machine over integers.

It follows an order, and gives the slots of a store to fresh items, in the order in
which the slots get free. So many batches can be decided at once, before the first of
their items is read.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.keys import fingerprint
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.base import Piece
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.plans.base import Decision, Uses, check_state_keys
from echo_jax.echo.spec import EchoSpec

__all__ = ["FixedLane"]

_LEAST_STRIDE = 64

_PLACE_KEYS = {"anchor", "carry", "position", "round"}
_STATE_KEYS = {"end", "fresh", "repeats", "spec", "uses"} | _PLACE_KEYS


class FixedLane:
    """A lane of a fixed, fractional or scheduled echo."""

    def __init__(
        self, spec: EchoSpec, *, ahead: int, uses: int, options: tuple[object, ...] = ()
    ):
        # ``ahead`` fresh items may be written before a use needs them, and at most
        # ``uses`` are decided at once.
        self._spec = spec
        self._fingerprint = spec.fingerprint
        if options:
            self._fingerprint = fingerprint(spec.fingerprint, *options)
        self._rounds = rounds_of(spec)
        self.num_slots = self._rounds.num_slots + ahead
        fresh = uses // int(spec.schedule.min_factor) + 1
        span = 1 << (self._rounds.window + 2 * self.num_slots + fresh).bit_length()
        self._slot_of = np.zeros(span, np.int32)
        self._wrap = span - 1
        # Upstream states are saved often enough that a restore reads few needless
        # items.
        stride = self._rounds.window // 8
        self._stride = stride if stride >= _LEAST_STRIDE else 0
        self._restart(dict.fromkeys(_STATE_KEYS, 0) | {"end": -1})

    def _restart(self, state: Mapping[str, int]) -> None:
        # ``fresh`` items were used so far, and ``written`` ones are in slots.
        self.fresh = self.written = state["fresh"]
        self._uses, self._repeats = state["uses"], state["repeats"]
        self.end = state["end"]
        self._free = np.arange(self.num_slots, dtype=np.int32)
        self._pieces = self._rounds.pieces(
            state["round"], state["anchor"], state["carry"]
        )
        self._piece = next(self._pieces)
        self._in_round = 0  # uses of the round before the piece
        self._at = 0  # uses of the piece that are handed out
        self._ahead: list[Piece] = []
        # What is decided, how many of its uses are handed out, and the rows before it.
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
        """Returns the first fresh item that the state refers to."""
        return self._where()[1]

    def oldest(self) -> int:
        """Returns the oldest fresh item that a restore has to read again."""
        # With a small buffer the anchor is good enough: there is little to save.
        if not self._stride:
            return self.anchor()
        items = np.arange(self.anchor(), self.written)
        # A slot holds the last item that it was given to.
        held = np.full(self.num_slots, self.fresh)
        held[self._slot_of[items & self._wrap]] = items
        held[self._free] = self.fresh
        return min(self.fresh, int(held.min()))

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on where reading again may begin."""
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
        """Decides up to ``uses`` next uses, as if all their items came.

        Returns:
          The decision, whose arrays have no axis of lanes; None at the end.
        """
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
        piece, low, ahead = self._piece, self._at, 0
        while True:
            part = slice(low, low + n)
            if size := piece.index[part].size:
                columns = piece.index, piece.repeat, piece.last, piece.newest
                runs.append(tuple(column[part] for column in columns))
                n -= size
            if n == 0:
                return runs
            if ahead == len(self._ahead):
                following = next(self._pieces)
                if 0 <= self.end <= following.anchor:
                    return runs
                self._ahead.append(self._within_end(following))
            piece, low = self._ahead[ahead], 0
            ahead += 1

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
        """Notes how many decided uses were handed out, and how many rows written."""
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
        newest = np.maximum.accumulate(index)
        return replace(piece, index=index, repeat=repeat, last=last, newest=newest)

    def _where(self) -> tuple[int, int, int, int]:
        """Returns the round, its anchor, its carry, and its number of emitted uses."""
        piece, at = self._piece, self._at
        if not isinstance(self._rounds, Consecutive):
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
        """Raises ValueError unless the lane can go to a state; changes nothing."""
        check_state_keys(state, _STATE_KEYS, "an echo plan")
        if state["spec"] != self._fingerprint:
            raise ValueError(
                f"this state was saved with another spec than {self._spec}, with other "
                "options (items, lanes, rows of a host batch), or by another "
                "version of the orders; restore it with what it was saved with"
            )
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
            and self._comes_back(state)
        ):
            raise ValueError(
                f"the numbers of this state do not fit together: {dict(state)}; it is "
                "damaged"
            )

    def _comes_back(self, state: Mapping[str, int]) -> bool:
        """Returns whether a lane that goes to a state returns the same state."""
        trial = copy.copy(self)
        trial._slot_of = self._slot_of.copy()
        try:
            trial.set_state(state)
        except (AssertionError, IndexError, ValueError):
            return False
        return trial.get_state() == state

    def set_state(self, state: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Continues from a checked state; returns the items in use and their slots."""
        # The items ascend, and slots are assigned again. The driver reads the upstream
        # from `anchor` up to item `fresh` and writes these items into these slots.
        self._restart(state)
        self._piece = self._within_end(self._piece)
        self._at = state["position"]
        while self._at > self._piece.index.size:
            self._ahead.append(self._within_end(next(self._pieces)))
            self._advance(0)
        items = self._in_use(state)
        slots, self._free = np.split(self._free, [items.size])
        self._slot_of[items & self._wrap] = slots
        return items, slots

    def resume(self, written: int) -> np.ndarray:
        """Gives slots to rows that are written but not used yet, after `set_state`."""
        slots, self._free = np.split(self._free, [written - self.written])
        self._assign(self.written, slots)
        self.written = written
        return slots

    def _in_use(self, state: Mapping[str, int]) -> np.ndarray:
        """Returns the taken items that the rest of the order uses, ``int64[n]``."""
        first, skip = state["anchor"], state["position"]
        used = np.zeros(self.fresh - first, bool)
        for piece in self._rounds.pieces(state["round"], first, state["carry"]):
            if piece.anchor >= self.fresh:
                break
            index = self._within_end(piece).index
            rest = index[skip:]
            skip = max(0, skip - index.size)
            used[rest[rest < self.fresh] - first] = True
        return np.flatnonzero(used) + first
