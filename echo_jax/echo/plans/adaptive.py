"""Adaptive echo: train on what is ready, fresh if possible, and never past a cap.

The rule of every draw: take a fresh chunk if one is ready; use the items below the
cap that were not used for longest; wait only if they are too few for a batch. It needs
no knowledge of the rates. While data comes in time nothing is echoed; when it comes
late, what is repeated is what has waited longest, since the value of a repeat follows
its lag (Choi et al. 2019, figure 7); when storage stalls, items take turns until every
one has been used ``cap`` times. The cap is not optional: past some number of uses a
repeat is worth less than nothing (section 3.3: between 4 and 8 for a Transformer on
LM1B at batch 1024).

Least used first, the other natural choice, was measured beside this one: it repeats
what has just come, and runs dry earlier in a stall (docs/design.md).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.keys import fingerprint, sequence
from echo_jax.echo.plans.decision_log import Tape
from echo_jax.echo.plans.draws import Draw, Need, stacked
from echo_jax.echo.plans.lanes import check_lanes, global_index
from echo_jax.echo.plans.lru import LeastRecentlyUsed
from echo_jax.echo.plans.ring import Ring, check_draws

__all__ = ["AdaptiveDraws"]

# Goes up whenever the same arguments and tape yield another sequence than before.
_SEQUENCE_VERSION = 2
_STATE_KEYS = {"chunks", "ended", "plan", "tape"}


class AdaptiveDraws:
    """The draws of an adaptive echo; a `DrawPlan`.

    The buffer is a ring for each lane that always holds its last items. Fresh items
    are used first, and in their order; a chunk is wanted only if fewer of them than
    the next draw uses are waiting, so none is lost unused. The choice of repeats is
    random within those that have waited longest.

    Whether a chunk was taken before a draw is written on a tape, one bit for each
    draw. The sequence of draws is a function of the arguments, the tape, and where
    the upstream ends. With ``replay`` the decisions of a tape are repeated, and
    recorded again; after its end decisions are made from what is ready. Draws are
    decided one at a time: what is ready says nothing about later ones.

    After the end of the upstream, draws go on until fewer items than a batch are
    below the cap.

    On one lane a draw of 1024 takes about 40 us, from 10^5 items as from 10^6, and
    taking in a chunk as large 50 us. On eight lanes each takes four times as long.

    Attributes:
      num_slots: Slots of each lane.
      tape: The decisions so far.

    Example:
      >>> draws = AdaptiveDraws(buffer=8, batch_size=2, chunk_items=2, cap=2)
      >>> draws.need(), draws.write().tolist(), draws.draw().fresh_index.tolist()
      (<Need.MUST: 2>, [[0, 1]], [[0, 1]])
      >>> draws.need()  # a fresh chunk is welcome, but the buffer would do
      <Need.MAY: 1>
      >>> draws.draw().repeat.tolist(), draws.need()
      ([[1, 1]], <Need.MUST: 2>)
      >>> list(draws.tape)
      [True, False]
    """

    def __init__(
        self,
        *,
        buffer: int,
        batch_size: int,
        chunk_items: int,
        num_lanes: int = 1,
        lanes: range | None = None,
        cap: int = 4,
        seed: int = 0,
        replay: Tape | None = None,
    ):
        """Starts before the first draw.

        Args:
          buffer: Items kept, over all lanes.
          batch_size: Items of a draw, over all lanes.
          chunk_items: Rows of a chunk; at least a batch.
          num_lanes: Lanes; must divide the rows and the batch.
          lanes: Those that are decided here, where others are somewhere else; all by
            default.
          cap: Uses after which an item is not drawn any more.
          seed: Names the random choices.
          replay: A tape whose decisions are repeated.

        Raises:
          ValueError: If a number is out of its range, a chunk is smaller than a batch,
            or the buffer so small that items would be lost unused.
        """
        check_lanes(num_lanes, chunk_items=chunk_items, batch_size=batch_size)
        if cap < 1:
            raise ValueError(f"cap={cap} must be at least 1")
        if chunk_items < batch_size:
            raise ValueError(
                f"chunk_items={chunk_items} is too small: a chunk has to serve a draw; "
                f"use at least {batch_size}"
            )
        self._batch = batch_size // num_lanes
        chunk = chunk_items // num_lanes
        waiting = self._batch - math.gcd(self._batch, chunk)
        if buffer // num_lanes < waiting + chunk:
            raise ValueError(
                f"buffer={buffer} is too small to use every fresh item before it "
                f"gives way; use at least {(waiting + chunk) * num_lanes}"
            )
        self.num_slots = buffer // num_lanes
        self._own, self._num_lanes = lanes or range(num_lanes), num_lanes
        self._ring = Ring(len(self._own), self.num_slots, chunk)
        self._cap = cap
        self._seed = seed
        self._replay = Tape() if replay is None else replay
        sizes = (buffer, batch_size, chunk_items, num_lanes)
        self._fingerprint = fingerprint(_SEQUENCE_VERSION, *sizes, cap, seed)
        self._restart()

    def _restart(self) -> None:
        self._lanes = [
            LeastRecentlyUsed(self.num_slots, self._cap, sequence(self._seed, lane))
            for lane in self._own
        ]
        self.tape = Tape()
        self._chunks = 0
        self._repeats = 0
        self._taken = False  # a chunk was taken since the last draw
        self._ended = False

    @property
    def num_chunks(self) -> int:
        """See `DrawPlan`."""
        return self._chunks

    @property
    def first_chunk(self) -> int:
        """See `DrawPlan`."""
        return self._ring.first_chunk(self._chunks)

    @property
    def counts(self) -> Counts:
        """See `DrawPlan`."""
        lanes = self._ring.num_lanes
        fresh = self._chunks * self._ring.lane_chunk * lanes
        return Counts(fresh, len(self.tape) * self._batch * lanes, self._repeats)

    def need(self, draws: int = 1) -> Need:
        """See `DrawPlan`; `Need.MAY` at most once before a draw.

        Raises:
          ValueError: If ``draws`` is not 1, or a tape that is replayed does not fit.
        """
        check_draws(draws, 1)
        if self._ended:
            return Need.NO
        must = not self._can_draw()
        position = len(self.tape)
        if position < len(self._replay):
            return self._replayed_need(position, must)
        if must:
            return Need.MUST
        # Items are taken and used alike in all lanes as long as they are fresh.
        few = self._lanes[0].num_unused < self._batch
        return Need.MAY if few and not self._taken else Need.NO

    def _can_draw(self) -> bool:
        return all(lane.num_drawable >= self._batch for lane in self._lanes)

    def _replayed_need(self, position: int, must: bool) -> Need:
        take = self._replay[position]
        if must and not take:
            raise ValueError(
                f"the tape takes no chunk before draw {position}, which cannot be made "
                "without one; it was recorded with another echo"
            )
        return Need.MUST if take and not self._taken else Need.NO

    def write(self) -> np.ndarray:
        """See `DrawPlan`.

        Raises:
          RuntimeError: If `need` did not ask for a chunk.
        """
        unused = self._lanes[0].num_unused + self._ring.lane_chunk
        if self._taken or self._ended or unused > self.num_slots:
            raise RuntimeError("no draw needs another chunk; ask need() before write()")
        self._take()
        return self._ring.chunk_slots(self._chunks - 1)

    def _take(self) -> None:
        for lane in self._lanes:
            lane.write(self._ring.lane_chunk)
        self._chunks += 1
        self._taken = True

    def draw(self) -> Draw | None:
        """See `DrawPlan`.

        Raises:
          RuntimeError: If the draw needs a chunk.
          ValueError: If a tape that is replayed takes a chunk here, and the upstream
            has ended.
        """
        position = len(self.tape)
        take = position < len(self._replay) and self._replay[position]
        if take and not self._taken:
            if self._ended:
                raise ValueError(
                    f"the tape takes chunk {self._chunks} before draw {position}, but "
                    "the upstream has ended; replay it with the same data"
                )
            raise RuntimeError("the tape takes a chunk here; ask need() before draw()")
        if not self._can_draw():
            if self._ended:
                return None
            raise RuntimeError("the draw needs a chunk; ask need() before draw()")
        slots, repeat = self._draw_lanes()
        items = self._ring.items(slots, self._lanes[0].items)
        chunk = self._ring.lane_chunk
        index = global_index(items, chunk, self._own, self._num_lanes)
        return Draw(slots, index, repeat)

    def _draw_lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots and repeats of the next draw, ``int32[G, b]``; records it."""
        number = len(self.tape)
        drawn = [lane.draw(self._batch, number) for lane in self._lanes]
        slots, repeat = map(stacked, zip(*drawn, strict=True))
        self._repeats += int(np.count_nonzero(repeat))
        self.tape.append(self._taken)
        self._taken = False
        return slots, repeat

    def end(self) -> None:
        """See `DrawPlan`."""
        self._ended = True

    def get_state(self) -> dict[str, Any]:
        """See `DrawPlan`: integers, and the tape as `Tape.to_json` gives it."""
        return {
            "chunks": self._chunks,
            "ended": int(self._ended),
            "plan": self._fingerprint,
            "tape": self.tape.to_json(),
        }

    def set_state(self, state: Mapping[str, Any]) -> list[tuple[int, np.ndarray]]:
        """See `DrawPlan`.

        The draws of the tape are made again. For a million draws of 1024 that takes
        about a minute on one lane, and three to four on eight.

        Raises:
          ValueError: If the state is not one of such draws, was saved with other
            arguments, or is not on the way of the tape that is replayed.
        """
        tape = self._checked(state)
        self._restart()
        for taken in tape:
            if taken:
                self._take()
            if not self._can_draw():
                raise ValueError("the tape of this state takes too few chunks")
            self._draw_lanes()
        if state["chunks"] == self._chunks + 1:
            self._take()
        elif state["chunks"] != self._chunks:
            raise ValueError(
                f"this state says {state['chunks']} chunks, but its tape takes "
                f"{self._chunks}; it is damaged"
            )
        self._ended = bool(state["ended"])
        return self._ring.held(self._chunks)

    def _checked(self, state: Mapping[str, Any]) -> Tape:
        """The tape of a state that fits these draws."""
        numbers = [state.get(key) for key in ("chunks", "ended", "plan")]
        if set(state) != _STATE_KEYS or any(type(n) is not int for n in numbers):
            raise ValueError(
                f"a state with the keys {sorted(state)} is not one of adaptive draws; "
                "give what get_state returned"
            )
        if state["plan"] != self._fingerprint:
            raise ValueError(
                "this state was saved with another buffer, batch, chunk, number of "
                "lanes, cap or seed; restore it with those it was saved with"
            )
        tape = Tape.from_json(state["tape"])
        shorter = min(len(tape), len(self._replay))
        if tape[:shorter] != self._replay[:shorter]:
            raise ValueError(
                "this state is not on the way of the tape that is replayed; restore "
                "it without a replay, or with the one it was saved with"
            )
        return tape
