"""Draws over lanes, run without a store of arrays: who lies where, and for how long."""

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
from echo_cases import FACTORS, ORDERS
from hypothesis import example, given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.plans.adaptive import AdaptiveDraws
from echo_jax.echo.plans.draws import FixedDraws, Need
from echo_jax.echo.plans.lanes import joined_state, lane_spec, split_state
from echo_jax.echo.plans.stochastic import LoadSchedule, StochasticDraws


class Driver:
    """Runs draws over ``total`` chunks, and checks what every slot holds."""

    def __init__(self, draws, num_lanes, chunk_items, total):
        self.draws, self.total = draws, total
        self.num_lanes, self.chunk_items = num_lanes, chunk_items
        self.slots = [{} for _ in range(num_lanes)]
        self.reads = 0

    def hold(self, number, slots):
        """Writes a chunk."""
        lane_chunk = self.chunk_items // self.num_lanes
        assert slots.shape == (self.num_lanes, lane_chunk)
        assert slots.dtype == np.int32
        self.reads += 1
        for lane, row in np.ndindex(slots.shape):
            if slots[lane, row] < self.draws.num_slots:
                item = number * self.chunk_items + lane * lane_chunk + row
                self.slots[lane][int(slots[lane, row])] = item

    def take(self, num_draws=1):
        """Makes the next draws: pairs of (fresh index, repeat), lane after lane."""
        while self.draws.need(num_draws) is Need.MUST:
            if self.draws.num_chunks == self.total:
                self.draws.end()
            else:
                self.hold(self.draws.num_chunks, self.draws.write())
        return [self._checked(self.draws.draw()) for _ in range(num_draws)]

    def _checked(self, draw):
        if draw is None:
            return None
        for lane, use in np.ndindex(draw.read_slots.shape):
            slot, item = draw.read_slots[lane, use], draw.fresh_index[lane, use]
            assert self.slots[lane][int(slot)] == item
        index, repeat = draw.fresh_index.tolist(), draw.repeat.tolist()
        return [
            list(zip(*lane, strict=True)) for lane in zip(index, repeat, strict=True)
        ]

    def rest(self, num_draws=1):
        """All draws up to the end."""
        taken = []
        while True:
            for draw in self.take(num_draws):
                if draw is None:
                    return taken
                taken.append(draw)


def _case(order, factor, num_lanes, lane_batch, lane_chunk, buffer, max_draws=1):
    """Draws for these sizes, with a buffer that is large enough."""
    while True:
        spec = ej.EchoSpec(
            FACTORS[factor], buffer * num_lanes, order, lane_batch * num_lanes, 5
        )

        def make(spec=spec):
            return FixedDraws(
                spec,
                chunk_items=lane_chunk * num_lanes,
                num_lanes=num_lanes,
                max_draws=max_draws,
            )

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
    "lane_chunk": st.integers(1, 8),
    "buffer": st.integers(1, 40),
    "total": st.integers(0, 12),
    "num_draws": st.sampled_from([1, 1, 3]),
}


@settings(max_examples=150, deadline=None)
@given(**CASES)
def test_every_lane_is_the_host_echo_of_its_items(total, num_draws, **sizes):
    spec, make = _case(max_draws=num_draws, **sizes)
    num_lanes, chunk = sizes["num_lanes"], sizes["lane_chunk"]
    driver = Driver(make(), num_lanes, chunk * num_lanes, total)
    taken = driver.rest(num_draws)
    for lane in range(num_lanes):
        items = [
            number * chunk * num_lanes + lane * chunk + row
            for number in range(total)
            for row in range(chunk)
        ]
        echo = ej.echo(items, lane_spec(spec, lane, num_lanes), tags=True)
        expected = [(item, tags.repeat) for item, tags in echo]
        got = [use for draw in taken for use in draw[lane]]
        # Of several draws at once the last ones may be cut off at the end.
        if num_draws > 1:
            assert len(got) > len(expected) - num_draws * sizes["lane_batch"]
            expected = expected[: len(got)]
        assert got == expected
    if num_draws == 1:
        uses = Counter(item for draw in taken for lane in draw for item, _ in lane)
        assert len(uses) == total * chunk * num_lanes
        counts = driver.draws.counts
        assert counts.uses == sum(uses.values()) == counts.fresh + counts.repeats


