"""Runs a plan as a feed does, with a store of numbers, and checks every batch."""

import copy
import itertools
import json
from collections import Counter

import numpy as np

import echo_jax as ej
from echo_jax.echo.plans.base import outputs_of
from echo_jax.echo.plans.lanes import Lanes


class Driver:
    """A plan, its slots, and an upstream of ``total`` rows for each lane."""

    def __init__(self, plan, lanes=None, total=10**9):
        self.plan, self.lanes, self.total = plan, lanes or Lanes(), total
        self.store = [{} for _ in self.lanes.own]  # slot -> fresh index
        self.rows = 0
        self.decision, self.at, self.first = None, 0, 0
        self.drawn = []  # of every batch and lane, pairs of (fresh index, repeat)
        self.uses = Counter()

    @property
    def counts(self):
        return self.plan.counts(self.at)

    def gives_way(self, item):
        """Whether the slot of an item may be written to."""
        return True

    def hold(self, first, slots):
        """Puts rows of every lane, from the first of them on, into slots."""
        assert slots.dtype == np.int32 and len(slots) == len(self.store)
        for lane, row in np.ndindex(slots.shape):
            slot = int(slots[lane, row])
            if slot < self.plan.num_slots:
                number, place = divmod(first + row, self.lanes.rows)
                lane_number = number * self.lanes.count + self.lanes.own[lane]
                self.store[lane][slot] = lane_number * self.lanes.rows + place

    def follow(self, batch):
        """Checks a batch, and records it."""
        assert batch.slots.dtype == batch.repeat.dtype == np.int32
        assert batch.fresh_index.dtype == np.int64
        lanes = [[] for _ in self.store]
        for lane, use in np.ndindex(batch.slots.shape):
            slot, item = int(batch.slots[lane, use]), int(batch.fresh_index[lane, use])
            assert self.store[lane][slot] == item
            assert batch.repeat[lane, use] == self.uses[item]
            lanes[lane].append((item, self.uses[item]))
            self.uses[item] += 1
            if batch.last is not None and batch.last[lane, use]:
                del self.store[lane][slot]
        self.drawn.append(lanes)
        return lanes

    def decide(self, uses, ready):
        """Decides the next uses; returns whether there are some."""
        wanted = self.wanted(uses, ready)
        if self.rows + wanted > self.total:
            self.plan.end(self.total - self.rows)
            wanted = self.wanted(uses, True)
        decision = self.plan.decide(uses, wanted)
        if decision is not None:
            self.decision, self.at, self.first = decision, 0, self.rows
        return decision is not None

    def wanted(self, uses, ready):
        need = self.plan.need(uses)
        return need.must or ready * need.may

    def write(self, row):
        """Writes the rows up to one of them."""
        part = slice(self.rows - self.first, row - self.first)
        slots = self.decision.slots[:, part]
        for lane, held in zip(slots, self.store, strict=True):
            here = [held[slot] for slot in lane.tolist() if slot in held]
            assert all(map(self.gives_way, here)), "an item is lost"
        self.hold(self.rows, slots)
        self.rows = row

    def take(self, uses=None, ready=False, together=1):
        """The next batch, or the last one of several at once; None at the end."""
        uses = uses or self.plan.batch
        while True:
            size = 0 if self.decision is None else self.decision.uses.size
            if self.at + together * uses > size and not self.decide(
                together * uses, ready
            ):
                return None
            stop = min(self.at + together * uses, self.decision.uses.size)
            row = max(self.rows, self.decision.rows_for(self.at, stop))
            if row <= self.total:
                break
            self.plan.settle(self.at, self.rows)
            self.plan.end(self.total - self.rows)
            self.decision = None
        self.write(row)
        start, self.at = self.at, stop
        self.plan.settle(stop, row)
        found = [
            self.follow(self.decision.uses[:, at : min(at + uses, stop)])
            for at in range(start, stop, uses)
        ]
        return found[-1] if len(found) == together else None

    def state(self, held=0):
        """The state before the last ``held`` uses."""
        self.plan.settle(self.at - held, self.rows)
        state = self.plan.get_state()
        self.plan.settle(self.at, self.rows)
        return state

    def all(self, uses=None):
        """All batches up to the end."""
        while self.take(uses) is not None:
            pass
        return self.drawn

    def restored(self, plan, state, num_batches):
        """A driver of another plan at a state, and what is pending there."""
        plan.check_state(state)
        assert plan.counts(0) == ej.Counts(), "check_state has changed something"
        other, found = copy.copy(self), plan.set_state(state)
        Driver.__init__(other, plan, self.lanes, self.total)
        assert found.first == plan.anchor() and found.first % self.lanes.rows == 0
        other.hold(found.first, found.slots)
        other.rows = found.first + found.slots.shape[1]
        other.drawn = self.drawn[:num_batches]
        other.uses.update(k for batch in other.drawn for lane in batch for k, _ in lane)
        return other, found.pending


def batches_of(plan, count):
    """Fresh index and repeat of every use of the next batches, whatever they need."""
    outputs = outputs_of(plan, 10**9, plan.batch, lambda: True)
    return [
        np.stack([batch.fresh_index, batch.repeat], -1)
        for _, batch in itertools.islice(outputs, count)
    ]


def assert_restores(driver, make, steps, *, pending=0, ahead=6):
    """Takes batches, and goes on alike from the state before each of them.

    Args:
      make: Makes a plan like the driver's.
      steps: The arguments of `Driver.take` for each batch.
      pending: Uses of the latest batch that were not handed out.
    """
    places = []
    for step in steps:
        held = min(pending, len(driver.drawn[-1][0]) - 1) if driver.drawn else 0
        state = json.dumps(driver.state(held))
        stored = [sorted(lane.values()) for lane in driver.store]
        places.append((state, held, driver.plan.counts(driver.at - held), stored))
        if driver.take(*step) is None:
            break
    for at, (state, held, counts, stored) in enumerate(places):
        other, rest = driver.restored(make(), json.loads(state), at)
        assert other.plan.counts(0) == counts
        # Items that came one by one are read again from the first that was not used.
        assert [sorted(lane.values()) for lane in other.store] == [
            [item for item in lane if len(stored) > 1 or item < other.rows]
            for lane in stored
        ]
        expected = driver.drawn[at - 1][0][-held:] if held else []
        if rest is None:
            assert not expected
        else:
            index, repeat = rest.fresh_index[0].tolist(), rest.repeat[0].tolist()
            assert [*zip(index, repeat, strict=True)] == expected
            assert [other.store[0][slot] for slot in rest.slots[0].tolist()] == index
        for step, batch in [*zip(steps, driver.drawn, strict=False)][at : at + ahead]:
            assert other.take(*step) == batch
