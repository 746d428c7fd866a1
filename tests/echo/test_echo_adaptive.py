"""Adaptive plans: the rule holds exactly, is recorded, replayed and restored."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver

import echo_jax as ej
from echo_jax.echo.plans import AdaptivePlan, Lanes, Need


def make(args, replay=None, **options):
    """A plan of arguments as `arguments` draws them."""
    args = dict(args)
    lanes = Lanes(args.pop("host_batch"), args.pop("num_lanes", 1))
    return AdaptivePlan(ej.AdaptiveSpec(**args, replay=replay), lanes=lanes, **options)


class AdaptiveDriver(Driver):
    """Checks the rule of every batch as well."""

    def __init__(self, plan, lanes, total, args):
        super().__init__(plan, lanes, total)
        self.cap, self.least = args.get("max_uses", 4), args.get("min_uses", 1)

    def gives_way(self, item):
        return self.uses[item] >= self.least

    def below(self):
        """The items of every lane that may be used again."""
        return [
            [i for i in lane.values() if self.uses[i] < self.cap] for lane in self.store
        ]

    def follow(self, batch):
        below = self.below()
        fresh = [sorted(i for i in lane if not self.uses[i]) for lane in below]
        lanes = super().follow(batch)
        size = min(self.plan.batch, *map(len, below))
        assert size == self.plan.batch or self.rows == self.total
        for lane, mine, unused in zip(lanes, below, fresh, strict=True):
            index = [item for item, _ in lane]
            assert len(index) == len(set(index)) == size, "an item twice in a batch"
            assert set(index) <= set(mine), "used beyond the cap"
            assert index[: len(unused)] == unused[:size], "fresh items are not first"
        return lanes

    def wanted(self, uses, ready):
        need = self.plan.need(uses)
        assert not (need.must and need.may)
        if need.may:
            used = [n for n in self.uses.values() if n]
            assert sum(used) >= self.least * len(used), "fresh items come too early"
        return super().wanted(uses, ready)


def driver_of(args, replay=None, total=10**9):
    lanes = Lanes(args["host_batch"], args.get("num_lanes", 1))
    return AdaptiveDriver(make(args, replay), lanes, total, args)


@st.composite
def arguments(draw):
    lanes = draw(st.integers(1, 3))
    batch = draw(st.integers(1, 6))
    rows = batch + draw(st.integers(0, 7))
    max_uses = draw(st.integers(1, 5))
    min_uses = draw(st.integers(1, max_uses))
    waiting = batch - np.gcd(batch, rows)
    least = rows + (rows if waiting and min_uses > 1 else waiting)
    return {
        "buffer": lanes * int(least + draw(st.integers(0, 40))),
        "batch_size": lanes * batch,
        "host_batch": lanes * rows,
        "num_lanes": lanes,
        "max_uses": max_uses,
        "min_uses": min_uses,
        "seed": draw(st.integers(0, 3)),
    }


# Runs of readiness, so that buffers both fill up and are used up.
READINESS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 25)), min_size=1, max_size=6
).map(lambda runs: [ready for ready, length in runs for _ in range(length)])


@settings(max_examples=40)
@given(arguments(), READINESS, st.integers(0, 12), st.booleans())
def test_the_rule_holds_at_every_draw(args, readiness, left, ready_to_the_end):
    driver = driver_of(args)
    for ready in readiness:
        driver.take(ready=ready)
    driver.total = driver.rows + left % driver.lanes.rows
    while driver.take(ready=ready_to_the_end):
        pass
    # All that came was taken, and in some lane every item is at the cap.
    assert driver.rows == driver.total
    assert not all(driver.below())
    counts = driver.counts
    uses = driver.uses.values()
    assert counts.fresh == len(uses) == driver.rows * driver.lanes.count
    assert counts.uses == sum(uses)
    assert counts.repeats == sum(n - 1 for n in uses)


@settings(max_examples=15)
@given(arguments(), READINESS, st.randoms(use_true_random=False))
def test_a_log_repeats_the_run_whatever_is_ready(args, readiness, random):
    first = driver_of(args)
    sequence = [first.take(ready=ready) for ready in readiness]
    log = ej.DecisionLog.from_json(json.loads(json.dumps(first.plan.log.to_json())))
    again = driver_of(args, log)
    assert [again.take(ready=random.random() < 0.5) for _ in readiness] == sequence
    assert again.plan.log == first.plan.log
    # After its end both go on alike from what is ready.
    for ready in [True, False, False] * 3:
        assert first.take(ready=ready) == again.take(ready=ready)


def test_a_small_case_by_hand():
    """Two lanes of one item: fresh, echo of the older, wait at the cap."""
    driver = driver_of(SMALL | {"buffer": 4, "num_lanes": 2})
    plan = driver.plan
    assert plan.need(1) == Need(must=1)
    assert driver.take(ready=True) == [[(0, 0)], [(1, 0)]]
    assert plan.need(1) == Need(may=1)
    assert driver.take(ready=True) == [[(2, 0)], [(3, 0)]]
    assert driver.take() == [[(0, 1)], [(1, 1)]]
    assert driver.take() == [[(2, 1)], [(3, 1)]]
    assert plan.need(1) == Need(must=1)
    assert plan.decide(1, 1).slots.tolist() == [[0], [0]]
    assert list(plan.log) == [True, True, False, False, True]


def test_data_that_is_always_ready_is_used_at_least_so_often():
    """16 batches are held and used twice: their uses are a whole buffer apart."""
    args = {"buffer": 64, "batch_size": 4, "host_batch": 4, "min_uses": 2}
    driver = driver_of(args)
    batches = [driver.take(ready=True)[0] for _ in range(400)]
    assert driver.counts == ej.Counts(fresh=800, uses=1600, repeats=800)
    at = {use: number for number, batch in enumerate(batches) for use in batch}
    lags = [at[item, 1] - at[item, 0] for item in range(200, 600)]
    assert np.quantile(lags, 0.1) > 16
    # What was recorded with another bound is no log of this echo.
    replayed = driver_of(args, [True, True])
    replayed.take()
    with pytest.raises(ValueError, match=r"before batch 1, .* early with min_uses=2"):
        replayed.take()


@pytest.mark.parametrize("ratio", [1.5, 3.2])
def test_repeats_of_a_slow_constant_stream_lie_far_apart(ratio):
    kept = 48
    args = {"buffer": kept * 4, "batch_size": 4, "host_batch": 4}
    driver = driver_of(args)
    last, lags = {}, []
    arrived = 0.0
    for number in range(int(12 * kept * ratio)):
        arrived += 1 / ratio
        for item, _ in driver.take(ready=arrived - driver.rows / 4 >= 1)[0]:
            lags.append(number - last.get(item, number))
            last[item] = number
    assert driver.rows / 4 >= 12 * kept - 1, "data that was ready was not taken"
    settled = np.array(lags[len(lags) // 2 :])
    assert np.quantile(settled[settled > 0], 0.1) > kept / 2
    # No item is used often while another is hardly used.
    uses = [n for item, n in driver.uses.items() if item < 10 * kept * 4]
    assert np.std(uses) < 0.75


SMALL = {"buffer": 8, "batch_size": 2, "host_batch": 2, "max_uses": 2}


def test_all_items_are_used_up_at_the_end_and_the_last_batch_may_be_smaller():
    """Cap 2: 4 and 3 items are 14 uses, of which the last 2 are half a batch."""
    args = {"buffer": 8, "batch_size": 4, "host_batch": 4, "max_uses": 2}
    driver = driver_of(args, total=7)
    assert driver.take(ready=True) == [[(k, 0) for k in range(4)]]
    assert driver.take(ready=True)[0][:3] == [(k, 0) for k in (4, 5, 6)]
    assert [len(driver.take()[0]) for _ in range(2)] == [4, 2]
    assert driver.take() is None
    assert driver.counts == ej.Counts(fresh=7, uses=14, repeats=7)
    assert list(driver.plan.log) == [True, True, False, False]
    # A first host batch may be smaller if it is the last one.
    driver = driver_of(args, total=3)
    assert driver.take() == [[(0, 0), (1, 0), (2, 0)]]
    assert sorted(driver.take()[0]) == [(0, 1), (1, 1), (2, 1)]
    assert driver.take() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 3}, "not a multiple of num_lanes=3"),
        ({"host_batch": 6}, "batch_size=8 needs .* these have 6 .* use larger ones"),
        ({"buffer": 15, "host_batch": 12}, "buffer=15 is too small .* use at least 16"),
    ],
)
def test_what_cannot_work_is_refused(changes, message):
    args = {"buffer": 16, "batch_size": 8, "host_batch": 12, "num_lanes": 2}
    make(args)
    with pytest.raises(ValueError, match=message):
        make(args | {"host_batch": 8} | changes)


def test_a_log_of_another_run_is_refused():
    plan = make(SMALL, [False])
    assert plan.need(2).must == 2  # An upstream that had ended would give nothing.
    with pytest.raises(ValueError, match="takes nothing before batch 0"):
        plan.decide(2, 2)
    short = make(SMALL, [True, True])
    short.decide(2, 2)
    short.end(0)
    with pytest.raises(ValueError, match="takes fresh items before batch 1"):
        short.decide(2, 0)
