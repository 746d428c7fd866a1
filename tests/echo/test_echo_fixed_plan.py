"""Plans over lanes, run without a store of arrays: who lies where, how long."""

import json
from collections import Counter

import numpy as np
import pytest
from echo_cases import FACTORS, ORDERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.plans.lanes import Lanes, joined_state, lane_spec, split_state
from echo_jax.echo.spec import AdaptiveSpec, StochasticSpec


class Driver:
    """Runs a plan over ``total`` host batches, and checks what every slot holds."""

    def __init__(self, plan, num_lanes, host_batch, total):
        self.plan = plan
        self.num_lanes, self.host_batch = num_lanes, host_batch
        self.lane_rows = host_batch // num_lanes
        self.total = total * self.lane_rows  # rows of a lane
        self.slots = [{} for _ in range(num_lanes)]
        self.rows = self.reads = 0

    def hold(self, first, slots):
        """Writes rows, from the first of them on, lane by lane."""
        assert slots.dtype == np.int32 and len(slots) == self.num_lanes
        self.reads += slots.shape[1]
        for lane, row in np.ndindex(slots.shape):
            if slots[lane, row] < self.plan.num_slots:
                number, place = divmod(first + row, self.lane_rows)
                item = (number * self.num_lanes + lane) * self.lane_rows + place
                self.slots[lane][int(slots[lane, row])] = item

    def take(self, num_batches=1):
        """Makes the next batches: pairs of (fresh index, repeat), lane after lane."""
        uses = num_batches * self.plan.batch
        need = self.plan.need(uses)
        if self.rows + need.must > self.total:
            self.plan.end(self.total - self.rows)
            need = self.plan.need(uses)
        assert need.must % self.lane_rows == need.may == 0
        assert self.rows + need.must <= self.total
        slots = self.plan.write(need.must)
        assert slots.shape == (self.num_lanes, need.must), "a lane is out of slots"
        self.hold(self.rows, slots)
        self.rows += need.must
        return [
            self._checked(self.plan.next(self.plan.batch)) for _ in range(num_batches)
        ]

    def _checked(self, batch):
        if batch is None:
            return None
        assert batch.fresh_index.dtype == np.int64
        assert batch.slots.dtype == batch.repeat.dtype == np.int32
        for lane, use in np.ndindex(batch.slots.shape):
            slot, item = batch.slots[lane, use], batch.fresh_index[lane, use]
            assert self.slots[lane][int(slot)] == item
        index, repeat = batch.fresh_index.tolist(), batch.repeat.tolist()
        return [
            list(zip(*lane, strict=True)) for lane in zip(index, repeat, strict=True)
        ]

    def rest(self, num_batches=1):
        """All batches up to the end."""
        taken = []
        while True:
            for batch in self.take(num_batches):
                if batch is None:
                    return taken
                taken.append(batch)


def _case(order, factor, num_lanes, lane_batch, lane_rows, buffer, max_batches=1):
    """A plan for these sizes, with a buffer that is large enough."""
    while True:
        spec = ej.EchoSpec(
            FACTORS[factor], buffer * num_lanes, order, lane_batch * num_lanes, 5
        )

        def make(spec=spec):
            lanes = Lanes(host_batch=lane_rows * num_lanes, count=num_lanes)
            return FixedPlan(spec, lanes=lanes, max_batches=max_batches)

        try:
            make()
        except ValueError as error:
            assert "buffer" in str(error)
            buffer *= 2
            continue
        return spec, make


CASES = {
    "order": st.sampled_from(ORDERS),
    "factor": st.sampled_from(sorted(FACTORS)),
    "num_lanes": st.sampled_from([1, 2, 3]),
    "lane_batch": st.integers(1, 8),
    "lane_rows": st.integers(1, 8),
    "buffer": st.integers(1, 40),
    "total": st.integers(0, 12),
    "num_batches": st.sampled_from([1, 1, 3]),
}


