"""One lane of a fixed echo: a pure state machine over integers.

It walks along an order, and gives slots of a store to fresh items and back.
"""

import copy
import math
from collections.abc import Mapping
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

_STATE_KEYS = {
    "anchor",
    "carry",
    "end",
    "fresh",
    "position",
    "repeats",
    "round",
    "spec",
    "uses",
}
_RUN_AHEAD = 64


class Uses(NamedTuple):
    """Some uses of one lane, in output order.

    Attributes:
      slots: The slot of every use, ``int32[n]``; a slot may occur twice.
      fresh_index: Fresh index of every use, ``int64[n]``.
      repeat: Which use of its item it is, from 0, ``int32[n]``.
      last: Whether the item's slot is free after it, ``bool[n]``.
      newest: The largest fresh index so far, ``int64[n]``.
    """

    slots: np.ndarray
    fresh_index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray
    newest: np.ndarray

    @property
    def size(self) -> int:
        """How many they are."""
        return self.slots.size

    def part(self, start: int, stop: int) -> "Uses":
        """Returns some of them."""
        if stop - start == self.size:
            return self
        return Uses(*(column[start:stop] for column in self))


class FixedLane:
    """A lane of a fixed, fractional or scheduled echo.

    Attributes:
      num_slots: How many slots a store needs.
      fresh: Fresh items taken so far; also the index of the next one.
      written: Fresh items that have got a slot: those taken, and any after them.
      counts: Fresh items taken, and uses and repeats emitted.
      is_identity: Whether every item is used once, in its order. A driver may then
        pass items on, and say so with `pass_on`.
    """

    def __init__(
        self, spec: EchoSpec, *, ahead: int = 0, options: tuple[object, ...] = ()
    ):
        """Starts before the first use.

        Args:
          spec: The echo of this lane.
          ahead: How many fresh items may be written before a use needs them.
          options: What else shapes the sequence, so that a state is refused where
            it differs.

        Raises:
          ValueError: If the buffer is too small for ``spread`` without twins.
        """
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
        # Upstreams' states are looked at so often that a restore reads little in vain.
        stride = self._rounds.window // 8
        self._stride = stride if stride >= _LEAST_STRIDE else 0
        self._restart(dict.fromkeys(_STATE_KEYS, 0) | {"end": -1})

    def _restart(self, state: Mapping[str, int]) -> None:
        self.fresh = self.written = state["fresh"]
        self._uses, self._repeats = state["uses"], state["repeats"]
        self._end = state["end"]
        self._free = np.arange(self.num_slots, dtype=np.int32)
        self._num_free = self.num_slots
        self._pieces = self._rounds.pieces(
            state["round"], state["anchor"], state["carry"]
        )
        self._piece = next(self._pieces)
        self._in_round = 0  # uses of the round that stand before the piece
        self._at = 0  # uses of the piece that are emitted
        self._ahead: list[Piece] = []
        # The last look-ahead of `missing`, for the `next` that follows it.
        self._looked_at: tuple[int, list[tuple[Piece, int, int, int]]] = 0, []

    @property
    def counts(self) -> Counts:
        """How many fresh items, uses and repeats there were."""
        return Counts(self.fresh, self._uses, self._repeats)

    def counts_after(self, uses: Uses) -> Counts:
        """Returns them as they are when these uses are emitted, too."""
        return Counts(
            max(self.fresh, int(uses.newest[-1]) + 1),
            self._uses + uses.size,
            self._repeats + int(np.count_nonzero(uses.repeat)),
        )

    @property
    def left(self) -> int | None:
        """Fresh items that are still to be written, once the end is known."""
        return None if self._end < 0 else self._end - self.written

    def anchor(self) -> int:
        """Returns the first fresh item that the state knows of."""
        return self._where()[1]

    def oldest(self) -> int:
        """Returns the oldest fresh item that a restore has to read again.

        With a small buffer it is the anchor: there is little to spare.
        """
        if not self._stride:
            return self.anchor()
        items = np.arange(self.anchor(), self.written)
        # What a slot holds is the last item that it was given to.
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
        """Returns how many fresh items the next uses need beside those written.

        Fewer are missing once the end of the upstream is known.
        """
        looked_at, runs = self._looked_at
        if looked_at != uses:
            runs = self._runs(uses)
            self._looked_at = uses, runs
        missing = 0
        for *_, top in runs:
            missing = max(missing, top + 1 - self.written)
        return missing

    def end_at(self, total: int) -> None:
        """Says that the upstream has ``total`` items in all, and no more."""
        self._looked_at = 0, []
        self._end = total
        self._piece = self._within_end(self._piece)
        self._ahead = [self._within_end(p) for p in self._ahead if p.anchor < total]

    def write(self, items: int) -> np.ndarray:
        """Gives slots to the next fresh items, as far as there are free ones.

        Args:
          items: How many at most.

        Returns:
          Their slots, ``int32[n]``.
        """
        count = min(items, self._num_free)
        self._num_free -= count
        slots = self._free[self._num_free : self._num_free + count].copy()
        self._assign(slots)
        return slots

    def take_back(self, items: int) -> None:
        """Has the last items that got slots give them back; no use of them is emitted.

        Args:
          items: How many.
        """
        last = np.arange(self.written - items, self.written)
        end = self._num_free + items
        self._free[self._num_free : end] = self._slot_of.take(last & self._wrap)
        self._num_free = end
        self.written -= items

    def look(self, uses: int) -> Uses | None:
        """Returns the next uses, up to the first whose item is not written.

        They come next until something is written.

        Args:
          uses: At most so many.

        Returns:
          The uses; None at the end of the stream.
        """
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
        """Returns the next use, and those after it that take no further fresh item.

        They come next until something is written.

        Returns:
          The uses; None at the end of the stream.
        """
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
        """Emits uses: those that come next, as many of them as there are."""
        slots, _, repeat, last, newest = uses
        self.fresh = max(self.fresh, int(newest[-1]) + 1)
        freed = slots.compress(last)
        self._free[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size
        self._uses += slots.size
        self._repeats += int(np.count_nonzero(repeat))
        self._advance(slots.size)

    def pass_on(self) -> int:
        """Counts a fresh item that went straight through an identity; its index."""
        index = self.fresh
        self.fresh = self.written = index + 1
        self._uses += 1
        return index

    def _runs(self, n: int) -> list[tuple[Piece, int, int, int]]:
        """The next ``n`` uses: their pieces, places in these, and newest items."""
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
        index = piece.index[keep]
        return Piece(
            piece.round,
            piece.anchor,
            piece.carry,
            index,
            piece.repeat[keep],
            piece.last[keep],
            np.maximum.accumulate(index),
        )

    def _read(self, piece: Piece, low: int, high: int) -> Uses:
        """The uses in some places of a piece, whose items are written."""
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
        """Moves on by ``n`` uses, and to the next piece where one is done."""
        self._at += n
        self._looked_at = 0, []
        while self._at >= self._piece.index.size and self._ahead:
            done, self._piece = self._piece, self._ahead.pop(0)
            self._at -= done.index.size
            same = done.round == self._piece.round
            self._in_round = self._in_round + done.index.size if same else 0

    def _where(self) -> tuple[int, int, int, int]:
        """Round, anchor, its carry, and uses of the round before the next one."""
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
        """Returns the state: plain integers, always the same keys."""
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
        """Refuses what is no state of this lane, and changes nothing.

        Raises:
          ValueError: If it is not a state of a plan, is damaged, or was saved with
            another spec.
        """
        check_state_keys(state, _STATE_KEYS, "an echo plan")
        if state["spec"] != self._fingerprint:
            raise ValueError(
                f"this state was saved with another spec than {self._spec}, with other "
                "options (batch, unbatch, lanes, rows of a host batch), or by another "
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
        """Whether a lane that goes to a state is then in that state."""
        trial = copy.copy(self)
        trial._slot_of = self._slot_of.copy()
        try:
            trial.set_state(state)
        except (AssertionError, IndexError, ValueError):
            return False
        return trial.get_state() == state

    def set_state(self, state: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Continues from a state that `check_state` accepts; slots are assigned anew.

        Returns:
          The fresh indices of the items in use, ascending, and their slots. The
          driver reads the upstream from `anchor` up to item `fresh` again and
          writes these items into these slots.
        """
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
        """The items, of those taken, that the rest of the order uses."""
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
