"""The plan, run without a store: who lies in which slot, and for how long."""

import itertools
import json
import re
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from echo_cases import FACTORS, ORDERS, spec_of, specs, take
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.orders.consecutive import Consecutive
from echo_jax.echo.plans.base import BatchIndices, Need
from echo_jax.echo.plans.fixed import FixedPlan

STATE = FixedPlan(ej.EchoSpec()).get_state()
# How many items are welcome before they are needed.
ROOMS = st.sampled_from([0, 1, 7])
TAKES = st.lists(st.integers(1, 20), min_size=1, max_size=20)


def tags_of(batch):
    """Pairs of fresh index and repeat."""
    pairs = zip(batch.fresh_index[0], batch.repeat[0], strict=True)
    return [(int(index), int(repeat)) for index, repeat in pairs]


class Driver:
    """Runs a plan over ``total`` items, and checks every step of it."""

    def __init__(self, spec, total, room=0):
        self.plan = FixedPlan(spec, room=room, welcome=room)
        self.spec, self.total, self.room = spec, total, room
        self.uses = spec.schedule.uses(0, total, 0)[0].tolist()
        self.used = Counter()
        self.written = 0
        self.slots = {}  # slot -> the item in it that has uses left
        self.emitted = []

    def take(self, n):
        """Takes ``n`` uses, or what there is; returns how many it was."""
        before = len(self.emitted)
        left = n
        while left:
            self.fill(left)
            batch = self.plan.next(left)
            if batch is None:
                break
            self.follow(batch)
            left -= batch.repeat.shape[1]
        # What was wanted is what was written, at most to the end.
        fresh = self.plan.counts().fresh
        assert fresh <= self.written <= min(fresh + self.room, self.total)
        assert len(self.emitted) - before <= n
        assert len(self.slots) <= self.spec.buffer + self.room
        assert self.plan.counts() == ej.Counts(
            1 + max((index for index, _ in self.emitted), default=-1),
            len(self.emitted),
            sum(r > 0 for _, r in self.emitted),
        )
        return len(self.emitted) - before

    def take_all(self, n):
        while self.take(n):
            pass

    def fill(self, n):
        """Writes what the next uses need, as far as there are free slots."""
        need = self.plan.need(n)
        if self.written + need.must > self.total:
            self.plan.end(self.total - self.written)
            need = self.plan.need(n)
        assert need.may == (self.room if need.must else 0)
        wanted = min(need.must + need.may, self.total - self.written)
        while wanted:
            slots = self.plan.write(wanted)
            assert slots.dtype == np.int32 and slots.shape[0] == 1
            if not slots.size:
                break
            wanted -= slots.size
            for slot in slots[0].tolist():
                assert 0 <= slot < self.plan.num_slots
                assert slot not in self.slots, "the item in it has uses left"
                self.slots[slot] = self.written
                self.written += 1

    def take_some(self, n, most):
        """Has ``n`` uses decided before their items are there, and takes a few."""
        slots = self.plan.write(self.plan.need(n).must)[0].tolist()
        found = self.plan.next(n)
        index = np.zeros(0, int) if found is None else found.fresh_index[0]
        newest = np.maximum.accumulate(index)
        uses = min(most, int(newest.searchsorted(self.total)))
        came = max(0, int(newest[uses - 1]) + 1 - self.written) if uses else 0
        for slot in slots[:came]:
            assert slot not in self.slots, "the item in it has uses left"
            self.slots[slot] = self.written
            self.written += 1
        if uses:
            columns = (found.slots, found.fresh_index, found.repeat, found.last)
            self.follow(BatchIndices(*(column[:, :uses] for column in columns)))
        self.plan.take_back(len(slots) - came, index.size - uses)

    def follow(self, batch):
        columns = (batch.slots, batch.fresh_index, batch.repeat, batch.last)
        assert [column.dtype for column in columns] == [
            np.int32,
            np.int64,
            np.int32,
            bool,
        ]
        for slot, index, repeat, last in zip(
            *(column[0].tolist() for column in columns), strict=True
        ):
            assert self.slots[slot] == index
            assert repeat == self.used[index]
            self.used[index] += 1
            assert last == (self.used[index] == self.uses[index])
            self.emitted.append((index, repeat))
        for slot in batch.slots[batch.last].tolist():
            del self.slots[slot]

    def restored(self):
        """A driver of a new plan that continues from this one's state."""
        state = json.loads(json.dumps(self.plan.get_state()))
        other = Driver(self.spec, self.total, self.room)
        other.plan.check_state(state)
        restored = other.plan.set_state(state)
        assert restored.first == other.plan.anchor() == self.plan.anchor()
        # What was written and not used is read as if it never had been.
        fresh = self.plan.counts().fresh
        assert restored.first + restored.slots.shape[1] == fresh
        assert not restored.pending
        kept = restored.slots[0] < other.plan.num_slots
        items = restored.first + np.flatnonzero(kept)
        slots = restored.slots[0, kept]
        assert sorted(set(slots.tolist())) == list(range(items.size))
        assert items.tolist() == sorted(i for i in self.slots.values() if i < fresh)
        other.slots = dict(zip(slots.tolist(), items.tolist(), strict=True))
        other.used, other.written = Counter(self.used), fresh
        other.emitted = list(self.emitted)
        assert other.plan.get_state() == state
        return other