@settings(max_examples=150)
@given(**CASES)
@example(
    # Host batches of one row, of which a batch takes several at once.
    order="shuffle",
    factor="1",
    num_lanes=1,
    lane_batch=3,
    lane_rows=1,
    buffer=1,
    total=3,
    num_batches=1,
)
def test_every_lane_is_the_host_echo_of_its_items(total, num_batches, **sizes):
    spec, make = _case(max_batches=num_batches, **sizes)
    num_lanes, rows = sizes["num_lanes"], sizes["lane_rows"]
    driver = Driver(make(), num_lanes, rows * num_lanes, total)
    taken = driver.rest(num_batches)
    for lane in range(num_lanes):
        items = [
            number * rows * num_lanes + lane * rows + row
            for number in range(total)
            for row in range(rows)
        ]
        echo = ej.echo(items, lane_spec(spec, lane, num_lanes), tags=True)
        expected = [(item, tags.repeat) for item, tags in echo]
        got = [use for batch in taken for use in batch[lane]]
        # Of several batches at once the last ones may be cut off at the end.
        if num_batches > 1:
            assert len(got) > len(expected) - num_batches * sizes["lane_batch"]
            expected = expected[: len(got)]
        assert got == expected
    if num_batches == 1:
        uses = Counter(item for batch in taken for lane in batch for item, _ in lane)
        assert len(uses) == total * rows * num_lanes
        counts = driver.plan.counts()
        assert counts.uses == sum(uses.values()) == counts.fresh + counts.repeats


