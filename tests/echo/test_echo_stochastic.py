"""Stochastic plans: loads as scheduled, reuse from the last items, exact restores."""

import copy
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo.counts import Counts
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.plans.stochastic import StochasticPlan
from echo_jax.echo.spec import StochasticSpec

HALF = LoadSchedule("p", "constant", 0.5, 0.5)


def make(args, **options):
    """A plan of arguments as `arguments` draws them."""
    args = dict(args)
    lanes = Lanes(args.pop("host_batch"), args.pop("num_lanes", 1))
    return StochasticPlan(StochasticSpec(**args), lanes=lanes, **options)


class Driver:
    """Drives a plan as a feed does, keeps the store, and checks every batch."""

    def __init__(self, plan, *, buffer, batch_size, num_lanes=1, **_):
        self.plan = plan
        self.lanes = num_lanes
        self.batch = batch_size // num_lanes
        assert plan.batch == plan.unit == self.batch
        self.memory = buffer // num_lanes
        self.store = [{} for _ in range(num_lanes)]  # slot -> fresh index
        self.uses = {}
        self.rows = self.loaded = 0  # rows of a lane
        self.total = None  # rows that the upstream has

    def put(self, first, slots):
        for lane in range(self.lanes):
            for row, slot in enumerate(slots[lane].tolist(), first):
                number, place = divmod(row, self.batch)
                if slot < self.plan.num_slots:
                    index = (number * self.lanes + lane) * self.batch + place
                    self.store[lane][slot] = index

    def step(self, group=1):
        uses = group * self.batch
        need = self.plan.need(uses)
        assert need.may == 0
        if self.total is not None and self.rows + need.must > self.total:
            self.plan.end(self.total - self.rows)
            need = self.plan.need(uses)
            assert need.must == self.total - self.rows
        slots = self.plan.write(need.must)
        assert slots.dtype == np.int32 and slots.shape == (self.lanes, need.must)
        self.put(self.rows, slots)
        self.rows += need.must
        assert self.plan.need(uses) == Need()
        return [self.draw() for _ in range(group)]

    def draw(self):
        batch = self.plan.next(self.batch)
        if batch is None:
            return None
        assert batch.slots.dtype == batch.repeat.dtype == np.int32
        assert batch.fresh_index.dtype == np.int64
        assert batch.last is None
        index = batch.fresh_index.tolist()
        size = min(self.batch, self.loaded)
        if not batch.repeat.any():
            size = min(self.batch, self.rows - self.loaded)
            items = np.arange(self.loaded, self.loaded + size)
            number, place = np.divmod(items, self.batch)
            lane = np.arange(self.lanes)[:, None]
            assert index == ((number * self.lanes + lane) * self.batch + place).tolist()
            self.loaded += size
        for lane in range(self.lanes):
            row = index[lane]
            assert len(set(row)) == size, "an item twice in a batch"
            slots = batch.slots[lane].tolist()
            assert [self.store[lane][slot] for slot in slots] == row
            assert [self.uses.get(i, 0) for i in row] == batch.repeat[lane].tolist()
            number, place = np.divmod(row, self.batch)
            item = number // self.lanes * self.batch + place
            assert item.min() >= self.loaded - self.memory
            for i in row:
                self.uses[i] = self.uses.get(i, 0) + 1
        return [index, batch.repeat.tolist()]