@settings(max_examples=100)
@given(specs(), st.integers(0, 90), TAKES, ROOMS)
def test_every_item_is_used_as_scheduled_and_slots_never_collide(
    spec, total, takes, room
):
    driver = Driver(spec, total, room)
    for n in takes:
        driver.take(n)
    driver.take_all(spec.batch_size)
    assert not driver.slots
    assert [driver.used[k] for k in range(total)] == driver.uses
    assert driver.written == total


@settings(max_examples=50)
@given(specs(), st.integers(0, 90), TAKES, ROOMS)
def test_neither_the_cut_into_takes_nor_room_changes_anything(spec, total, takes, room):
    whole, cut = Driver(spec, total), Driver(spec, total, room)
    whole.take_all(spec.batch_size)
    for n in takes:
        cut.take(n)
    cut.take_all(1)
    assert cut.emitted == whole.emitted


@settings(max_examples=50)
@given(specs(), st.integers(0, 90), TAKES, ROOMS)
def test_a_plan_restored_anywhere_goes_on_alike(spec, total, takes, room):
    driver = Driver(spec, total, room)
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


@settings(max_examples=50)
@given(specs(), st.integers(0, 90), TAKES, ROOMS, st.integers(0, 99))
def test_what_was_decided_for_rows_that_did_not_come_is_forgotten(
    spec, total, takes, room, most
):
    whole, driver = Driver(spec, total), Driver(spec, total, room)
    whole.take_all(spec.batch_size)
    for n in takes:
        driver.take_some(3 * n, most)
        driver.take(n)
    driver.take_all(spec.batch_size)
    assert driver.emitted == whole.emitted


@settings(max_examples=50)
@given(specs(), st.integers(1, 60), st.data())
def test_a_run_takes_no_item_before_its_use(spec, total, data):
    """`run`, and the state between the uses of a run."""
    plan, emitted, written = FixedPlan(spec), [], 0
    assert plan.unit == 1
    while True:
        if written + plan.need(1).must > total:
            plan.end(total - written)
        before = plan.counts().fresh
        written += plan.write(plan.need(1).must).size
        run = plan.run()
        if not run:
            break
        _, index, repeat, _ = map(np.array, zip(*run, strict=True))
        fresh = plan.counts().fresh
        # The first use of the run wants what is read; no other wants more.
        if before < total and index[0] >= before:
            assert fresh == index[0] + 1
        assert index.max() < fresh == written
        emitted += zip(index.tolist(), repeat.tolist(), strict=True)
        if index.size > 1 and data.draw(st.booleans()):
            pending = data.draw(st.integers(1, index.size - 1))
            other = FixedPlan(spec)
            state = plan.get_state(pending)
            other.check_state(state)
            assert other.set_state(state).first == plan.anchor()
            assert state["uses"] == len(emitted) - pending
            assert state["repeats"] == sum(r > 0 for _, r in emitted[:-pending])
            assert other.need(pending).must == 0
            rest = other.next(pending)
            assert tags_of(rest) == emitted[-pending:]
    driver = Driver(spec, total)
    driver.take_all(5)
    assert emitted == driver.emitted


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("order", ORDERS)
def test_a_long_plan_needs_no_more_slots_than_stated(order, factor):
    spec = spec_of(order, factor)
    plan = FixedPlan(spec)
    extra = {
        "consecutive": spec.batch_size + 1,
        "shuffle": 1,
        "shuffle_buffer": spec.batch_size + 1,
        "spread": 0,
    }[order]
    assert plan.num_slots <= spec.buffer + extra or factor == "1"
    for _ in range(500):
        parts = take(plan, spec.batch_size)
        assert sum(part.repeat.size for part in parts) == spec.batch_size
        assert max(part.slots.max() for part in parts) < plan.num_slots


