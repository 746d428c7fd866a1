"""Fixed plans, run without arrays: which item is in which slot, and for how long."""

import tracemalloc

import numpy as np
import pytest
from echo_cases import FACTORS, LOAD, ORDERS, spec_of, specs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plan_driver import Driver, assert_restores, batches_of

import echo_jax as ej
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.plans import FixedPlan, make_plan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.plans.lanes import Lanes, joined_state, lane_spec, split_state

TAKES = st.lists(st.integers(1, 20), min_size=1, max_size=20)


class FixedDriver(Driver):
    def gives_way(self, item):
        return False  # it is gone after its last use


def driver_of(spec, total):
    return FixedDriver(FixedPlan(spec), total=total)


def uses_of(driver):
    return [use for batch in driver.drawn for use in batch[0]]


@settings(max_examples=40)
@given(specs(), st.integers(0, 90), TAKES)
def test_uses_are_as_scheduled_however_they_are_cut(spec, total, takes):
    whole, cut = driver_of(spec, total), driver_of(spec, total)
    whole.all()
    for n in takes:
        cut.take(min(n, spec.batch_size))
        counts = cut.counts
        assert counts.fresh == cut.rows <= total
        repeats = sum(repeat > 0 for _, repeat in uses_of(cut))
        assert counts == ej.Counts(counts.fresh, len(uses_of(cut)), repeats)
    cut.all(1)
    assert uses_of(cut) == uses_of(whole)
    assert not cut.store[0] and cut.rows == total
    counted = [whole.uses[k] for k in range(total)]
    assert counted == spec.schedule.uses(0, total, 0)[0].tolist()


@pytest.mark.parametrize("factor", ["1", "7.3", "by_item"])
@pytest.mark.parametrize("order", ORDERS)
def test_a_long_plan_needs_no_more_slots_than_stated(order, factor):
    driver = driver_of(spec_of(order, factor), 10**9)
    spec, plan = spec_of(order, factor), driver.plan
    # Beyond the buffer: a batch of fresh items twice, and what may vary.
    extra = 2 * spec.batch_size + 6 + 10 * spec.buffer**0.5
    assert plan.num_slots <= spec.buffer + extra
    for _ in range(200):
        driver.take(spec.batch_size)
        assert driver.decision.uses.slots.max() < plan.num_slots


def test_a_plan_by_hand():
    plan = FixedPlan(ej.EchoSpec("3/2", batch_size=4))
    assert plan.need(4) == Need()
    decision = plan.decide(4, 0)
    uses = decision.uses[:, :8]
    assert uses.fresh_index.tolist() == [[0, 1, 1, 2, 3, 3, 4, 5]]
    assert uses.repeat.tolist() == [[0, 0, 1, 0, 0, 1, 0, 0]]
    assert uses.last.tolist() == [[True, False, True, True, False, True, True, False]]
    assert decision.rows[:8].tolist() == [1, 2, 2, 3, 4, 4, 5, 6]
    assert uses.slots.tolist() == decision.slots[:, uses.fresh_index[0]].tolist()
    # The slots that are free at the start, and then those of the items before a use.
    free = plan.num_slots
    assert decision.most[:5].tolist() == [free, free + 1, free + 1, free + 2, free + 3]
    assert plan.counts(4) == ej.Counts(fresh=3, uses=4, repeats=1)
    # Item 3 has two uses, and there is no item 4.
    plan.settle(4, 3)
    plan.end(1)
    assert plan.decide(4, 0).uses.fresh_index.tolist() == [[3, 3]]
    plan.settle(2, 4)
    assert plan.decide(4, 0) is None
    assert plan.counts(0) == ej.Counts(fresh=4, uses=6, repeats=2)