@settings(max_examples=100)
@given(at=st.integers(0, 30), **CASES)
@example(  # lanes that have drifted apart, so that their oldest items differ
    at=16,
    order="shuffle",
    factor="2",
    num_lanes=3,
    lane_batch=4,
    lane_rows=7,
    buffer=4,
    total=9,
    num_batches=1,
)
def test_plans_continue_from_every_state(at, total, num_batches, **sizes):
    _, make = _case(max_batches=num_batches, **sizes)
    lanes, host_batch = sizes["num_lanes"], sizes["lane_rows"] * sizes["num_lanes"]
    whole = Driver(make(), lanes, host_batch, total)
    for _ in range(at // num_batches):
        whole.take(num_batches)
    state = json.loads(json.dumps(whole.plan.get_state()))
    resumed = Driver(make(), lanes, host_batch, total)
    resumed.plan.check_state(state)
    restored = resumed.plan.set_state(state)
    # Whole host batches are read again, up to the last that was.
    assert restored.first == resumed.plan.anchor() == whole.plan.anchor()
    assert restored.first % sizes["lane_rows"] == 0
    assert restored.first + restored.slots.shape[1] == whole.rows
    resumed.hold(restored.first, restored.slots)
    resumed.rows = whole.rows
    assert resumed.rest(num_batches) == whole.rest(num_batches)
    assert resumed.plan.get_state() == whole.plan.get_state()


@pytest.mark.parametrize("order", ["shuffle", "shuffle_buffer", "spread"])
def test_the_oldest_row_is_the_first_that_a_restore_needs(order):
    spec = ej.EchoSpec(2.5, 600, order, 32)
    whole, resumed = FixedPlan(spec), FixedPlan(spec)
    later_than_the_anchor = 0
    for _ in range(200):
        whole.write(whole.need(32).must)
        whole.next(32)
        state = whole.get_state()
        restored = resumed.set_state(state)
        (needed,) = np.nonzero(restored.slots[0] < whole.num_slots)
        assert whole.oldest() == restored.first + needed[0]
        assert whole.anchor() <= whole.oldest() < state["fresh"]
        later_than_the_anchor += whole.anchor() < whole.oldest()
    assert later_than_the_anchor > 50


@pytest.mark.parametrize("order", ORDERS)
def test_items_are_read_when_they_are_needed_and_not_before(order):
    """With e = 4 and host batches of a batch: one in four batches, evenly."""
    spec = ej.EchoSpec(4, 64, order, 16)
    driver = Driver(FixedPlan(spec, lanes=Lanes(16)), 1, 16, 1000)
    driver.take(1)
    while driver.rows < 40 * 16:
        driver.take(1)
    before = driver.reads
    reads = []
    for _ in range(40):
        driver.take(1)
        reads.append((driver.reads - before) / 16)
    least = [k // 4 for k in range(1, 41)]
    slack = 3 if order == "shuffle" else 1
    assert all(
        low - slack <= got <= low + slack for low, got in zip(least, reads, strict=True)
    )


def test_a_smaller_last_host_batch_is_taken_in_one_lane():
    plan = FixedPlan(ej.EchoSpec(2, batch_size=4), lanes=Lanes(4))
    plan.write(plan.need(4).must)
    uses = [plan.next(4).fresh_index.tolist() for _ in range(2)]
    plan.end(2)
    assert plan.need(4) == Need(must=2)
    assert plan.write(2).shape == (1, 2)
    uses.append(plan.next(4).fresh_index.tolist())
    assert uses == [[[0, 0, 1, 1]], [[2, 2, 3, 3]], [[4, 4, 5, 5]]]
    assert plan.need(4) == Need()
    assert plan.next(4) is None


def test_a_factor_that_varies_with_the_item_varies_in_every_lane_at_once():
    piecewise = ej.EchoSpec({0: 1, 8: 3}, batch_size=4)
    assert lane_spec(piecewise, 1, 4).factor == {0: 1, 2: 3}
    by_item = ej.EchoSpec(ej.FactorByItem(lambda k: 1 + (k >= 8), 2), batch_size=4)
    uses, _ = lane_spec(by_item, 3, 4).schedule.uses(0, 4, 0)
    assert uses.tolist() == [1, 1, 2, 2]


def test_lanes_have_seeds_of_their_own():
    spec = ej.EchoSpec(2, 64, "shuffle", 8, seed=3)
    seeds = {lane_spec(spec, lane, 4).seed for lane in range(4)}
    assert len(seeds) == 4
    assert lane_spec(spec, 0, 1) is spec


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"host_batch": 12, "count": 8}, "host_batch=12 .* use 16"),
        ({"host_batch": 8, "count": 0}, "num_lanes=0 must be at least 1"),
        ({"host_batch": 8, "count": 4}, "batch_size=6 .* use 8"),
    ],
)
def test_lanes_that_do_not_divide_are_refused_with_the_fix(sizes, message):
    with pytest.raises(ValueError, match=message):
        FixedPlan(ej.EchoSpec(2, batch_size=6), lanes=Lanes(**sizes))


def test_a_buffer_too_small_for_a_lane_is_refused_as_the_lanes():
    spec = ej.EchoSpec(4, 32, "spread", 32)
    with pytest.raises(ValueError, match="in each of 4 lanes: buffer=8 is too small"):
        FixedPlan(spec, lanes=Lanes(host_batch=32, count=4))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"lanes": []}, "has 0 lanes, this echo has 2"),
        ({"lanes": None}, "has None lanes, this echo has 2"),
        ({"lanes": [{}, {}]}, "is not the state of an echo plan"),
        ({"written": "8"}, "written='8', which must be an integer"),
        ({"written": -1}, "written=-1 and fresh="),
        ({"written": 1 << 60}, "do not fit together; it is damaged"),
        ({"more": 1}, "is not the state of a fixed echo in lanes"),
    ],
)
def test_a_damaged_state_of_lanes_is_refused_and_changes_nothing(damage, message):
    plan = FixedPlan(ej.EchoSpec(2, batch_size=4), lanes=Lanes(4, 2))
    _uses(plan, 3)
    state = plan.get_state()
    plan.check_state(state)
    with pytest.raises(ValueError, match=message):
        plan.check_state(state | damage)
    with pytest.raises(ValueError, match="give what get_state returned"):
        plan.check_state({"lanes": state["lanes"]})
    torn = [state["lanes"][0], state["lanes"][1] | {"carry": 99}]
    with pytest.raises(ValueError, match="it is damaged"):
        plan.check_state(state | {"lanes": torn})
    assert plan.get_state() == state