@pytest.mark.parametrize("factor", [2, 2.5, 4])
@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_is_nearly_always_one_part(order, factor):
    """More parts mean copies of parts of a batch, which are joined afterwards."""
    spec = ej.EchoSpec(factor, 1024, order, batch_size=64)
    plan = FixedPlan(spec)
    for _ in range(500):
        take(plan, 64)
    num_parts = sum(len(take(plan, 64)) for _ in range(500))
    assert num_parts <= 1.05 * 500


def test_a_plan_by_hand():
    plan = FixedPlan(ej.EchoSpec("3/2", batch_size=4))
    assert plan.need(1) == Need(must=1)
    assert plan.need(4) == Need(must=3)
    written = plan.write(3)
    assert plan.need(4) == Need()
    batch = plan.next(4)
    assert batch.fresh_index.tolist() == [[0, 1, 1, 2]]
    assert batch.repeat.tolist() == [[0, 0, 1, 0]]
    assert batch.last.tolist() == [[True, False, True, True]]
    assert batch.slots.tolist() == written[:, [0, 1, 1, 2]].tolist()
    assert plan.counts() == ej.Counts(fresh=3, uses=4, repeats=1)
    # Item 3 has two uses, and there is no item 4.
    assert plan.need(4) == Need(must=3)
    plan.end(1)
    assert plan.need(4) == Need(must=1)
    plan.write(1)
    assert plan.next(4).fresh_index.tolist() == [[3, 3]]
    assert plan.next(4) is None
    assert plan.run() == []


