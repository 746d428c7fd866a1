"""Stochastic plans: loads as scheduled, reuse of the last items, exact restores."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver, batches_of

import echo_jax as ej
from echo_jax.echo.plans import StochasticPlan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.lanes import Lanes

HALF = ej.FetchSchedule("p", "constant", 0.5, 0.5)


def make(args, **options):
    """A plan of arguments as `arguments` draws them."""
    args = dict(args)
    lanes = Lanes(args.pop("host_batch"), args.pop("num_lanes", 1))
    return StochasticPlan(ej.StochasticSpec(**args), lanes=lanes, **options)


class StochasticDriver(Driver):
    """Checks what each batch may hold as well."""

    memory = loaded = 0

    def follow(self, batch):
        before = self.loaded
        lanes = super().follow(batch)
        rows, count = self.lanes.rows, self.lanes.count
        found = [[k // (rows * count) * rows + k % rows for k, _ in x] for x in lanes]
        if any(repeat for _, repeat in lanes[0]):
            assert min(map(min, found)) >= before - self.memory
            size = min(rows, before)
        else:
            self.loaded = min(before + rows, self.rows)
            assert found == [[*range(before, self.loaded)]] * count
            size = self.loaded - before
        assert {len(set(items)) for items in found} == {size}, "twice in a batch"
        return lanes


def driver_of(args, total=10**9, **options):
    lanes = Lanes(args["host_batch"], args.get("num_lanes", 1))
    driver = StochasticDriver(make(args, **options), lanes, total)
    driver.memory = args["buffer"] // lanes.count
    return driver


@st.composite
def arguments(draw):
    lanes, batch = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    p = draw(st.sampled_from([0.1, 0.3, 0.5, 0.9, 1.0]))
    size = lanes * batch
    end = draw(st.sampled_from([0.2, 1.0]))
    return {
        "fetch": ej.FetchSchedule("p", "linear", p, end, 20),
        "buffer": lanes * (batch + draw(st.integers(0, 25))),
        "batch_size": size,
        "host_batch": size,
        "num_lanes": lanes,
        "seed": draw(st.integers(0, 3)),
    }


@settings(max_examples=25)
@given(arguments(), st.integers(1, 4), st.integers(0, 70))
def test_batches_are_right_whatever_the_grouping(args, group, total):
    one, grouped = driver_of(args, total), driver_of(args, total, max_batches=group)
    for _ in range(60):
        one.take()
    for _ in range(60 // group):
        grouped.take(together=group)
    assert grouped.drawn == one.drawn[: len(grouped.drawn)]
    counts = one.counts
    assert counts.fresh == one.rows * one.lanes.count
    assert counts.uses == sum(one.uses.values())
    assert counts.repeats == counts.uses - one.loaded * one.lanes.count
    if len(one.drawn) < 60:
        assert one.rows == one.loaded == total
        assert one.plan.need(one.plan.batch) == Need()
        assert one.plan.decide(one.plan.batch, 0) is None


@pytest.mark.parametrize(
    "fetch",
    [
        ej.FetchSchedule("p", "constant", 0.3, 0.3),
        ej.FetchSchedule("e", "multistep", 1.0, 8.0, 2500, (500, 1000, 2000)),
    ],
    ids=["constant", "multistep"],
)
def test_fetches_are_as_many_as_expected_and_the_same_on_all_lanes(fetch):
    def fetches(lanes, num_draws):
        plan = StochasticPlan(ej.StochasticSpec(fetch, 8, 4), lanes=Lanes(4, lanes))
        found = []
        for _ in range(num_draws):
            found.append(plan.need(plan.batch).must > 0)
            plan.decide(plan.batch, plan.need(plan.batch).must)
        return found

    found = fetches(1, 3000)
    assert fetches(4, 900) == found[:900]
    p = fetch.probability(np.arange(3000))
    p[0] = 1.0
    assert abs(sum(found) - p.sum()) <= 6 * np.sqrt((p * (1 - p)).sum())


def test_reuse_takes_all_of_the_last_items_equally_often():
    """20 items, 5 of which a draw takes: each is in a quarter of the draws."""
    always = ej.FetchSchedule("p", "multistep", 1.0, 1e-9, 8, (4, 5, 6, 7))
    plan = StochasticPlan(ej.StochasticSpec(always, 20, 5), lanes=Lanes(5))
    last = np.array(batches_of(plan, 2000))[100:, 0, :, 0]
    is_in = (last[:, :, None] == np.arange(last.min(), last.min() + 20)).any(axis=1)
    deviation = 6 * np.sqrt(0.25 * 0.75 / len(last))
    assert np.abs(is_in.mean(axis=0) - 0.25).max() <= deviation
    # As often together as independent choices are: 5/20 * 4/19 of the draws.
    together = np.mean(is_in[:, 3] & is_in[:, 11])
    assert abs(together - 5 / 20 * 4 / 19) <= deviation


SMALL = {"fetch": HALF, "buffer": 8, "batch_size": 2, "host_batch": 2}


def test_a_last_load_may_be_smaller():
    driver = driver_of({"buffer": 4, "batch_size": 4, "host_batch": 4}, total=11)
    while driver.take():
        pass
    found = [[k for k, _ in lane] for [lane] in driver.drawn]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert driver.counts == ej.Counts(fresh=11, uses=11, repeats=0)


def test_schedules_by_hand():
    at = np.array([0, 1, 2, 3, 4, 5, 99])
    value = lambda *args: ej.FetchSchedule(*args).value(at).tolist()  # noqa: E731
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
    assert value("e", "multistep", 1.0, 4.0, 6) == [1, 1, 1, 2, 2, 4, 4]
    load = ej.FetchSchedule("e", "linear", 1.0, 3.0, 2)
    third = round(2**32 / 3) / 2**32
    assert load.probability(np.arange(4)).tolist() == [1, 0.5, third, third]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantity": "q"}, "quantity='q' is unknown; use one of 'p', 'e'"),
        ({"end": float("nan")}, "end=nan must be a probability"),
        ({"quantity": "e", "end": float("inf")}, "end=inf must be an echo factor"),
        ({"updates": 0}, "got 0. Use updates=1."),
        ({"schedule": "constant"}, "constant schedule has end=0.5"),
        ({"schedule": "multistep", "milestones": (2, 2)}, "must ascend"),
        ({"schedule": "multistep", "milestones": (2, 11)}, "at most updates=10"),
        ({"schedule": "multistep", "milestones": (2.0,)}, "got 2.0. Use 2."),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(changes, message):
    good = {"quantity": "p", "schedule": "linear", "start": 1.0, "end": 0.5}
    good["updates"] = 10
    ej.FetchSchedule(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        ej.FetchSchedule(**good | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"host_batch": 8}, "host batches of 8 .* batch_size=2, .* make them equal"),
        ({"buffer": 1}, "buffer=1 holds less than a batch; use at least 2"),
    ],
)
def test_plans_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(SMALL | changes)