@pytest.mark.parametrize("factor", [{0: 10**5, 9: 1}, 10**6])
def test_the_uses_of_an_item_without_end_are_made_piece_by_piece(factor):
    """A hundred items of 10^5 uses took 2.4 GB before the first use."""
    spec = ej.EchoSpec(factor, 1, "consecutive", batch_size=32)
    tracemalloc.start()
    try:
        first = FixedPlan(spec).decide(32, 0).uses[:, :32]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not first.fresh_index.any()
    assert first.repeat.tolist() == [[*range(32)]]
    assert peak < 60 * max(spec.schedule.uses(0, 1, 0)[0][0], 65_536)


def test_long_items_are_used_one_after_another_from_every_state():
    factor = ej.FactorByItem(lambda k: (1, 30_000, 5.5, 70_000)[k % 4], 10**5)
    spec = ej.EchoSpec(factor, batch_size=4)
    num_uses, _ = spec.schedule.uses(0, 13, 0)
    expected = np.repeat(np.arange(13), num_uses)
    state, found = FixedPlan(spec).get_state(), []
    for _ in range(30):
        plan = FixedPlan(spec)
        plan.set_state(state)
        decision = plan.decide(9_999, 0)
        found.append(decision.uses.fresh_index[0, :9_999])
        plan.settle(found[-1].size, int(decision.rows[found[-1].size - 1]))
        state = plan.get_state()
    found = np.concatenate(found)
    assert np.array_equal(found, expected[: found.size])


@pytest.mark.parametrize(
    ("order", "most"), [("window_shuffle", 16777215), ("shuffle_buffer", 2**31)]
)
def test_a_buffer_beyond_what_an_order_can_draw_from_is_refused(order, most):
    with pytest.raises(ValueError, match=rf"buffer={2 * most} .* use at most {most}"):
        FixedPlan(ej.EchoSpec(2, 2 * most, order))
    rounds_of(ej.EchoSpec(2, most, order))


# --- In lanes.


def _case(order, factor, num_lanes, lane_batch, lane_rows, buffer, max_batches=1):
    """The spec and a plan of these sizes, with a buffer that is large enough."""
    lanes = Lanes(lane_rows * num_lanes, num_lanes)
    sizes = (buffer * num_lanes, order, lane_batch * num_lanes, 5)
    spec = ej.EchoSpec(FACTORS[factor], *sizes)

    def make():
        return FixedPlan(spec, lanes=lanes, max_batches=max_batches)

    try:
        make()
    except ValueError as error:
        assert "buffer" in str(error)
        sizes = (num_lanes, lane_batch, lane_rows, 2 * buffer, max_batches)
        return _case(order, factor, *sizes)
    return spec, make, lanes


CASES = st.tuples(
    st.sampled_from(ORDERS),
    st.sampled_from(sorted(FACTORS)),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from([1, 1, 3]),
)


@settings(max_examples=40)
@given(st.integers(0, 12), CASES)
# Host batches of one row, of which a batch takes several at once.
@example(3, ("window_shuffle", "1", 1, 3, 1, 1, 1))
def test_every_lane_is_the_host_echo_of_its_items(total, case):
    spec, make, lanes = _case(*case)
    rows, count, together = lanes.rows, lanes.count, case[-1]
    driver = FixedDriver(make(), lanes, total * rows)
    while driver.counts.uses % spec.batch_size == 0:
        if driver.take(together=together) is None:
            break
        assert driver.rows % rows == 0
    for lane in range(count):
        items = [
            (number * count + lane) * rows + row
            for number in range(total)
            for row in range(rows)
        ]
        echo = ej.echo(items, lane_spec(spec, lane, count), tags=True)
        expected = [(item, tags.repeat) for item, tags in echo]
        got = [use for batch in driver.drawn for use in batch[lane]]
        # Of several batches at once the last ones may be cut off at the end.
        assert len(got) > len(expected) - together * spec.batch_size
        assert got == expected[: len(got)]
    if together == 1:
        assert len(driver.uses) == total * rows * count


