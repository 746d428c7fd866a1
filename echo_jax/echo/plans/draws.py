"""Draws: what the plan of an accelerator-resident echo decides for each update.

Fresh data comes in chunks, host batches of U rows, and the buffer is split into
lanes, see `echo_jax.echo.plans.lanes`.

A driver runs any `DrawPlan` like this::

    while draws.need() is Need.MUST:
        store.write(draws.write(), next_chunk())   # or draws.end(), if there is none
    draw = draws.draw()
    output(store.read(draw.read_slots), draw.fresh_index, draw.repeat)
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.plans.fixed import Plan
from echo_jax.echo.plans.lanes import check_lanes, global_index, lane_spec
from echo_jax.echo.spec import EchoSpec

__all__ = ["Draw", "DrawPlan", "FixedDraws", "Need", "stacked"]


class Need(enum.Enum):
    """What the next draws need.

    Attributes:
      NO: Nothing fresh.
      MAY: A fresh chunk is welcome if it is ready; without one the buffer serves.
      MUST: There is no next draw without another chunk.
    """

    NO = 0
    MAY = 1
    MUST = 2


@dataclass(slots=True)
class Draw:
    """The uses that make the training batch of one update.

    Attributes:
      read_slots: The slot of every use in its lane, ``int32[G, b]``.
      fresh_index: Fresh index of every use, over all lanes, ``int64[G, b]``.
      repeat: Which use of its item it is, from 0, ``int32[G, b]``.
    """

    read_slots: np.ndarray
    fresh_index: np.ndarray
    repeat: np.ndarray


class DrawPlan(Protocol):
    """A state machine over integers that decides every draw.

    Attributes:
      num_slots: Slots of each lane.
    """

    num_slots: int

    @property
    def num_chunks(self) -> int:
        """Chunks written so far; also the number of the next one."""
        ...

    @property
    def first_chunk(self) -> int:
        """The oldest chunk that a restore has to read again."""
        ...

    @property
    def counts(self) -> Counts:
        """Fresh items taken, and uses and repeats drawn, over all lanes."""
        ...

    def need(self, draws: int = 1) -> Need:
        """Returns what the next so many draws need."""
        ...

    def write(self) -> np.ndarray:
        """Takes a chunk in.

        Returns:
          The slots of its rows, ``int32[G, u]``; ``num_slots`` for a row that need
          not be kept.
        """
        ...

    def draw(self) -> Draw | None:
        """Makes the next draw, which must not need a chunk.

        Returns:
          The draw, shorter at the end of the stream, and None after it.
        """
        ...

    def end(self) -> None:
        """Says that the upstream has no more chunks."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns the state, of JSON types."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> list[tuple[int, np.ndarray]]:
        """Goes to a saved state.

        Returns:
          What the store has to hold again: chunk numbers, from the state's
          ``first_chunk`` to its last, each with slots as `write` returns them.
        """
        ...


