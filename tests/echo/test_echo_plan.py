"""The plan, run without a store: who lies in which slot, and for how long."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from echo_cases import FACTORS, ORDERS, spec_of, specs
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.plans.fixed import Plan

TAKES = st.lists(st.integers(1, 20), min_size=1, max_size=20)


class Driver:
    """Runs a plan over ``total`` items, and checks every step of it."""

    def __init__(self, spec, total):
        self.plan = Plan(spec)
        self.spec, self.total = spec, total
        self.uses = spec.schedule.uses(0, total, 0)[0].tolist()
        self.used = Counter()
        self.written = 0
        self.slots = {}  # slot -> the item in it that has uses left
        self.emitted = []

    def take(self, n):
        """Takes ``n`` uses, or what there is; returns how many it was."""
        wanted = self.plan.fresh_wanted(n)
        if self.plan.fresh + wanted > self.total:
            self.plan.end_at(self.total)
        before = len(self.emitted)
        for step in self.plan.take(n):
            self.follow(step)
        # What was wanted is what was written, at most to the end.
        assert self.written == self.plan.fresh <= self.total
        assert len(self.emitted) - before <= n
        assert len(self.slots) <= self.spec.buffer
        assert self.plan.counts == ej.Counts(
            self.written, len(self.emitted), sum(r > 0 for _, r in self.emitted)
        )
        return len(self.emitted) - before

    def take_all(self, n):
        while self.take(n):
            pass

    def follow(self, step):
        for slot in step.write_slots.tolist():
            assert 0 <= slot < self.plan.num_slots
            assert slot not in self.slots, "the item in it has uses left"
            self.slots[slot] = self.written
            self.written += 1
        columns = (step.read_slots, step.index, step.repeat, step.last)
        uses = zip(*(column.tolist() for column in columns), strict=True)
        for slot, index, repeat, last in uses:
            assert self.slots[slot] == index
            assert repeat == self.used[index]
            self.used[index] += 1
            assert last == (self.used[index] == self.uses[index])
            self.emitted.append((index, repeat))
        for slot in step.read_slots[step.last].tolist():
            del self.slots[slot]

    def restored(self, pending=0):
        """A driver of a new plan that continues from this one's state."""
        state = json.loads(json.dumps(self.plan.get_state(pending)))
        other = Driver(self.spec, self.total)
        items, slots = other.plan.set_state(state)
        assert sorted(set(slots.tolist())) == list(range(items.size))
        assert items.tolist() == sorted(self.slots.values())
        assert other.plan.anchor <= min(items.tolist(), default=self.written)
        other.slots = dict(zip(slots.tolist(), items.tolist(), strict=True))
        other.used, other.written = Counter(self.used), self.written
        other.emitted = list(self.emitted)
        assert other.plan.get_state() == state
        return other


@settings(max_examples=100, deadline=None)
@given(specs(), st.integers(0, 90), TAKES)
def test_every_item_is_used_as_scheduled_and_slots_never_collide(spec, total, takes):
    driver = Driver(spec, total)
    for n in takes:
        driver.take(n)
    driver.take_all(spec.batch_size)
    assert not driver.slots
    assert [driver.used[k] for k in range(total)] == driver.uses
    assert driver.written == total


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(0, 90), TAKES)
def test_the_cut_into_takes_changes_nothing(spec, total, takes):
    whole, cut = Driver(spec, total), Driver(spec, total)
    whole.take_all(spec.batch_size)
    for n in takes:
        cut.take(n)
    cut.take_all(1)
    assert cut.emitted == whole.emitted


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(0, 90), TAKES)
def test_a_plan_restored_anywhere_goes_on_alike(spec, total, takes):
    driver = Driver(spec, total)
    for n in takes:
        driver.take(n)
    other = driver.restored()
    for n in [3, spec.batch_size]:
        assert driver.take(n) == other.take(n)
        assert other.plan.get_state() == driver.plan.get_state()
    other = other.restored()
    driver.take_all(spec.batch_size)
    other.take_all(7)
    assert other.emitted == driver.emitted


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(1, 60), st.data())
def test_a_run_takes_no_item_before_its_use(spec, total, data):
    """`take_run`, and the state between the uses of a run."""
    plan, emitted = Plan(spec), []
    while True:
        if plan.fresh + plan.fresh_wanted(1) > total:
            plan.end_at(total)
        before = plan.fresh
        run = plan.take_run()
        if run is None:
            break
        # The first use of the run wants what is read; no other wants more.
        if before < total and run.index[0] >= before:
            assert plan.fresh == run.index[0] + 1
        assert run.index.max() < plan.fresh
        emitted += zip(run.index.tolist(), run.repeat.tolist(), strict=True)
        if run.index.size > 1 and data.draw(st.booleans()):
            pending = data.draw(st.integers(1, run.index.size - 1))
            other = Plan(spec)
            state = plan.get_state(pending)
            other.set_state(state)
            assert state["uses"] == len(emitted) - pending
            assert state["repeats"] == sum(r > 0 for _, r in emitted[:-pending])
            rest = [
                (int(k), int(r))
                for step in other.take(pending)
                for k, r in zip(step.index, step.repeat, strict=True)
            ]
            assert rest == emitted[-pending:]
    driver = Driver(spec, total)
    driver.take_all(5)
    assert emitted == driver.emitted


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_long_plan_needs_no_more_slots_than_stated(order, factor):
    spec = spec_of(order, factor)
    plan = Plan(spec)
    extra = {
        "consecutive": spec.batch_size + 1,
        "shuffle": 1,
        "shuffle_buffer": spec.batch_size + 1,
        "spread": 0,
    }[order]
    assert plan.num_slots <= spec.buffer + extra or factor == "1"
    for _ in range(500):
        plan.fresh_wanted(spec.batch_size)
        steps = plan.take(spec.batch_size)
        assert sum(step.index.size for step in steps) == spec.batch_size
        assert max(step.read_slots.max() for step in steps) < plan.num_slots