@settings(max_examples=20)
@given(st.integers(0, 12), CASES)
# Lanes that have drifted apart, so that their oldest items differ.
@example(9, ("window_shuffle", "2", 3, 4, 7, 4, 1))
def test_lanes_continue_from_every_state(total, case):
    _, make, lanes = _case(*case)
    driver = FixedDriver(make(), lanes, total * lanes.rows)
    assert_restores(driver, make, [()] * 18, ahead=4)


def test_every_lane_has_a_seed_and_the_factor_of_its_items():
    piecewise = ej.EchoSpec({0: 1, 8: 3}, batch_size=4)
    assert lane_spec(piecewise, 1, 4).factor == {0: 1, 2: 3}
    by_item = ej.EchoSpec(ej.FactorByItem(lambda k: 1 + (k >= 8), 2), batch_size=4)
    assert lane_spec(by_item, 3, 4).schedule.uses(0, 4, 0)[0].tolist() == [1, 1, 2, 2]
    assert len({lane_spec(piecewise, lane, 4).seed for lane in range(4)}) == 4


@pytest.mark.parametrize(
    ("spec", "sizes", "message"),
    [
        (ej.EchoSpec(2, batch_size=6), (12, 8), "host_batch=12 .* use 16"),
        (ej.EchoSpec(2, batch_size=6), (8, 4), "batch_size=6 .* use 8"),
        (ej.EchoSpec(4, 32, "spread", 32), (32, 4), "each of 4 lanes: buffer=8 is too"),
    ],
)
def test_lanes_that_cannot_be_are_refused_with_the_fix(spec, sizes, message):
    with pytest.raises(ValueError, match=message):
        FixedPlan(spec, lanes=Lanes(*sizes))


OWNS = [range(4), range(2), range(2, 4)]


@pytest.mark.parametrize(
    "spec",
    [
        *(ej.EchoSpec(2.5, 64, order, 16, 3) for order in ORDERS),
        ej.StochasticSpec(LOAD, 64, 16, 3),
        ej.AdaptiveSpec(4, 64, 16, 3),
    ],
    ids=[*ORDERS, "stochastic", "adaptive"],
)
def test_lanes_draw_alike_wherever_the_others_are(spec):
    plans = [make_plan(spec, lanes=Lanes(16, 4, own)) for own in OWNS]
    whole, *parts = (batches_of(plan, 30) for plan in plans)
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@settings(max_examples=15)
@given(
    st.sampled_from([*FACTORS.values()]),
    st.sampled_from(["consecutive", "spread", "stochastic"]),
    st.sampled_from([96, 160]),
    st.integers(0, 40),
    st.sampled_from([1, 3]),
)
def test_parts_go_on_as_a_whole_and_a_whole_as_its_parts(
    factor, order, buffer, done, max_batches
):
    """Of orders in which all lanes are at the same item."""
    if order == "stochastic":
        spec = ej.StochasticSpec(LOAD, buffer, 8, 3)
    else:
        spec = ej.EchoSpec(factor, buffer, order, 8, 3)

    def make(own, state=None):
        plan = make_plan(spec, lanes=Lanes(8, 4, own), max_batches=max_batches)
        if state is not None:
            plan.check_state(state)
            plan.set_state(state)
        return plan

    whole, *parts = map(make, OWNS)
    for plan in (whole, *parts):
        batches_of(plan, done)
    split = split_state(whole.get_state(), 2)
    assert [part.get_state() for part in parts] == split
    assert joined_state(split) == whole.get_state()
    # So the upstream, which is read from there, is at one place for all of them.
    assert {part.anchor() for part in parts} == {whole.anchor()}
    rest = batches_of(whole, 20)
    again = [batches_of(make(*of), 20) for of in zip(OWNS[1:], split, strict=True)]
    np.testing.assert_array_equal(np.concatenate(again, axis=1), rest)
    merged = make(OWNS[0], joined_state(split))
    np.testing.assert_array_equal(batches_of(merged, 20), rest)