class FixedDraws:
    """The draws of a fixed, fractional or scheduled echo: a `Plan` for each lane.

    With one lane the uses and their order are those of the host echo of the same
    spec. With several, each lane follows the schedule by itself, so item j of every
    lane is used floor((j+1)e) - floor(je) times.

    Attributes:
      num_slots: Slots of each lane: those of its plan, and room for what is
        written before it is drawn.

    Example:
      >>> draws = FixedDraws(EchoSpec(2, batch_size=4), chunk_items=4)
      >>> draws.need(), draws.write().shape, draws.need()
      (<Need.MUST: 2>, (1, 4), <Need.NO: 0>)
      >>> draws.draw().fresh_index.tolist()
      [[0, 0, 1, 1]]
    """

    def __init__(
        self,
        spec: EchoSpec,
        *,
        chunk_items: int,
        num_lanes: int = 1,
        max_draws: int = 1,
        lanes: range | None = None,
    ):
        """Starts before the first draw.

        Args:
          spec: The echo, over all lanes.
          chunk_items: Rows of a chunk, U, over all lanes.
          num_lanes: Lanes, G; must divide the rows and the batch.
          lanes: Those that are decided here, where others are somewhere else; all by
            default.
          max_draws: The most draws that `need` will be asked for at once.

        Raises:
          ValueError: If the lanes divide one of them not, or a lane's buffer is too
            small for ``spread`` without twins.
        """
        check_lanes(num_lanes, chunk_items=chunk_items, batch_size=spec.batch_size)
        self._chunk = chunk_items // num_lanes
        self._batch = spec.batch_size // num_lanes
        self._own, self._num_lanes = lanes or range(num_lanes), num_lanes
        specs = [lane_spec(spec, lane, num_lanes) for lane in self._own]
        ahead = _room_ahead(specs[0], self._chunk, max_draws)
        try:
            self._lanes = [Plan(lane, ahead=ahead) for lane in specs]
        except ValueError as error:
            where = f"in each of {num_lanes} lanes: " if num_lanes > 1 else ""
            raise ValueError(f"{where}{error}") from error
        self.num_slots = self._lanes[0].num_slots
        self._chunks = 0
        self._end = -1  # chunks of the upstream, once known

    @property
    def num_chunks(self) -> int:
        """See `DrawPlan`."""
        return self._chunks

    @property
    def first_chunk(self) -> int:
        """See `DrawPlan`."""
        return min(plan.anchor for plan in self._lanes) // self._chunk

    @property
    def counts(self) -> Counts:
        """See `DrawPlan`."""
        counts = [plan.counts for plan in self._lanes]
        return Counts(*map(sum, zip(*map(_as_tuple, counts), strict=True)))

    def need(self, draws: int = 1) -> Need:
        """See `DrawPlan`."""
        uses = draws * self._batch
        for plan in self._lanes:
            if plan.fresh + plan.fresh_wanted(uses) > plan.written:
                return Need.MUST
        return Need.NO

    def write(self) -> np.ndarray:
        """See `DrawPlan`."""
        self._chunks += 1
        return np.array(
            [plan.write_ahead(self._chunk) for plan in self._lanes], np.int32
        )

    def draw(self) -> Draw | None:
        """See `DrawPlan`."""
        drawn = [_take(plan, self._batch) for plan in self._lanes]
        reads, index, repeat = map(stacked, zip(*drawn, strict=True))
        if not reads.size:
            return None
        index = global_index(index, self._chunk, self._own, self._num_lanes)
        return Draw(reads, index, repeat)

    def end(self) -> None:
        """See `DrawPlan`."""
        self._end = self._chunks
        for plan in self._lanes:
            plan.end_at(self._chunks * self._chunk)

    def get_state(self) -> dict[str, Any]:
        """See `DrawPlan`: integers only."""
        return {
            "chunks": self._chunks,
            "end": self._end,
            "lanes": [plan.get_state() for plan in self._lanes],
        }

    def set_state(self, state: Mapping[str, Any]) -> list[tuple[int, np.ndarray]]:
        """See `DrawPlan`.

        Raises:
          ValueError: If the state is not one of such draws, or of another echo.
        """
        if set(state) != {"chunks", "end", "lanes"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is not one of fixed draws; "
                "give what get_state returned"
            )
        if len(state["lanes"]) != len(self._lanes):
            raise ValueError(
                f"the state has {len(state['lanes'])} lanes, this echo has "
                f"{len(self._lanes)}; restore with as many lanes as it was saved with"
            )
        self._chunks, self._end = state["chunks"], state["end"]
        num_items = self._chunks * self._chunk
        held = []
        for plan, saved in zip(self._lanes, state["lanes"], strict=True):
            items, slots = plan.set_state(saved)
            later = np.arange(plan.fresh, num_items)
            slots = np.concatenate([slots, plan.write_ahead(later.size)])
            held.append((np.concatenate([items, later]), slots))
        first = self.first_chunk
        table = np.full(
            (len(held), num_items - first * self._chunk), self.num_slots, np.int32
        )
        for lane, (items, slots) in enumerate(held):
            table[lane, items - first * self._chunk] = slots
        chunks = np.split(table, self._chunks - first, axis=1) if table.size else []
        return list(enumerate(chunks, start=first))


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """``np.stack``, in a tenth of the time for one array: there is often one lane."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _room_ahead(spec: EchoSpec, chunk: int, max_draws: int) -> int:
    """Slots for items that are written before a plan takes them.

    They are the rest of a chunk, and the fresh items of all draws: a plan with fewer
    slots would cut a batch where it needs those that it frees itself. In order
    ``shuffle`` the fresh items of a batch vary, and lanes drift apart. Both by at
    most the delay, and by about the root of the buffer; ten times that is more than
    ten standard deviations. A ``shuffle_buffer`` needs none of that: beside the uses
    in its buffer, which have slots, no lane needs more than the items that enter it.
    """
    room = chunk + math.ceil(max_draws * spec.batch_size / spec.schedule.min_factor) + 1
    if spec.order == "shuffle":
        room += min(2 * spec.buffer, math.ceil(10 * spec.buffer**0.5))
    return room


def _take(plan: Plan, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Slots, indices and repeats of the next uses, whose items all have slots."""
    steps = plan.take(n)
    if not steps:
        none = np.zeros(0, np.int64)
        return none.astype(np.int32), none, none.astype(np.int32)
    if len(steps) == 1:
        return steps[0].read_slots, steps[0].index, steps[0].repeat
    return (
        np.concatenate([step.read_slots for step in steps]),
        np.concatenate([step.index for step in steps]),
        np.concatenate([step.repeat for step in steps]),
    )


def _as_tuple(counts: Counts) -> tuple[int, int, int]:
    return counts.fresh, counts.uses, counts.repeats