@pytest.mark.parametrize("factor", [2, 2.5, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_is_nearly_always_one_step(order, factor):
    """More steps mean copies of parts of a batch, which are joined afterwards."""
    spec = ej.EchoSpec(factor, 1024, order, batch_size=64)
    plan = Plan(spec)
    for _ in range(500):
        plan.take(64)
    num_steps = sum(len(plan.take(64)) for _ in range(500))
    assert num_steps <= 1.05 * 500


def test_a_plan_by_hand():
    plan = Plan(ej.EchoSpec("3/2", batch_size=4))
    assert plan.fresh_wanted(1) == 1
    assert plan.fresh_wanted(4) == 3
    (step,) = plan.take(4)
    assert step.index.tolist() == [0, 1, 1, 2]
    assert step.repeat.tolist() == [0, 0, 1, 0]
    assert step.last.tolist() == [True, False, True, True]
    assert step.read_slots.tolist() == step.write_slots[[0, 1, 1, 2]].tolist()
    assert plan.counts == ej.Counts(fresh=3, uses=4, repeats=1)
    # Item 3 has two uses, and there is no item 4.
    assert plan.fresh_wanted(4) == 3
    plan.end_at(4)
    assert plan.fresh_wanted(4) == 1
    (step,) = plan.take(4)
    assert step.index.tolist() == [3, 3]
    assert plan.take(4) == []
    assert plan.take_run() is None


def test_an_empty_stream_has_no_uses():
    for order in ORDERS:
        plan = Plan(spec_of(order, "2"))
        assert plan.fresh_wanted(4) > 0
        plan.end_at(0)
        assert plan.fresh_wanted(4) == 0
        assert plan.take(4) == []


@pytest.mark.parametrize("order", ORDERS)
def test_the_state_is_integers_under_the_same_keys(order):
    plan = Plan(spec_of(order, "1.5"))
    keys = set(plan.get_state())
    for _ in itertools.repeat(None, 60):
        plan.fresh_wanted(3)
        plan.take(3)
        state = plan.get_state()
        assert set(state) == keys
        assert {type(value) for value in state.values()} == {int}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"next_item": 3},
        dict.fromkeys(Plan(ej.EchoSpec()).get_state(), 1.0),
        dict.fromkeys(Plan(ej.EchoSpec()).get_state(), np.int64(0)),
        Plan(ej.EchoSpec()).get_state() | {"more": 1},
    ],
)
def test_what_is_no_state_of_a_plan_is_refused(state):
    with pytest.raises(ValueError) as caught:
        Plan(ej.EchoSpec()).set_state(state)
    assert repr(state) in str(caught.value)
    assert "give what get_state returned" in str(caught.value)


@pytest.mark.parametrize("order", ["shuffle", "shuffle_buffer", "spread"])
def test_the_seed_names_the_order(order):
    def first_items(seed):
        plan = Plan(spec_of(order, "2", seed))
        plan.fresh_wanted(200)
        return [k for step in plan.take(200) for k in step.index.tolist()]

    assert first_items(1) == first_items(1)
    assert len({tuple(first_items(seed)) for seed in range(20)}) == 20


def test_a_buffer_beyond_what_a_shuffle_can_time_is_refused_with_the_largest():
    with pytest.raises(ValueError, match="at most 16777215") as caught:
        Plan(ej.EchoSpec(2, 1 << 26, "shuffle"))
    assert "buffer=67108864" in str(caught.value)
    rounds_of(ej.EchoSpec(2, 16777215, "shuffle"))


def test_the_integers_of_the_largest_shuffle_hold_all_of_a_use():
    """Its rounds are too large for a test; the uses of its last items are not."""
    order = rounds_of(ej.EchoSpec("3/2", 16777215, "shuffle"))
    first = 5 * order.delay
    start, count = first + order.delay - 10, 10
    uses, _ = order._uses(start, count, first, 0)
    num_uses, _ = order.schedule.uses(start, count, 0)
    assert (uses > 0).all()
    assert (uses & 1).sum() == count
    repeats = (uses >> 1) & 1
    items = (uses >> 2) % (1 << (2 * order.delay).bit_length()) + first - order.delay
    got = sorted(zip(items.tolist(), repeats.tolist(), strict=True))
    expected = [(start + k, r) for k in range(count) for r in range(num_uses[k])]
    assert got == expected
