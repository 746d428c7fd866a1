"""Stochastic draws: loads as scheduled, reuse from the last items, exact restores."""

import copy
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo.plans.draws import Need
from echo_jax.echo.plans.stochastic import LoadSchedule, StochasticDraws

HALF = LoadSchedule("p", "constant", 0.5, 0.5)


class Driver:
    """Drives draws as a feed does, keeps the store, and checks every draw."""

    def __init__(self, draws, *, buffer, batch_size, num_lanes=1, **_):
        self.draws = draws
        self.lanes = num_lanes
        self.batch = batch_size // num_lanes
        self.memory = buffer // num_lanes
        self.store = [{} for _ in range(num_lanes)]  # slot -> fresh index
        self.uses = {}
        self.chunks = self.loaded = 0

    def put(self, chunk, slots):
        for lane in range(self.lanes):
            for row, slot in enumerate(slots[lane].tolist()):
                if slot < self.draws.num_slots:
                    index = (chunk * self.lanes + lane) * self.batch + row
                    self.store[lane][slot] = index

    def step(self, group=1):
        while self.draws.need(group) is Need.MUST:
            self.put(self.chunks, self.draws.write())
            self.chunks += 1
        return [self.draw() for _ in range(group)]

    def draw(self):
        draw = self.draws.draw()
        if draw is None:
            return None
        assert draw.read_slots.dtype == draw.repeat.dtype == np.int32
        assert draw.fresh_index.dtype == np.int64
        index = draw.fresh_index.tolist()
        if not any(repeat for row in draw.repeat.tolist() for repeat in row):
            size = self.batch * self.lanes
            expected = np.arange(self.loaded * size, (self.loaded + 1) * size)
            assert index == expected.reshape(self.lanes, -1).tolist()
            self.loaded += 1
        for lane in range(self.lanes):
            row = index[lane]
            assert len(set(row)) == self.batch, "an item twice in a batch"
            slots = draw.read_slots[lane].tolist()
            assert [self.store[lane][slot] for slot in slots] == row
            assert [self.uses.get(i, 0) for i in row] == draw.repeat[lane].tolist()
            chunk, place = np.divmod(row, self.batch)
            item = chunk // self.lanes * self.batch + place
            assert item.min() >= self.loaded * self.batch - self.memory
            for i in row:
                self.uses[i] = self.uses.get(i, 0) + 1
        return [index, draw.repeat.tolist()]


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
        "chunk_items": size,
        "num_lanes": lanes,
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=100, deadline=None)
@given(arguments(), st.integers(1, 4))
def test_draws_are_right_whatever_the_grouping(args, group):
    """`Driver` checks slots, tags, memory and twins; groups change nothing."""
    one = Driver(StochasticDraws(**args), **args)
    drawn = [one.step()[0] for _ in range(60)]
    assert drawn[0][1] == np.zeros_like(drawn[0][1]).tolist(), "the first one loads"
    grouped = Driver(StochasticDraws(**args, max_draws=group), **args)
    found = [draw for _ in range(60 // group) for draw in grouped.step(group)]
    assert found == drawn[: len(found)]
    counts = one.draws.counts
    assert counts.fresh == one.chunks * args["batch_size"]
    assert counts.uses == 60 * args["batch_size"]
    assert counts.repeats == counts.uses - one.loaded * args["batch_size"]


@settings(max_examples=25, deadline=None)
@given(arguments(), st.integers(1, 3))
def test_a_restore_at_every_draw_goes_on_the_same(args, group):
    make = lambda: StochasticDraws(**args, max_draws=group)  # noqa: E731
    driver = Driver(make(), **args)
    states, drawn = [], []
    for _ in range(40 // group):
        before = driver.loaded, driver.draws.counts, copy.deepcopy(driver.store)
        states.append((*before, json.dumps(driver.draws.get_state())))
        drawn.append(driver.step(group))
    for at, (loaded, counts, store, state) in enumerate(states):
        restored = Driver(make(), **args)
        held = restored.draws.set_state(json.loads(state))
        first, last = restored.draws.first_chunk, restored.draws.num_chunks
        assert [chunk for chunk, _ in held] == list(range(first, last))
        for chunk, slots in held:
            restored.put(chunk, slots)
        assert restored.store == store
        assert restored.draws.counts == counts
        restored.chunks, restored.loaded = last, loaded
        for draws in drawn[:at]:
            for index, _ in draws:
                for i in np.ravel(index).tolist():
                    restored.uses[i] = restored.uses.get(i, 0) + 1
        for expected in drawn[at : at + 6]:
            assert restored.step(group) == expected


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
        draws = StochasticDraws(
            load=load, buffer=8, batch_size=4, chunk_items=4, num_lanes=lanes
        )
        found = []
        for _ in range(num_draws):
            found.append(draws.need() is Need.MUST)
            if found[-1]:
                draws.write()
            draws.draw()
        return found

    found = loads(1, 10_000)
    assert loads(4, 3000) == found[:3000]
    p = load.probability(np.arange(10_000))
    p[0] = 1.0
    assert abs(sum(found) - p.sum()) <= 6 * np.sqrt((p * (1 - p)).sum())


def test_reuse_takes_all_of_the_last_items_equally_often():
    """20 items, 5 of which a draw takes: each is in a quarter of the draws."""
    always = LoadSchedule("p", "multistep", 1.0, 1e-9, 8, (4, 5, 6, 7))
    args = {"buffer": 20, "batch_size": 5, "chunk_items": 5}
    driver = Driver(StochasticDraws(load=always, **args), **args)
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
        args = {"buffer": 16, "batch_size": 4, "chunk_items": 4}
        driver = Driver(StochasticDraws(load=load, seed=seed, **args), **args)
        return [driver.step() for _ in range(40)]

    assert drawn(0) == drawn(0) != drawn(1)


def test_a_stream_ends_with_the_next_load():
    draws = StochasticDraws(load=HALF, buffer=8, batch_size=2, chunk_items=2, seed=1)
    expected = 0
    draws.write()
    draws.draw()
    while draws.need() is Need.NO:
        draws.draw()
        expected += 1
    draws.end()
    assert draws.need() is Need.NO
    assert draws.draw() is None
    restored = StochasticDraws(load=HALF, buffer=8, batch_size=2, chunk_items=2, seed=1)
    restored.set_state(draws.get_state())
    assert restored.draw() is None
    assert draws.counts.repeats == 2 * expected > 0


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
        ({"of": "q"}, "of='q' is unknown; use one of 'p', 'e'"),
        ({"schedule": "step"}, "schedule='step' is unknown"),
        ({"start": 0.0}, "start=0.0 must be a probability"),
        ({"end": 1.5}, "end=1.5 must be a probability"),
        ({"end": float("nan")}, "end=nan must be a probability"),
        ({"of": "e", "start": 0.5}, "start=0.5 must be an echo factor"),
        ({"of": "e", "end": float("inf")}, "end=inf must be an echo factor"),
        ({"start": True}, "start=True must be a number"),
        ({"updates": 0}, "updates=0 must be an int of at least 1"),
        ({"schedule": "constant"}, "constant schedule has end=0.5"),
        ({"milestones": (1,)}, "belong to schedule='multistep'"),
        ({"schedule": "multistep", "milestones": (2, 2)}, "must ascend"),
        ({"schedule": "multistep", "milestones": (0, 2)}, "must ascend"),
        ({"schedule": "multistep", "milestones": (2, 11)}, "at most updates=10"),
        ({"schedule": "multistep", "milestones": (2.0,)}, "must be ints"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, message):
    good = {"of": "p", "schedule": "linear", "start": 1.0, "end": 0.5, "updates": 10}
    LoadSchedule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        LoadSchedule(**good | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "not a multiple of num_lanes=3"),
        ({"chunk_items": 8}, "chunk_items=8 must be batch_size=4"),
        ({"buffer": 3}, "buffer=3 holds less than a batch; use at least 4"),
        ({"max_draws": 0}, "max_draws=0 must be at least 1"),
    ],
)
def test_draws_that_cannot_be_are_refused(changes, message):
    good = {"load": HALF, "buffer": 8, "batch_size": 4, "chunk_items": 4}
    StochasticDraws(**good)
    with pytest.raises(ValueError, match=message):
        StochasticDraws(**good | changes)


def test_misuse_is_told():
    args = {"load": HALF, "buffer": 8, "batch_size": 2, "chunk_items": 2}
    draws = StochasticDraws(**args)
    with pytest.raises(RuntimeError, match=re.escape("ask need() before draw()")):
        draws.draw()
    draws.write()
    with pytest.raises(RuntimeError, match=re.escape("ask need() before write()")):
        draws.write()
    with pytest.raises(ValueError, match="at most max_draws=1"):
        draws.need(2)
    draws.draw()
    state = draws.get_state()
    with pytest.raises(ValueError, match="give what get_state returned"):
        StochasticDraws(**args).set_state(state | {"draws": "1"})
    with pytest.raises(ValueError, match="another load schedule"):
        StochasticDraws(**args, seed=1).set_state(state)
    with pytest.raises(ValueError, match="says 9 chunks"):
        StochasticDraws(**args).set_state(state | {"chunks": 9})
    with pytest.raises(ValueError, match="it is damaged"):
        StochasticDraws(**args).set_state(state | {"draws": -1, "chunks": 0})