@pytest.mark.parametrize(
    "lanes", [Lanes(), Lanes(8, 2), Lanes(4, 1), Lanes(16, 4, range(2))]
)
def test_a_state_of_other_lanes_is_refused(lanes):
    spec = ej.EchoSpec(2, batch_size=4)
    plan = FixedPlan(spec, lanes=Lanes(4, 2))
    with pytest.raises(ValueError, match=r"restore|give what"):
        plan.check_state(FixedPlan(spec, lanes=lanes).get_state())


def _uses(plan, count):
    """Fresh index and repeat of every use of the next batches, lane after lane."""
    drawn = []
    for _ in range(count):
        need = plan.need(plan.batch)
        plan.write(need.must or need.may)
        batch = plan.next(plan.batch)
        drawn.append(np.stack([batch.fresh_index, batch.repeat], axis=-1))
    return np.stack(drawn) if drawn else None


@pytest.mark.parametrize(
    "spec",
    [
        *(ej.EchoSpec(2.5, 64, order, 16, 3) for order in ORDERS),
        StochasticSpec(LoadSchedule(start=0.4, end=0.4), 64, 16, 3),
        AdaptiveSpec(4, 64, 16, 3),
    ],
    ids=[*ORDERS, "stochastic", "adaptive"],
)
def test_lanes_draw_alike_wherever_the_others_are(spec):
    whole = _uses(make_plan(spec, lanes=Lanes(16, 4)), 30)
    parts = [
        _uses(make_plan(spec, lanes=Lanes(16, 4, range(first, first + 2))), 30)
        for first in (0, 2)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("is_stochastic", [False, True])
@given(
    factor=st.sampled_from([*FACTORS.values()]),
    order=st.sampled_from(["consecutive", "spread"]),
    buffer=st.sampled_from([96, 104, 160]),
    done=st.integers(0, 40),
    max_batches=st.sampled_from([1, 3]),
)
@settings(max_examples=40)
def test_parts_go_on_as_a_whole_and_a_whole_as_its_parts(
    is_stochastic, factor, order, buffer, done, max_batches
):
    """Of orders in which all lanes stand at the same item; see also `_takes_apart`."""
    spec = ej.EchoSpec(factor, buffer, order, 8, 3)
    if is_stochastic:
        spec = StochasticSpec(LoadSchedule(start=0.6, end=0.6), buffer, 8, 3)

    def make(own=range(4)):
        return make_plan(spec, lanes=Lanes(8, 4, own), max_batches=max_batches)

    whole, parts = make(), [make(range(2)), make(range(2, 4))]
    for plan in (whole, *parts):
        _uses(plan, done)
    state = whole.get_state()
    assert [part.get_state() for part in parts] == split_state(state, 2)
    assert joined_state(split_state(state, 2)) == state
    # So the upstream, which is read from there, is at one place for all of them.
    assert {part.anchor() for part in parts} == {whole.anchor()}
    rest = _uses(whole, 20)
    for part, own in zip(parts, split_state(state, 2), strict=True):
        part.check_state(own)
        part.set_state(own)
    again = np.concatenate([_uses(part, 20) for part in parts], axis=1)
    np.testing.assert_array_equal(again, rest)
    merged = make()
    merged.check_state(joined_state(split_state(state, 2)))
    merged.set_state(joined_state(split_state(state, 2)))
    np.testing.assert_array_equal(_uses(merged, 20), rest)


def test_states_of_different_places_are_not_joined():
    state = {"written": 3, "lanes": ["a"]}
    with pytest.raises(ValueError, match="not of the same place"):
        joined_state([state, {**state, "written": 4}])
