"""Adaptive plans: the rule holds exactly, is recorded, replayed and restored."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_driver import Driver

import echo_jax as ej
from echo_jax.echo.plans import AdaptivePlan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.lanes import Lanes


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
        # Whether a whole batch may wait beside the rows that come.
        self.mixes = args["buffer"] // lanes.count >= plan.batch + lanes.rows
        self.came, self.before, self.since = [], 0, {}

    def gives_way(self, item):
        return self.uses[item] >= self.least

    def below(self):
        """The items of every lane that may be used again."""
        return [
            [i for i in lane.values() if self.uses[i] < self.cap] for lane in self.store
        ]

    def follow(self, batch):
        below, number = self.below(), len(self.drawn)
        fresh = [sorted(i for i in lane if not self.uses[i]) for lane in below]
        self.came.append(self.rows - self.before)
        self.before, window = self.rows, max(32, 2 * self.cap)
        recent = self.came[-window:]
        lanes = super().follow(batch)
        size = min(self.plan.batch, *map(len, below))
        assert size == self.plan.batch or self.rows == self.total
        for lane, mine, unused in zip(lanes, below, fresh, strict=True):
            index = [item for item, _ in lane]
            assert len(index) == len(set(index)) == size, "an item twice in a batch"
            assert set(index) <= set(mine), "used beyond the cap"
            due = max(
                -(-sum(recent) // len(recent)) if self.mixes else size,
                len(unused) - self.plan.batch,
                size - min(map(len, below)) + len(unused),
            )
            num = sum(item in unused for item in index)
            ends = self.rows == self.total and num == min(size, len(unused))
            assert num == min(due, size, len(unused)) or ends, "not its fresh items"
            assert index[:num] == unused[:num], "fresh items are not first"
            waited = [number - self.since.setdefault(k, number) for k in unused]
            assert max(waited, default=0) < window, "an unused item waits too long"
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
    due, after = math.inf, -1
    while driver.take(ready=ready_to_the_end or driver.rows == driver.total):
        if driver.rows == driver.total:
            after += 1
            # What was not used when the end was found, and uses below the least.
            held = [item for lane in driver.store for item in lane.values()]
            due = min(due, sum(max(0, driver.least - driver.uses[k]) for k in held))
            due = math.ceil(due / driver.plan.batch) if after == 0 else due
    # All that came was taken and used, and no batch came that was not due.
    assert driver.rows == driver.total
    assert min(driver.uses.values()) >= driver.least
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


def test_after_its_end_come_unused_items_and_the_rest_of_a_batch():
    """The end is found once the echo asks for more."""
    args = {"buffer": 16, "batch_size": 4, "host_batch": 4}
    driver = driver_of(args, total=11)
    assert driver.take(ready=True) == [[(k, 0) for k in range(4)]]
    assert sorted(driver.take()[0]) == [(k, 1) for k in range(4)]
    assert driver.take(ready=True)[0] == [(k, 0) for k in (4, 5, 6)] + [(0, 2)]
    assert driver.take(ready=True) == [[(k, 0) for k in (7, 8, 9, 10)]]
    assert driver.take(ready=True) is None
    assert list(driver.plan.log) == [True, False, True, True]
    assert driver.plan.log.ends == ((3, 3),)
    # Of 9 items the last two fill a batch with repeats.
    driver = driver_of(args, total=9)
    for ready in (True, True, False):
        driver.take(ready=ready)
    assert driver.take(ready=True)[0][:1] == [(8, 0)]
    assert driver.take(ready=True) is None
    assert driver.plan.log.ends == ((3, 1),)
    # Where nothing is left, the end is found without a batch.
    driver = driver_of(args, total=4)
    driver.take()
    assert driver.take(ready=True) is None
    assert list(driver.plan.log) == [True] and driver.plan.log.ends == ((1, 0),)
    # A first host batch may be smaller if it is the last one.
    driver = driver_of(args, total=3)
    assert driver.take() == [[(0, 0), (1, 0), (2, 0)]]
    assert driver.take() is None
    assert driver.plan.log.ends == ((0, 3),)


def test_a_batch_has_fresh_items_in_the_share_in_which_they_come():
    """One batch of 8 comes for every 4 updates: each has 2 of its items, in order."""
    sizes = {"buffer": 512, "batch_size": 8, "host_batch": 8}
    driver = driver_of(sizes | {"max_uses": 8})
    fresh = []
    for number in range(200):
        (batch,) = driver.take(ready=number % 4 == 0)
        fresh.append([item for item, repeat in batch if repeat == 0])
    assert [len(each) for each in fresh[64:]] == [2] * 136
    in_order = [item for each in fresh for item in each]
    assert in_order == [*range(len(in_order))]
    # Where data is always ready, batches are the loader's own again soon.
    taken = [driver.take(ready=True)[0] for _ in range(40)]
    assert all(r == 0 for batch in taken[4:] for _, r in batch)
    first = taken[4][0][0]
    assert [k for batch in taken[4:] for k, _ in batch] == [*range(first, first + 288)]


@pytest.mark.parametrize("ratio", [4, 6.5, 10])
def test_repeats_lie_far_apart_where_fresh_items_are_too_few(ratio):
    """Of 48 batches about three quarters wait for a repeat, and all uses are made."""
    kept, size = 48, 4
    args = {"buffer": kept * size, "batch_size": size, "host_batch": size}
    driver = driver_of(args)
    last, lags = {}, []
    now = arrived = 0.0
    for number in range(20 * kept):
        must = driver.plan.need(size).must
        if must:
            now = max(now, arrived + ratio)
        ready = now >= arrived + ratio
        rows = driver.rows
        (batch,) = driver.take(ready=ready)
        if driver.rows > rows:
            arrived = max(arrived + ratio, now - ratio)  # one batch is read ahead
        now += 1
        for item, _ in batch:
            lags.append(number - last.get(item, number))
            last[item] = number
    settled = np.array(lags[len(lags) // 2 :])
    assert np.quantile(settled[settled > 0], 0.05) > kept / 8
    old = [n for item, n in driver.uses.items() if item < driver.rows - kept * size]
    assert np.mean(old) > 3.9


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


def test_a_restored_plan_waits_for_its_first_fresh_items_as_a_start_does():
    """No data can be ready yet, and a repeat would be decided at once."""
    driver = driver_of(SMALL)
    assert driver.take(ready=True) and driver.plan.need(2) == Need(may=2)
    other, _ = driver.restored(make(SMALL), driver.state(), 1)
    assert other.plan.need(2) == Need(must=2)
    other.take()
    assert other.plan.need(2) == Need(may=2)


def test_a_log_of_another_run_is_refused():
    plan = make(SMALL, [False])
    assert plan.need(2).must == 2  # An upstream that had ended would give nothing.
    with pytest.raises(ValueError, match="takes nothing before batch 0"):
        plan.decide(2, 2)
    short = make(SMALL, [True, True])
    short.decide(2, 2)
    short.end(0)
    with pytest.raises(
        ValueError, match="goes on with batch 1, where the upstream has ended"
    ):
        short.decide(2, 0)
