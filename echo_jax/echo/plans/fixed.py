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
from echo_jax.echo.plans.base import Decision, Need, Restored, Uses, check_state_keys
from echo_jax.echo.plans.fixed_lane import FixedLane
from echo_jax.echo.plans.lanes import Lanes, lane_spec
from echo_jax.echo.spec import EchoSpec

__all__ = ["FixedPlan"]

_KEYS = {"lanes", "written"}
# Decided at once: batches, and at most so many uses beyond one batch.
_BATCHES_AHEAD, _USES_AHEAD = 32, 1 << 15


class FixedPlan:
    """The plan of a fixed, fractional or scheduled echo; a `Plan`.

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
        room = _room_ahead(specs[0], self._lanes.rows, max_batches)
        try:
            self._plans = [
                FixedLane(each, ahead=room, uses=self._ahead, options=options)
                for each in specs
            ]
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

    def need(self, uses: int) -> Need:
        return Need()

    def decide(self, uses: int, rows: int) -> Decision | None:
        found = [plan.decide(max(uses, self._ahead)) for plan in self._plans]
        decided = [each for each in found if each is not None]
        if len(decided) < len(found):
            return None
        size = min([each.uses.size for each in decided])
        if size > self.batch:
            size -= size % self.batch
        slots, index, repeat, last = (
            _stacked([getattr(each.uses, name)[:size] for each in decided])
            for name in ("slots", "fresh_index", "repeat", "last")
        )
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
        uses_ = Uses(slots, self._lanes.global_index(index), repeat, last)
        return Decision(uses_, must, most, given)

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
        single = self._by_item
        written = state["fresh"] if single else state["written"]
        held = []
        for plan, saved in zip(
            self._plans, [state] if single else state["lanes"], strict=True
        ):
            items, slots = plan.set_state(saved)
            later = np.arange(plan.fresh, written)
            slots = np.concatenate([slots, plan.resume(written)])
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
    # are drawn together, which cannot use slots that they free themselves. In order
    # ``window_shuffle`` the fresh items of a batch vary, and lanes drift apart. Both
    # vary by at most the delay, and by about the root of the buffer; ten times the root
    # is more than ten standard deviations. In order ``shuffle_buffer`` a lane only
    # needs the items that enter its buffer, beside the uses in it, which have slots.
    fresh = max_batches * spec.batch_size / spec.schedule.min_factor
    room = rows + math.ceil(fresh) + 1
    if spec.order == "window_shuffle":
        room += min(2 * spec.buffer, math.ceil(10 * spec.buffer**0.5))
    return room