@pytest.mark.parametrize("factor", [10**5, {0: 10**5, 9: 1}, 10**6])
def test_the_uses_of_an_item_without_end_are_made_piece_by_piece(factor):
    """A hundred items of 10^5 uses took 2.4 GB before the first use."""
    spec = ej.EchoSpec(factor, 1, "consecutive", batch_size=32)
    tracemalloc.start()
    try:
        plan = FixedPlan(spec)
        plan.write(plan.need(32).must)
        first = tags_of(plan.next(32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert first == [(0, repeat) for repeat in range(32)]
    assert peak < 60 * max(spec.schedule.uses(0, 1, 0)[0][0], 65_536)


def test_consecutive_pieces_are_cut_between_items():
    factor = ej.FactorByItem(lambda k: (1, 30_000, 5.5, 70_000)[k % 4], 10**5)
    schedule = ej.EchoSpec(factor, 1, "consecutive").schedule
    rounds = Consecutive(schedule, batch_size=4)
    pieces = list(itertools.islice(rounds.pieces(0, 0, 0), 12))
    assert max(piece.index.size for piece in pieces) == 70_000
    found = np.concatenate([piece.index for piece in pieces])
    uses, _ = schedule.uses(0, int(found[-1]) + 1, 0)
    assert np.array_equal(found, np.repeat(np.arange(uses.size), uses))
    last = np.concatenate([piece.last for piece in pieces])
    assert np.array_equal(np.flatnonzero(last), np.cumsum(uses) - 1)
    for piece in pieces:
        again = next(rounds.pieces(piece.round, piece.anchor, piece.carry))
        assert np.array_equal(again.index, piece.index)


def test_an_empty_stream_has_no_uses():
    for order in ORDERS:
        plan = FixedPlan(spec_of(order, "2"))
        assert plan.need(4).must > 0
        plan.end(0)
        assert plan.need(4) == Need()
        assert plan.next(4) is None


@pytest.mark.parametrize("order", ORDERS)
def test_the_state_is_integers_under_the_same_keys(order):
    plan = FixedPlan(spec_of(order, "1.5"))
    keys = set(plan.get_state())
    for _ in range(60):
        take(plan, 3)
        state = plan.get_state()
        assert set(state) == keys
        assert {type(value) for value in state.values()} == {int}
        assert json.loads(json.dumps(state)) == state


@pytest.mark.parametrize(
    ("state", "named"),
    [
        (None, "None is not the state of an echo plan"),
        ([3], "[3] is not the state of an echo plan"),
        ({}, "[] is not the state of an echo plan"),
        ({"next_item": 3}, "['next_item'] is not the state of an echo plan"),
        (dict.fromkeys(STATE, 1.0), "anchor=1.0, which must be an integer"),
        (dict.fromkeys(STATE, True), "anchor=True, which must be an integer"),
        (dict.fromkeys(STATE, np.int64(0)), "anchor=np.int64(0), which must be an"),
        (dict.fromkeys(STATE, -2), "anchor=-2, which must be an integer of at least"),
        (STATE | {"more": 1}, "'more'"),
    ],
)
def test_what_is_no_state_of_a_plan_is_refused(state, named):
    with pytest.raises(ValueError, match=re.escape(named)) as caught:
        FixedPlan(ej.EchoSpec()).check_state(state)
    fixes = ("give what get_state returned", "it is damaged")
    assert any(fix in str(caught.value) for fix in fixes)


@pytest.mark.parametrize("order", ORDERS)
def test_a_damaged_state_is_refused_and_changes_nothing(order):
    spec = spec_of(order, "7.3")
    plan, untouched = FixedPlan(spec), FixedPlan(spec)
    take(plan, 30)
    take(untouched, 30)
    state = plan.get_state()
    plan.check_state(state)
    damages = [{key: value} for key in state for value in (-2, 1 << 60, "1", None)]
    damages += [
        {"anchor": state["fresh"] + 1},
        {"anchor": state["anchor"] + 1},
        {"fresh": state["anchor"] - 1},
        {"carry": spec.schedule.denominator * (rounds_of(spec).max_departed + 1)},
        {"end": state["fresh"] - 1},
        {"position": state["uses"] + 1},
        {"repeats": state["uses"] + 1},
        {"round": -1},
        {"spec": state["spec"] + 1},
        {"uses": state["repeats"] - 1},
    ]
    harmless = [{"end": 1 << 60}, {"uses": 1 << 60}]  # An upstream may be as long.
    for damage in damages:
        if damage in harmless:
            continue
        with pytest.raises(ValueError, match=r"damaged|another spec"):
            plan.check_state(state | damage)
        assert plan.get_state() == state
    missing = [{k: v for k, v in state.items() if k != key} for key in state]
    for damaged in missing:
        with pytest.raises(ValueError, match="give what get_state returned"):
            plan.check_state(damaged)
    [expected], [found] = take(untouched, 4), take(plan, 4)
    assert tags_of(found) == tags_of(expected)


@pytest.mark.parametrize(
    "other",
    [
        FixedPlan(ej.EchoSpec(3, 8, "shuffle", 2)),
        FixedPlan(ej.EchoSpec(2, 9, "shuffle", 2)),
        FixedPlan(ej.EchoSpec(2, 8, "spread", 2)),
        FixedPlan(ej.EchoSpec(2, 8, "shuffle", 4)),
        FixedPlan(ej.EchoSpec(2, 8, "shuffle", 2, seed=1)),
        FixedPlan(ej.EchoSpec(2, 8, "shuffle", 2), options=("batch",)),
    ],
)
def test_a_state_of_another_spec_or_of_other_options_is_refused(other):
    plan = FixedPlan(ej.EchoSpec(2, 8, "shuffle", 2))
    with pytest.raises(ValueError, match="restore it with what it was saved with"):
        plan.check_state(other.get_state())


@pytest.mark.parametrize("order", ["shuffle", "shuffle_buffer", "spread"])
def test_the_seed_names_the_order(order):
    def first_items(seed):
        parts = take(FixedPlan(spec_of(order, "2", seed)), 200)
        return [k for part in parts for k in part.fresh_index[0].tolist()]

    assert first_items(1) == first_items(1)
    assert len({tuple(first_items(seed)) for seed in range(20)}) == 20


def test_a_buffer_beyond_what_a_shuffle_can_time_is_refused_with_the_largest():
    with pytest.raises(ValueError, match="at most 16777215") as caught:
        FixedPlan(ej.EchoSpec(2, 1 << 26, "shuffle"))
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
