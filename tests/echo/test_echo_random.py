"""Specs drawn at random, of every mode and order, obey the laws in every store."""

from dataclasses import replace
from functools import partial

import pytest
from echo_cases import Fetched, host_batches, host_echo, item_of, specs
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.laws import assert_echo_laws

# Making a failing case smaller would take hours.
PHASES = [Phase.generate]
WAYS = {"items": host_echo, "batches": host_batches, "1 lane": None, "2 lanes": None}


@st.composite
def modes(draw):
    """A spec of any mode, whose sizes two lanes divide."""
    fixed = draw(specs(max_buffer=20))
    size = 2 * draw(st.integers(1, 3))
    buffer = 2 * size + 2 * draw(st.integers(0, 12))
    max_uses = draw(st.integers(1, 5))
    least = draw(st.integers(1, max_uses))
    start, end = draw(st.tuples(*[st.sampled_from([0.2, 0.4, 0.7, 1.0])] * 2))
    fetch = ej.FetchSchedule("p", "linear", start, end, 6)
    kinds = [
        replace(fixed, buffer=4 * fixed.buffer, batch_size=2 * fixed.batch_size),
        ej.AdaptiveSpec(max_uses, buffer, size, fixed.seed, min_uses=least),
        ej.StochasticSpec(fetch, buffer, size, fixed.seed),
    ]
    return draw(st.sampled_from([*kinds[:1] * 4, *kinds[1:] * 2]))


def assert_obeys(spec, way, num_items):
    """Checks all laws, and in lanes those that are not about a single stream."""
    is_fixed, size = isinstance(spec, ej.EchoSpec), spec.batch_size
    options = {"num_items": num_items, "make_item": item_of, "read_ahead": 0}
    make, laws = WAYS[way], {*range(1, 12)}
    if isinstance(spec, ej.AdaptiveSpec):
        options["read_ahead"] = 2 * size
    if make is None:
        lanes = int(way[0])
        rows = lanes if is_fixed else size
        prefetch = 2 * isinstance(spec, ej.AdaptiveSpec)
        make = partial(Fetched, prefetch=prefetch, lanes=lanes)
        # Two batches that are sent ahead, one that is being sent, two behind that.
        options["read_ahead"] = 5 * size if prefetch else 2 * rows
        # A device has whole host batches, and no log before the first one.
        num_items = max(1, num_items // rows) * rows
        if lanes > 1:
            # Every lane has its own schedule, order and drift.
            laws -= {1, 2, 3, 6, 7} if is_fixed else {6, 7}
            options["max_rereads"] = 10**6
        options["num_items"] = num_items
    assert_echo_laws(make, spec, laws=laws, **options)


@pytest.mark.parametrize(
    "examples", [3, pytest.param(125, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("way", WAYS)
def test_any_spec_obeys_the_laws(way, examples):
    @settings(max_examples=examples, phases=PHASES, derandomize=True, database=None)
    @given(modes(), st.integers(0, 14))
    def check(spec, num_items):
        assert_obeys(spec, way, num_items)

    check()


def test_states_name_the_oldest_item_in_use_also_soon_after_a_restore():
    spec = ej.EchoSpec("10/3", 76, "shuffle_buffer", 10, 5345403)
    assert_obeys(spec, "items", 13)
