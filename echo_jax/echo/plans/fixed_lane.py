"""One lane of a fixed echo: a pure state machine over integers.

It follows an order, gives slots of a store to fresh items, and takes the slots back.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.keys import fingerprint
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.base import Piece
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.plans.base import check_state_keys
from echo_jax.echo.spec import EchoSpec

__all__ = ["FixedLane", "Uses"]

_LEAST_STRIDE = 64

_PLACE_KEYS = {"anchor", "carry", "position", "round"}
_STATE_KEYS = {"end", "fresh", "repeats", "spec", "uses"} | _PLACE_KEYS
_RUN_AHEAD = 64


class Uses(NamedTuple):
    """Consecutive uses of one lane, in output order."""

    slots: np.ndarray  # slot of every use, int32[n]; a slot may occur twice
    fresh_index: np.ndarray  # int64[n]
    repeat: np.ndarray  # number of the use of its item, from 0, int32[n]
    last: np.ndarray  # whether the slot is free afterwards, bool[n]
    newest: np.ndarray  # the largest fresh index so far, int64[n]

    @property
    def size(self) -> int:
        return self.slots.size

    def part(self, start: int, stop: int) -> "Uses":
        if stop - start == self.size:
            return self
        return Uses(*(column[start:stop] for column in self))


class FixedLane:
    """A lane of a fixed, fractional or scheduled echo."""

    def __init__(
        self, spec: EchoSpec, *, ahead: int = 0, options: tuple[object, ...] = ()
    ):
        # ``ahead`` fresh items may be written before a use needs them.
        self._spec = spec
        self._fingerprint = spec.fingerprint
        if options:
            self._fingerprint = fingerprint(spec.fingerprint, *options)
        self._rounds = rounds_of(spec)
        self.is_identity = (
            isinstance(self._rounds, Consecutive) and spec.schedule.max_factor == 1
        )
        self.num_slots = self._rounds.num_slots + ahead
        span = 1 << (self._rounds.window + self.num_slots).bit_length()
        self._slot_of = np.zeros(span, np.int32)
        self._wrap = span - 1
        # Upstream states are saved often enough that a restore reads few needless
        # items.
        stride = self._rounds.window // 8
        self._stride = stride if stride >= _LEAST_STRIDE else 0
        self._restart(dict.fromkeys(_STATE_KEYS, 0) | {"end": -1})

    def _restart(self, state: Mapping[str, int]) -> None:
        # ``fresh`` items were taken so far, and ``written`` ones have got a slot.
        self.fresh = self.written = state["fresh"]
        self._uses, self._repeats = state["uses"], state["repeats"]
        self._end = state["end"]
        self._free = np.arange(self.num_slots, dtype=np.int32)
        self._num_free = self.num_slots
        self._pieces = self._rounds.pieces(
            state["round"], state["anchor"], state["carry"]
        )
        self._piece = next(self._pieces)
        self._in_round = 0  # uses of the round before the piece
        self._at = 0  # uses of the piece that are emitted
        self._ahead: list[Piece] = []
        # The last look-ahead of `missing`, for the `next` that follows it.
        self._looked_at: tuple[int, list[tuple[Piece, int, int, int]]] = 0, []

    @property
    def counts(self) -> Counts:
        return Counts(self.fresh, self._uses, self._repeats)

    def counts_after(self, uses: Uses) -> Counts:
        """Returns the counts after these uses are emitted, too."""
        return Counts(
            max(self.fresh, int(uses.newest[-1]) + 1),
            self._uses + uses.size,
            self._repeats + int(np.count_nonzero(uses.repeat)),
        )

    @property
    def left(self) -> int | None:
        """Fresh items that are still to be written; None until the end is known."""
        return None if self._end < 0 else self._end - self.written

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
        held[self._free[: self._num_free]] = self.fresh
        return min(self.fresh, int(held.min()))

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on where reading again may begin."""
        anchor = self._rounds.next_anchor(index)
        if not self._stride:
            return anchor
        return min(anchor, -(-index // self._stride) * self._stride)

    def missing(self, uses: int) -> int:
        """Returns how many unwritten fresh items the next uses need."""
        looked_at, runs = self._looked_at
        if looked_at != uses:
            runs = self._runs(uses)
            self._looked_at = uses, runs
        return max([0, *(top + 1 - self.written for *_, top in runs)])

    def end_at(self, total: int) -> None:
        """Sets the number of items of the whole upstream."""
        self._looked_at = 0, []
        self._end = total
        self._piece = self._within_end(self._piece)
        self._ahead = [self._within_end(p) for p in self._ahead if p.anchor < total]

    def write(self, items: int) -> np.ndarray:
        """Gives slots to at most ``items`` items; returns the slots, ``int32[n]``."""
        count = min(items, self._num_free)
        self._num_free -= count
        slots = self._free[self._num_free : self._num_free + count].copy()
        self._assign(slots)
        return slots

    def take_back(self, items: int) -> None:
        """Frees the slots of the last written items; no use of them was emitted."""
        last = np.arange(self.written - items, self.written)
        end = self._num_free + items
        self._free[self._num_free : end] = self._slot_of.take(last & self._wrap)
        self._num_free = end
        self.written -= items

    def look(self, uses: int) -> Uses | None:
        """Returns up to ``uses`` next uses of written items; None at the end."""
        # The result stays the same until something is written.
        looked_at, runs = self._looked_at
        parts = []
        for piece, low, high, top in runs if looked_at == uses else self._runs(uses):
            end = high
            if top >= self.written:
                end = low + int(piece.newest[low:high].searchsorted(self.written))
            if end > low:
                parts.append(self._read(piece, low, end))
            if end < high:
                if not parts:
                    raise AssertionError("an echo plan ran out of slots; this is a bug")
                break
        if len(parts) < 2:
            return parts[0] if parts else None
        *columns, newest = map(np.concatenate, zip(*parts, strict=True))
        return Uses(*columns, newest=np.maximum.accumulate(newest))

    def look_on(self) -> Uses | None:
        """Returns the next use, and those after it that need no further fresh item."""
        looked_at, runs = self._looked_at
        if looked_at != 1:
            runs = self._runs(1)
        if not runs:
            return None
        piece, low, _, newest = runs[0]
        newest = max(newest, self.fresh - 1)
        size = piece.newest[low : low + _RUN_AHEAD].searchsorted(newest, "right")
        return self._read(piece, low, low + int(size))

    def emit(self, uses: Uses) -> None:
        """Emits the next uses, which `look` or `look_on` returned."""
        slots, _, repeat, last, newest = uses
        self.fresh = max(self.fresh, int(newest[-1]) + 1)
        freed = slots.compress(last)
        self._free[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size
        self._uses += slots.size
        self._repeats += int(np.count_nonzero(repeat))
        self._advance(slots.size)

    def pass_on(self) -> int:
        """Counts an item that went straight through an identity; returns its index."""
        index = self.fresh
        self.fresh = self.written = index + 1
        self._uses += 1
        return index

    def _runs(self, n: int) -> list[tuple[Piece, int, int, int]]:
        """Returns the next ``n`` uses as runs of (piece, start, end, newest item)."""
        runs = []
        piece, low, ahead = self._piece, self._at, 0
        while True:
            high = min(piece.index.size, low + n)
            if high > low:
                runs.append((piece, low, high, int(piece.newest[high - 1])))
                n -= high - low
            if n == 0:
                return runs
            if ahead == len(self._ahead):
                following = next(self._pieces)
                if 0 <= self._end <= following.anchor:
                    return runs
                self._ahead.append(self._within_end(following))
            piece, low = self._ahead[ahead], 0
            ahead += 1

    def _within_end(self, piece: Piece) -> Piece:
        if self._end < 0:
            return piece
        keep = piece.index < self._end
        if keep.all():
            return piece
        index, repeat, last = piece.index[keep], piece.repeat[keep], piece.last[keep]
        newest = np.maximum.accumulate(index)
        return replace(piece, index=index, repeat=repeat, last=last, newest=newest)

    def _read(self, piece: Piece, low: int, high: int) -> Uses:
        """Returns the uses at some places of a piece, whose items are written."""
        index = piece.index[low:high]
        slots = self._slot_of.take(index & self._wrap)
        repeat, last = piece.repeat[low:high], piece.last[low:high]
        return Uses(slots, index, repeat, last, piece.newest[low:high])

    def _assign(self, slots: np.ndarray) -> None:
        """Gives slots to the next fresh items."""
        start = self.written & self._wrap
        before_wrap = self._slot_of.size - start
        self._slot_of[start : start + slots.size] = slots[:before_wrap]
        if slots.size > before_wrap:
            self._slot_of[: slots.size - before_wrap] = slots[before_wrap:]
        self.written += slots.size

    def _advance(self, n: int) -> None:
        """Moves on by ``n`` uses, and to the next piece if one is done."""
        self._at += n
        self._looked_at = 0, []
        while self._at >= self._piece.index.size and self._ahead:
            done, self._piece = self._piece, self._ahead.pop(0)
            self._at -= done.index.size
            same = done.round == self._piece.round
            self._in_round = self._in_round + done.index.size if same else 0

    def _where(self) -> tuple[int, int, int, int]:
        """Returns the round, its anchor, its carry, and its number of emitted uses."""
        if self.is_identity:
            return self.fresh, self.fresh, 0, 0
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
            "end": self._end,
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
        slots = np.arange(items.size, dtype=np.int32)
        self._slot_of[items & self._wrap] = slots
        self._num_free = self.num_slots - items.size
        self._free[: self._num_free] = np.arange(items.size, self.num_slots)
        return items, slots

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