@settings(max_examples=100, deadline=None)
@given(at=st.integers(0, 30), **CASES)
@example(  # lanes that have drifted apart, so that their oldest chunks differ
    at=16,
    order="shuffle",
    factor="2",
    num_lanes=3,
    lane_batch=4,
    lane_chunk=7,
    buffer=4,
    total=9,
    num_draws=1,
)
def test_draws_continue_from_every_state(at, total, num_draws, **sizes):
    _, make = _case(max_draws=num_draws, **sizes)
    lanes, chunk_items = sizes["num_lanes"], sizes["lane_chunk"] * sizes["num_lanes"]
    whole = Driver(make(), lanes, chunk_items, total)
    for _ in range(at // num_draws):
        whole.take(num_draws)
    state = json.loads(json.dumps(whole.draws.get_state()))
    first, written = whole.draws.first_chunk, whole.draws.num_chunks
    resumed = Driver(make(), lanes, chunk_items, total)
    held = resumed.draws.set_state(state)
    assert [number for number, _ in held] == list(range(first, written))
    assert resumed.draws.first_chunk == first
    for number, slots in held:
        resumed.hold(number, slots)
    assert resumed.rest(num_draws) == whole.rest(num_draws)
    assert resumed.draws.get_state() == whole.draws.get_state()


@pytest.mark.parametrize("order", ORDERS)
def test_chunks_are_read_when_they_are_needed_and_not_before(order):
    """With e = 4 and chunks of a batch: one chunk in four draws, evenly."""
    spec = ej.EchoSpec(4, 64, order, 16)
    driver = Driver(FixedDraws(spec, chunk_items=16), 1, 16, 1000)
    driver.take(1)
    while driver.draws.num_chunks < 40:
        driver.take(1)
    before = driver.reads
    reads = []
    for _ in range(40):
        driver.take(1)
        reads.append(driver.reads - before)
    least = [k // 4 for k in range(1, 41)]
    slack = 3 if order == "shuffle" else 1
    assert all(
        low - slack <= got <= low + slack for low, got in zip(least, reads, strict=True)
    )


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
        ({"chunk_items": 12, "num_lanes": 8}, "chunk_items=12 .* use 16"),
        ({"chunk_items": 8, "num_lanes": 0}, "num_lanes=0 must be at least 1"),
        ({"chunk_items": 8, "num_lanes": 4}, "batch_size=6 .* use 8"),
    ],
)
def test_lanes_that_do_not_divide_are_refused_with_the_fix(sizes, message):
    with pytest.raises(ValueError, match=message):
        FixedDraws(ej.EchoSpec(2, batch_size=6), **sizes)


def test_a_buffer_too_small_for_a_lane_is_refused_as_the_lanes():
    spec = ej.EchoSpec(4, 32, "spread", 32)
    with pytest.raises(ValueError, match="in each of 4 lanes: buffer=8 is too small"):
        FixedDraws(spec, chunk_items=32, num_lanes=4)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"lanes": []}, "is not one of fixed draws"),
        ({"chunks": 0, "end": -1, "lanes": []}, "has 0 lanes, this echo has 1"),
    ],
)
def test_what_is_no_state_of_draws_is_refused(state, message):
    with pytest.raises(ValueError, match=message):
        FixedDraws(ej.EchoSpec(2, batch_size=4), chunk_items=4).set_state(state)


def _uses(draws, count):
    """Fresh index and repeat of every use of the next draws, lane after lane."""
    drawn = []
    for _ in range(count):
        while draws.need() is not Need.NO:
            draws.write()
        draw = draws.draw()
        drawn.append(np.stack([draw.fresh_index, draw.repeat], axis=-1))
    return np.stack(drawn) if drawn else None


@pytest.mark.parametrize(
    "make",
    [
        *(
            partial(FixedDraws, ej.EchoSpec(2.5, 64, order, 16, 3), chunk_items=16)
            for order in ORDERS
        ),
        partial(
            StochasticDraws,
            load=LoadSchedule(start=0.4, end=0.4),
            buffer=64,
            batch_size=16,
            chunk_items=16,
            seed=3,
        ),
        partial(AdaptiveDraws, buffer=64, batch_size=16, chunk_items=16, seed=3),
    ],
    ids=[*ORDERS, "stochastic", "adaptive"],
)
def test_lanes_draw_alike_wherever_the_others_are(make):
    whole = _uses(make(num_lanes=4), 30)
    parts = [
        _uses(make(num_lanes=4, lanes=range(first, first + 2)), 30) for first in (0, 2)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("is_stochastic", [False, True])
@given(
    factor=st.sampled_from([*FACTORS.values()]),
    order=st.sampled_from(["consecutive", "spread"]),
    buffer=st.sampled_from([96, 104, 160]),
    done=st.integers(0, 40),
    max_draws=st.sampled_from([1, 3]),
)
@settings(deadline=None, max_examples=40)
def test_parts_go_on_as_a_whole_and_a_whole_as_its_parts(
    is_stochastic, factor, order, buffer, done, max_draws
):
    """Of orders in which all lanes stand at the same chunk; see also `_takes_apart`."""

    def make(lanes=range(4)):
        sizes = {"chunk_items": 8, "num_lanes": 4, "max_draws": max_draws}
        if is_stochastic:
            load = LoadSchedule(start=0.6, end=0.6)
            return StochasticDraws(
                load=load, buffer=buffer, batch_size=8, lanes=lanes, seed=3, **sizes
            )
        spec = ej.EchoSpec(factor, buffer, order, 8, 3)
        return FixedDraws(spec, lanes=lanes, **sizes)

    whole, parts = make(), [make(range(2)), make(range(2, 4))]
    for draws in (whole, *parts):
        _uses(draws, done)
    state = whole.get_state()
    assert [part.get_state() for part in parts] == split_state(state, 2)
    assert joined_state(split_state(state, 2)) == state
    # So the upstream, which is read from there, is at one place for all of them.
    assert {part.first_chunk for part in parts} == {whole.first_chunk}
    rest = _uses(whole, 20)
    for part, own in zip(parts, split_state(state, 2), strict=True):
        part.set_state(own)
    again = np.concatenate([_uses(part, 20) for part in parts], axis=1)
    np.testing.assert_array_equal(again, rest)
    merged = make()
    merged.set_state(joined_state(split_state(state, 2)))
    np.testing.assert_array_equal(_uses(merged, 20), rest)


def test_states_of_different_draws_are_not_joined():
    state = {"chunks": 3, "end": -1, "lanes": ["a"]}
    with pytest.raises(ValueError, match="not of the same draws"):
        joined_state([state, {**state, "chunks": 4}])
