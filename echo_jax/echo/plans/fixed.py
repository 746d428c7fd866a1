"""The plan of a fixed echo: the number of an item determines how often it is used.

With one lane the uses and their order are those of the spec. With several lanes each
one follows the schedule by itself: item j of every lane is used
floor((j+1)e) - floor(je) times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.plans.base import BatchIndices, Need, Restored, Use, check_state_keys
from echo_jax.echo.plans.fixed_lane import FixedLane, Uses
from echo_jax.echo.plans.lanes import Lanes, lane_spec
from echo_jax.echo.spec import EchoSpec

__all__ = ["FixedPlan"]

_KEYS = {"lanes", "written"}
_BATCHES_AHEAD = 32
_NOTHING = Need()


class FixedPlan:
    """The plan of a fixed, fractional or scheduled echo; a `Plan`.

    Example:
      >>> plan = FixedPlan(EchoSpec(2, batch_size=4), lanes=Lanes(host_batch=4))
      >>> plan.need(4), plan.write(4).shape, plan.need(4)
      (Need(must=4, may=0), (1, 4), Need(must=0, may=0))
      >>> plan.next(4).fresh_index.tolist()
      [[0, 0, 1, 1]]
    """

    unit = 1

    def __init__(
        self,
        spec: EchoSpec,
        *,
        lanes: Lanes | None = None,
        max_batches: int = 1,
        room: int = 0,
        welcome: int = 0,
        options: tuple[object, ...] = (),
    ):
        # Without lanes items come one by one, and a batch may be read in parts:
        # ``room`` fresh items may get slots before they are needed, and up to
        # ``welcome`` of them are read if they are ready. Without room, one batch is
        # decided at a time. ``options`` shape the sequence, too.
        self._by_item = lanes is None
        self._lanes = lanes or Lanes()
        self._lanes.check(batch_size=spec.batch_size)
        self.batch = spec.batch_size // self._lanes.count
        self.max_batches = max_batches
        alone = self._by_item and not room
        self.batches_ahead = 1 if alone else max(max_batches, _BATCHES_AHEAD)
        # For each lane, the uses that were decided last and perhaps not handed out yet.
        self._given: list[Uses] = []
        count = self._lanes.count
        specs = [lane_spec(spec, lane, count) for lane in self._lanes.own]
        ahead, self._welcome = room, welcome
        if not self._by_item:
            ahead = _room_ahead(specs[0], self._lanes.rows, max_batches)
            options = (*options, self._lanes.host_batch, count)
        try:
            self._plans = [
                FixedLane(each, ahead=ahead, options=options) for each in specs
            ]
        except ValueError as error:
            where = f"in each of {count} lanes: " if count > 1 else ""
            raise ValueError(f"{where}{error}") from error
        self.num_slots = self._plans[0].num_slots
        self.is_identity = self._by_item and self._plans[0].is_identity

    def counts(self, pending: int = 0) -> Counts:
        counts = [plan.counts for plan in self._plans]
        for at, given in enumerate(self._given):
            if done := given.size - pending:
                counts[at] = self._plans[at].counts_after(given.part(0, done))
        return Counts(*map(sum, zip(*map(astuple, counts), strict=True)))

    def _settle(self, pending: int = 0) -> None:
        """Lets the lanes emit all decided uses but the last ``pending`` ones."""
        if not self._given or pending == self._given[0].size:
            return
        given, self._given = self._given, []
        for plan, uses in zip(self._plans, given, strict=True):
            done = uses.size - pending
            plan.emit(uses.part(0, done))
            if pending:
                self._given.append(uses.part(done, uses.size))

    def need(self, uses: int, pending: int = 0) -> Need:
        """Asks for whole host batches if items come in batches."""
        if self._given:
            self._settle(pending)
            uses += pending
        missing = max([plan.missing(uses) for plan in self._plans])
        if not missing:
            return _NOTHING
        if self._by_item:
            return Need(missing, self._welcome)
        rows, left = self._lanes.rows, self._plans[0].left
        wanted = -(-missing // rows) * rows
        return Need(must=wanted if left is None else min(wanted, left))

    def write(self, rows: int) -> np.ndarray:
        return _stacked([plan.write(rows) for plan in self._plans])

    def next(self, uses: int) -> BatchIndices | None:
        self._settle()
        found = [plan.look(uses) for plan in self._plans]
        given = [each for each in found if each is not None]
        if len(given) < len(found):
            return None
        size = min([each.size for each in given])
        if self.batch < size < uses:
            size -= size % self.batch
        given = [each.part(0, size) for each in given]
        *columns, _ = zip(*given, strict=True)
        slots, index, repeat, last = map(_stacked, columns)
        self._given = given
        return BatchIndices(slots, self._lanes.global_index(index), repeat, last)

    def take_back(self, rows: int, pending: int) -> None:
        """Takes back the slots of rows that did not come, and the pending uses."""
        self._settle(pending)
        self._given = []
        self._plans[0].take_back(rows)

    def run(self) -> list[Use]:
        self._settle()
        found = self._plans[0].look_on()
        if found is None:
            return []
        self._given = [found]
        return list(zip(*(column.tolist() for column in found[:4]), strict=True))

    def pass_on(self) -> int:
        """Counts an item that went straight through an identity; returns its index."""
        return self._plans[0].pass_on()

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

    def get_state(self, pending: int = 0) -> dict[str, Any]:
        self._settle(pending)
        if self._by_item:
            return self._plans[0].get_state()
        return {
            "lanes": [plan.get_state() for plan in self._plans],
            "written": self._plans[0].written,
        }

    def check_state(self, state: Any) -> None:
        if self._by_item:
            return self._plans[0].check_state(state)
        check_state_keys(state, _KEYS, "a fixed echo in lanes")
        lanes = state["lanes"]
        if not isinstance(lanes, list) or len(lanes) != len(self._plans):
            raise ValueError(
                f"the state has {len(lanes) if isinstance(lanes, list) else lanes!r} "
                f"lanes, this echo has {len(self._plans)}; restore with as many lanes "
                "as it was saved with"
            )
        for plan, saved in zip(self._plans, lanes, strict=True):
            plan.check_state(saved)
            ahead = state["written"] - saved["fresh"]
            if not 0 <= ahead <= self.num_slots:
                raise ValueError(
                    f"this state has written={state['written']} and fresh="
                    f"{saved['fresh']}, which do not fit together; it is damaged"
                )
        return None

    def set_state(self, state: Mapping[str, Any]) -> Restored:
        self._given = []
        single = self._by_item
        written = state["fresh"] if single else state["written"]
        held = []
        for plan, saved in zip(
            self._plans, [state] if single else state["lanes"], strict=True
        ):
            items, slots = plan.set_state(saved)
            later = np.arange(plan.fresh, written)
            slots = np.concatenate([slots, plan.write(later.size)])
            held.append((np.concatenate([items, later]), slots))
        first = self.anchor()
        table = np.full((len(held), written - first), self.num_slots, np.int32)
        for lane, (items, slots) in enumerate(held):
            table[lane, items - first] = slots
        return Restored(first, table)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns ``np.stack`` of arrays, in a tenth of the time for one array."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)


def _room_ahead(spec: EchoSpec, rows: int, max_batches: int) -> int:
    """Returns the slots of a lane for items that are written before it uses them."""
    # They are for the rest of a host batch, and for the fresh items of all batches that
    # are decided at once. With fewer slots a plan would cut a batch that needs slots
    # which it frees itself. In order ``window_shuffle`` the fresh items of a batch
    # vary, and lanes drift apart. Both vary by at most the delay, and by about the root
    # of the buffer; ten times the root is more than ten standard deviations. In order
    # ``shuffle_buffer`` a lane only needs the items that enter its buffer, beside the
    # uses in it, which have slots.
    fresh = max_batches * spec.batch_size / spec.schedule.min_factor
    room = rows + math.ceil(fresh) + 1
    if spec.order == "window_shuffle":
        room += min(2 * spec.buffer, math.ceil(10 * spec.buffer**0.5))
    return room