@st.composite
def arguments(draw):
    lanes, batch = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    memory = batch + draw(st.integers(0, 25))
    p = draw(st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]))
    size = lanes * batch
    return {
        "load": LoadSchedule("p", "linear", p, draw(st.sampled_from([0.2, 1.0])), 20),
        "buffer": lanes * memory,
        "batch_size": size,
        "host_batch": size,
        "num_lanes": lanes,
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=100)
@given(arguments(), st.integers(1, 4))
def test_batches_are_right_whatever_the_grouping(args, group):
    """`Driver` checks slots, tags, memory and twins; groups change nothing."""
    one = Driver(make(args), **args)
    drawn = [one.step()[0] for _ in range(60)]
    assert drawn[0][1] == np.zeros_like(drawn[0][1]).tolist(), "the first one loads"
    grouped = Driver(make(args, max_batches=group), **args)
    found = [batch for _ in range(60 // group) for batch in grouped.step(group)]
    assert found == drawn[: len(found)]
    counts = one.plan.counts()
    assert counts.fresh == one.rows * one.lanes
    assert counts.uses == 60 * args["batch_size"]
    assert counts.repeats == counts.uses - one.loaded * one.lanes


@settings(max_examples=60)
@given(arguments(), st.integers(1, 3), st.integers(0, 70), st.integers(0, 4))
def test_a_restore_at_every_batch_goes_on_the_same(args, group, total, pending):
    """Also with uses of the latest batch that were not handed out, and at the end."""
    driver = Driver(make(args, max_batches=group), **args)
    driver.total = total
    states, drawn = [], []
    for _ in range(40 // group):
        held = 0
        if drawn and drawn[-1][-1] is not None:
            held = min(pending, len(drawn[-1][-1][0][0]) - 1)
        before = driver.loaded, driver.plan.counts(), copy.deepcopy(driver.store), held
        states.append((*before, json.dumps(driver.plan.get_state(held))))
        drawn.append(driver.step(group))
        if None in drawn[-1]:
            break
    for at, (loaded, counts, store, held, state) in enumerate(states):
        restored = Driver(make(args, max_batches=group), **args)
        restored.plan.check_state(json.loads(state))
        assert restored.plan.counts() == Counts()
        found = restored.plan.set_state(json.loads(state))
        assert found.first == restored.plan.anchor()
        assert found.first % restored.batch == 0
        restored.put(found.first, found.slots)
        assert restored.store == store
        assert restored.plan.counts() == counts
        if held:
            # Uses are handed out one by one where there is one lane.
            index, repeat = (part[0][-held:] for part in drawn[at - 1][-1])
            slots, *found_tags, _ = zip(*found.pending, strict=True)
            assert [*map(list, found_tags)] == [index, repeat]
            assert [store[0][slot] for slot in slots] == index
        else:
            assert not found.pending
        restored.rows, restored.loaded = found.first + found.slots.shape[1], loaded
        restored.total = total
        for batches in drawn[:at]:
            for index, _ in batches:
                for i in np.ravel(index).tolist():
                    restored.uses[i] = restored.uses.get(i, 0) + 1
        for expected in drawn[at : at + 6]:
            assert restored.step(group) == expected


@settings(max_examples=60)
@given(arguments(), st.integers(0, 30))
def test_every_item_that_came_is_loaded_once(args, total):
    driver = Driver(make(args), **args)
    driver.total = total
    while (batch := driver.step()[0]) is not None and driver.plan.counts().uses < 5000:
        assert len(batch[0][0]) <= driver.batch
    if batch is None:
        assert driver.rows == driver.loaded == total
        assert driver.plan.next(driver.batch) is None
    counts = driver.plan.counts()
    assert counts.uses == sum(driver.uses.values())
    assert counts.repeats == counts.uses - driver.loaded * driver.lanes


@pytest.mark.parametrize(
    "load",
    [
        LoadSchedule("p", "constant", 0.3, 0.3),
        LoadSchedule("e", "linear", 1.0, 6.0, 9000),
        LoadSchedule("p", "cosine", 1.0, 0.1, 8000),
        LoadSchedule("e", "multistep", 1.0, 8.0, 9000, (2000, 4000, 6000)),
    ],
)
def test_loads_are_as_many_as_expected_and_the_same_on_all_lanes(load):
    def loads(lanes, num_draws):
        plan = StochasticPlan(StochasticSpec(load, 8, 4), lanes=Lanes(4, lanes))
        found = []
        for _ in range(num_draws):
            need = plan.need(plan.batch)
            found.append(need.must > 0)
            plan.write(need.must)
            plan.next(plan.batch)
        return found

    found = loads(1, 10_000)
    assert loads(4, 3000) == found[:3000]
    p = load.probability(np.arange(10_000))
    p[0] = 1.0
    assert abs(sum(found) - p.sum()) <= 6 * np.sqrt((p * (1 - p)).sum())


def test_reuse_takes_all_of_the_last_items_equally_often():
    """20 items, 5 of which a draw takes: each is in a quarter of the draws."""
    always = LoadSchedule("p", "multistep", 1.0, 1e-9, 8, (4, 5, 6, 7))
    args = {"load": always, "buffer": 20, "batch_size": 5, "host_batch": 5}
    driver = Driver(make(args), **args)
    drawn = [driver.step()[0] for _ in range(2000)]
    last = np.array([index for index, _ in drawn[100:]]).reshape(-1, 5)
    uses = np.bincount(last.reshape(-1) - last.min())
    expected, n = len(last) / 4, len(last)
    assert uses.size == 20
    assert np.abs(uses - expected).max() <= 6 * np.sqrt(n * 0.25 * 0.75)
    # As often together as independent choices are: 5/20 * 4/19 of the draws.
    together = sum(1 for row in last - last.min() if {3, 11} <= set(row.tolist()))
    p = 5 / 20 * 4 / 19
    assert abs(together - n * p) <= 6 * np.sqrt(n * p * (1 - p))


def test_the_seed_names_loads_and_choices():
    def drawn(seed, load=HALF):
        args = {"buffer": 16, "batch_size": 4, "host_batch": 4}
        args |= {"load": load, "seed": seed}
        driver = Driver(make(args), **args)
        return [driver.step() for _ in range(40)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_stream_ends_with_the_next_load():
    plan = StochasticPlan(StochasticSpec(HALF, 8, 2, seed=1))
    expected = 0
    plan.write(2)
    plan.next(2)
    while plan.need(2) == Need():
        plan.next(2)
        expected += 1
    plan.end(0)
    assert plan.need(2) == Need()
    assert plan.next(2) is None
    restored = StochasticPlan(StochasticSpec(HALF, 8, 2, seed=1))
    restored.set_state(plan.get_state())
    assert restored.need(2) == Need(must=2)
    restored.end(0)
    assert restored.next(2) is None
    assert plan.counts().repeats == 2 * expected > 0


def test_a_last_load_may_be_smaller():
    """Always loaded: 4, 4 and the 3 that are left."""
    plan = StochasticPlan(StochasticSpec(buffer=4, batch_size=4))
    for expected in ([0, 1, 2, 3], [4, 5, 6, 7]):
        plan.write(plan.need(4).must)
        assert plan.next(4).fresh_index.tolist() == [expected]
    plan.end(3)
    assert plan.need(4) == Need(must=3)
    assert plan.write(3).tolist() == [[0, 1, 2]]
    assert plan.next(4).fresh_index.tolist() == [[8, 9, 10]]
    assert plan.next(4) is None
    assert plan.counts() == Counts(fresh=11, uses=11, repeats=0)


def test_schedules_by_hand():
    at = np.array([0, 1, 2, 3, 4, 5, 99])
    value = lambda *args: LoadSchedule(*args).value(at).tolist()  # noqa: E731
    assert value("p", "constant", 0.25, 0.25) == [0.25] * 7
    assert value("p", "linear", 1.0, 0.5, 4) == [1, 0.875, 0.75, 0.625, 0.5, 0.5, 0.5]
    root = 0.75 + 0.25 / np.sqrt(2)
    np.testing.assert_allclose(
        value("p", "cosine", 1.0, 0.5, 4),
        [1, root, 0.75, 1.5 - root, 0.5, 0.5, 0.5],
        rtol=1e-15,
    )
    halving = [1, 0.5, 0.5, 0.25, 0.125, 0.125, 0.125]
    assert value("p", "multistep", 1.0, 0.125, 4, (1, 3, 4)) == halving
    assert value("e", "multistep", 1.0, 4.0, 4) == [1, 1, 2, 4, 4, 4, 4]
    load = LoadSchedule("e", "linear", 1.0, 3.0, 2)
    third = round(2**32 / 3) / 2**32
    assert load.probability(np.arange(4)).tolist() == [1, 0.5, third, third]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": "q"}, "quantity='q' is unknown; use one of 'p', 'e'"),
        ({"schedule": "step"}, "schedule='step' is unknown"),
        ({"start": 0.0}, "start=0.0 must be a probability"),
        ({"end": 1.5}, "end=1.5 must be a probability"),
        ({"end": float("nan")}, "end=nan must be a probability"),
        ({"quantity": "e", "start": 0.5}, "start=0.5 must be an echo factor"),
        ({"quantity": "e", "end": float("inf")}, "end=inf must be an echo factor"),
        ({"start": True}, "start=True must be a number"),
        ({"updates": 0}, "got 0. Use updates=1."),
        ({"schedule": "constant"}, "constant schedule has end=0.5"),
        ({"milestones": (1,)}, "belong to schedule='multistep'"),
        ({"schedule": "multistep", "milestones": (2, 2)}, "must ascend"),
        ({"schedule": "multistep", "milestones": (0, 2)}, "got 0. Use 1."),
        ({"schedule": "multistep", "milestones": (2, 11)}, "at most updates=10"),
        ({"schedule": "multistep", "milestones": (2.0,)}, "got 2.0. Use 2."),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, message):
    good = {
        "quantity": "p",
        "schedule": "linear",
        "start": 1.0,
        "end": 0.5,
        "updates": 10,
    }
    LoadSchedule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        LoadSchedule(**good | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "not a multiple of num_lanes=3"),
        ({"host_batch": 8}, "host batches of 8 .* batch_size=4, .* make them equal"),
        ({"buffer": 3}, "buffer=3 holds less than a batch; use at least 4"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, message):
    good = {"load": HALF, "buffer": 8, "batch_size": 4, "host_batch": 4}
    make(good)
    with pytest.raises(ValueError, match=message):
        make(good | changes)
    with pytest.raises(ValueError, match="max_batches=0 must be at least 1"):
        make(good, max_batches=0)


SMALL = {"load": HALF, "buffer": 8, "batch_size": 2, "host_batch": 2}


def drawn_once():
    """A plan after its first batch."""
    plan = make(SMALL)
    plan.write(2)
    plan.next(2)
    return plan


def test_misuse_is_told():
    plan = make(SMALL)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before next()")):
        plan.next(2)
    plan.write(2)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before write()")):
        plan.write(2)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"more": 0}, "give what get_state returned"),
        ({"batches": "1"}, "batches='1', which must be an integer"),
        ({"batches": True}, "batches=True, which must be an integer"),
        ({"batches": -1, "fresh": 0}, "it is damaged"),
        ({"batches": 1 << 60}, "it is damaged"),
        ({"batches": 0, "fresh": 0, "repeats": 1}, "it is damaged"),
        ({"batches": 0, "fresh": 0, "pending": 1}, "it is damaged"),
        ({"fresh": 0}, "it is damaged"),
        ({"fresh": 9}, "it is damaged"),
        ({"fresh": 1 << 60}, "it is damaged"),
        ({"fresh": 2.0}, "fresh=2.0, which must be an integer"),
        ({"pending": 2}, "it is damaged"),
        ({"pending": -1}, "it is damaged"),
        ({"fresh": 1, "pending": 1}, "it is damaged"),
        ({"repeats": 1}, "it is damaged"),
        ({"repeats": -1}, "it is damaged"),
        ({"repeats": None}, "repeats=None, which must be an integer"),
        ({"plan": 0}, "saved with another spec"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage, message):
    plan = drawn_once()
    state = plan.get_state()
    assert json.loads(json.dumps(state)) == state
    make(SMALL).check_state(state)
    with pytest.raises(ValueError, match=message):
        plan.check_state(state | damage)
    assert plan.get_state() == state
    for key in state:
        with pytest.raises(ValueError, match="give what get_state returned"):
            plan.check_state({k: v for k, v in state.items() if k != key})


@pytest.mark.parametrize(
    "other",
    [
        make(SMALL | {"load": LoadSchedule("p", "constant", 0.25, 0.25)}),
        make(SMALL | {"buffer": 9}),
        make(SMALL | {"batch_size": 4, "host_batch": 4}),
        make(SMALL | {"num_lanes": 2}),
        make(SMALL | {"seed": 1}),
        make(SMALL, options=("batch",)),
    ],
)
def test_a_state_of_another_echo_is_refused(other):
    with pytest.raises(ValueError, match="restore it with what it was saved with"):
        other.check_state(drawn_once().get_state())
