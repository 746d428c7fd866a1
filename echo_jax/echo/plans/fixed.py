"""The plan of an echo: a pure state machine over integers.

A plan decides which fresh items are taken, in which slot of a store they are
kept, and which slots make up the next output. It knows neither arrays of data nor
frameworks, so one implementation serves every store.

A driver runs it like this::

    plan = Plan(spec)
    while True:
        wanted = plan.fresh_wanted(n)       # fresh items that the next n uses need
        items = take(upstream, wanted)
        if len(items) < wanted:
            plan.end_at(plan.fresh + len(items))
        for step in plan.take(n):           # nearly always one step
            store.write(step.write_slots, items)   # the next len(write_slots) items
            output(store.read(step.read_slots), step.index, step.repeat)
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.base import Piece
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.spec import EchoSpec

__all__ = ["Plan", "Step"]

_STATE_KEYS = (
    "anchor",
    "carry",
    "end",
    "fresh",
    "position",
    "repeats",
    "round",
    "spec",
    "uses",
)
_RUN_AHEAD = 64


@dataclass(slots=True)
class Step:
    """One write and one read of a store: first all writes, then all reads.

    Attributes:
      write_slots: The slots of the next fresh items, in their order, ``int64[f]``.
      read_slots: The slot of every use, ``int64[n]``; a slot may occur twice.
      index: Fresh index of every use, ``int64[n]``.
      repeat: Which use of its item it is, from 0, ``int32[n]``.
      last: Whether the item's slot is free after the step, ``bool[n]``.
    """

    write_slots: np.ndarray
    read_slots: np.ndarray
    index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray


class Plan:
    """The plan of a fixed, fractional or scheduled echo.

    Attributes:
      num_slots: How many slots a store needs.
      fresh: Fresh items taken so far; also the index of the next one.
      written: Fresh items that have got a slot: those taken, and any after them
        that `write_ahead` was told of.
      counts: Fresh items taken, and uses and repeats emitted.
      is_identity: Whether every item is used once, in its order. A driver may then
        pass items on, and say so with `pass_on`.
    """

    def __init__(self, spec: EchoSpec, *, ahead: int = 0):
        """Starts before the first use.

        Args:
          spec: The echo.
          ahead: How many fresh items may be written before a use needs them.

        Raises:
          ValueError: If the buffer is too small for ``spread`` without twins.
        """
        self._spec = spec
        self._fingerprint = spec.fingerprint
        self._rounds = rounds_of(spec)
        self.is_identity = (
            isinstance(self._rounds, Consecutive) and spec.schedule.max_factor == 1
        )
        self.num_slots = self._rounds.num_slots + ahead
        span = 1 << (self._rounds.window + self.num_slots).bit_length()
        self._slot_of = np.zeros(span, np.int32)
        self._wrap = span - 1
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
        # The last look-ahead of `fresh_wanted`, for the `take` that follows it.
        self._looked_at: tuple[int, list[tuple[Piece, int, int, int]]] = 0, []

    @property
    def counts(self) -> Counts:
        """How many fresh items, uses and repeats there were."""
        return Counts(self.fresh, self._uses, self._repeats)

    @property
    def anchor(self) -> int:
        """The oldest fresh item that a restore has to read again."""
        return self._where(self._at)[1]

    def next_anchor(self, index: int) -> int:
        """Returns the first item from ``index`` on that can become the anchor."""
        return self._rounds.next_anchor(index)

    def fresh_wanted(self, n: int) -> int:
        """Returns how many fresh items the next ``n`` uses need.

        Fewer are wanted once the end of the upstream is known.
        """
        runs = self._runs(n)
        self._looked_at = n, runs
        wanted = 0
        for *_, top in runs:
            wanted = max(wanted, top + 1 - self.fresh)
        return wanted

    def end_at(self, total: int) -> None:
        """Says that the upstream has ``total`` items in all, and no more."""
        self._looked_at = 0, []
        self._end = total
        self._piece = self._within_end(self._piece)
        self._ahead = [self._within_end(p) for p in self._ahead if p.anchor < total]

    def take(self, n: int) -> list[Step]:
        """Emits the next ``n`` uses; fewer at the end of the stream, then none.

        The fresh items that `fresh_wanted` named have been taken when this is
        called. Several steps come only where a batch needs a slot that the batch
        itself frees, or where it crosses from one piece of the order to the next.
        """
        looked_at, runs = self._looked_at
        steps, taken = [], 0
        for piece, low, high, top in runs if looked_at == n else self._runs(n):
            taken += high - low
            while low < high:
                step = self._step(piece, low, high, top)
                steps.append(step)
                low += step.index.size
        self._advance(taken)
        return steps

    def write_ahead(self, count: int) -> np.ndarray:
        """Gives slots to fresh items before a use needs them.

        For stores that are filled in chunks: `take` then has nothing to write.

        Args:
          count: How many; no more than there are free slots.

        Returns:
          Their slots, ``int32[count]``.
        """
        if count > self._num_free:
            raise AssertionError(
                f"an echo plan has {self._num_free} free slots for {count} items; "
                "this is a bug"
            )
        self._num_free -= count
        slots = self._free[self._num_free : self._num_free + count].copy()
        self._assign(slots)
        return slots

    def pass_on(self) -> None:
        """Counts a fresh item that went straight through an identity."""
        self.fresh += 1
        self.written += 1
        self._uses += 1

    def take_run(self) -> Step | None:
        """Emits the next use, and those after it that need no further fresh item.

        For drivers that pass on one use at a time: they take no item early.

        Returns:
          The uses, or None at the end of the stream.
        """
        runs = self._runs(1)
        if not runs:
            return None
        piece, low, *_ = runs[0]
        self._advance(0)
        index = piece.index[low : low + _RUN_AHEAD]
        over = index >= max(self.fresh, int(index[0]) + 1)
        size = int(over.argmax()) or index.size
        step = self._step(piece, low, low + size, _max(index[:size]))
        self._advance(step.index.size)
        return step

    def _runs(self, n: int) -> list[tuple[Piece, int, int, int]]:
        """The next ``n`` uses: their pieces, places in these, and newest items."""
        runs = []
        piece, low, ahead = self._piece, self._at, 0
        while True:
            high = min(piece.index.size, low + n)
            if high > low:
                runs.append((piece, low, high, _max(piece.index[low:high])))
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
        return Piece(
            piece.round,
            piece.anchor,
            piece.carry,
            piece.index[keep],
            piece.repeat[keep],
            piece.last[keep],
        )

    def _step(self, piece: Piece, low: int, high: int, top: int) -> Step:
        """Emits the uses in some places, whose newest item is ``top``."""
        index = piece.index[low:high]
        taken = max(0, top + 1 - self.written)
        if taken > self._num_free:
            # Cut where the free slots are used up; the rest waits for slots that
            # this part frees.
            over = index >= self.written + self._num_free
            high = low + int(over.argmax())
            if high == low:
                raise AssertionError("an echo plan ran out of slots; this is a bug")
            index = index[: high - low]
            top = _max(index)
            taken = max(0, top + 1 - self.written)
        writes = self.write_ahead(taken)
        self.fresh = max(self.fresh, top + 1)
        reads = self._slot_of.take(index & self._wrap)
        last = piece.last[low:high]
        freed = reads.compress(last)
        self._free[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size
        repeat = piece.repeat[low:high]
        self._uses += index.size
        self._repeats += int(np.count_nonzero(repeat))
        return Step(writes, reads, index, repeat, last)

    def _assign(self, slots: np.ndarray) -> None:
        """Gives slots to the next fresh items."""
        start = self.written & self._wrap
        before_wrap = self._slot_of.size - start
        self._slot_of[start : start + slots.size] = slots[:before_wrap]
        if slots.size > before_wrap:
            self._slot_of[: slots.size - before_wrap] = slots[before_wrap:]
        self.written += slots.size

    def _advance(self, n: int) -> None:
        """Moves on by ``n`` uses, and to the next piece where one is done.

        A piece stays until a use of the next one is wanted, so that `get_state`
        can go back within it.
        """
        self._at += n
        self._looked_at = 0, []
        while self._at >= self._piece.index.size and self._ahead:
            done, self._piece = self._piece, self._ahead.pop(0)
            self._at -= done.index.size
            same = done.round == self._piece.round
            self._in_round = self._in_round + done.index.size if same else 0

    def _where(self, at: int) -> tuple[int, int, int, int]:
        """Round, anchor, its carry, and uses of the round before place ``at``."""
        if self.is_identity:
            return self.fresh, self.fresh, 0, 0
        piece = self._piece
        if not isinstance(self._rounds, Consecutive):
            return piece.round, piece.anchor, piece.carry, self._in_round + at
        if at < piece.index.size:
            item, position = int(piece.index[at]), int(piece.repeat[at])
        else:
            item, position = int(piece.index[-1]) + 1 if at else piece.anchor, 0
        schedule = self._rounds.schedule
        _, carry = schedule.uses(piece.anchor, item - piece.anchor, piece.carry)
        return item, item, carry, position

    def get_state(self, pending: int = 0) -> dict[str, int]:
        """Returns the state: plain integers, always the same keys.

        Args:
          pending: How many of the uses of the last `take_run` the driver has not
            passed on yet. The state is the one before them.
        """
        low = self._at - pending
        round_, anchor, carry, position = self._where(low)
        repeats = np.count_nonzero(self._piece.repeat[low : self._at])
        return {
            "anchor": anchor,
            "carry": carry,
            "end": self._end,
            "fresh": self.fresh,
            "position": position,
            "repeats": self._repeats - int(repeats),
            "round": round_,
            "spec": self._fingerprint,
            "uses": self._uses - pending,
        }

    def set_state(self, state: Mapping[str, int]) -> tuple[np.ndarray, np.ndarray]:
        """Continues from a state; slots are assigned anew.

        Returns:
          The fresh indices of the items in use, ascending, and their slots. The
          driver reads the upstream from `anchor` up to item `fresh` again and
          writes these items into these slots.

        Raises:
          ValueError: If it is not a state of a plan, or was saved with another spec.
        """
        if set(state) != set(_STATE_KEYS) or not all(
            type(value) is int for value in state.values()
        ):
            raise ValueError(
                f"{dict(state)!r} is not the state of an echo plan; give what "
                f"get_state returned: integers under {', '.join(_STATE_KEYS)}"
            )
        if state["spec"] != self._fingerprint:
            raise ValueError(
                f"this state was saved with another spec than {self._spec}, or by "
                "another version of the orders; restore it with the spec it was "
                "saved with"
            )
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


def _max(values: np.ndarray) -> int:
    """``int(values.max())``, in half the time for the few values of a batch."""
    return int(np.maximum.reduce(values))
