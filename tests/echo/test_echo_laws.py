"""Every order and mode obeys the laws, on the host and in Grain."""

import itertools
import json

import grain
import numpy as np
import pytest
from echo_cases import (
    FACTORS,
    MODES,
    ORDERS,
    Stacked,
    ahead_of,
    grain_source,
    host_batches,
    host_echo,
    spec_of,
)

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws


def grain_echo(num_workers=0, **options):
    """Builds a Grain echo, behind so many worker processes."""

    def make_echo(upstream, spec):
        dataset = grain_source(upstream.items)
        if num_workers:
            workers = grain.MultiprocessingOptions(num_workers=num_workers)
            dataset = dataset.mp_prefetch(workers)
        # Counted in this process, after the workers.
        dataset = dataset.map(upstream.counted)
        return iter(ej.grain.echo(dataset, spec, tags=True, **options))

    return make_echo


SPECS = {order: spec_of(order, "1.5") for order in ORDERS} | MODES
STACKED = 5


def stacked_echo(upstream, spec):
    return ej.echo_batches(Stacked(upstream, STACKED), spec, tags=True)


WAYS = {
    "items": host_echo,
    "batches": host_batches,
    "grain-items": grain_echo(),
    "grain-batches": grain_echo(batch=True),
}


# A Latin square, in which any two of order, way and factor determine the third.
GRID = [
    pytest.param(order, way, factor, marks=[pytest.mark.slow][: (row + column) % 2])
    for (row, order), (column, way), (layer, factor) in itertools.product(
        *map(enumerate, (ORDERS, WAYS, FACTORS))
    )
    if (row + column + layer) % 4 == 0
]


@pytest.mark.parametrize(("order", "way", "factor"), GRID)
def test_every_order_obeys_the_laws(order, way, factor):
    # A restore at every output takes time of the order of the square of their number.
    is_long = factor in ("4", "7.3") or "grain" in way
    num_items = 9 if is_long and "items" in way else 15
    assert_echo_laws(WAYS[way], spec_of(order, factor), num_items=num_items)


@pytest.mark.parametrize("way", WAYS)
def test_short_streams_obey_the_laws(way):
    for spec in SPECS.values():
        options = {"read_ahead": ahead_of(spec)}
        assert_echo_laws(WAYS[way], spec, num_items=0, laws=[1, 2, 4, 7], **options)
        assert_echo_laws(WAYS[way], spec, num_items=1, **options)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", MODES)
def test_the_other_modes_obey_the_laws(mode, way):
    spec = MODES[mode]
    assert_echo_laws(WAYS[way], spec, num_items=13, read_ahead=ahead_of(spec))


@pytest.mark.parametrize("mode", MODES)
def test_the_other_modes_obey_the_laws_behind_a_stage_that_stacks(mode):
    spec = MODES[mode]
    assert_echo_laws(
        stacked_echo,
        spec,
        num_items=15,
        read_ahead=ahead_of(spec) + STACKED - 1,
        # Whole stacks: those of the oldest item in use, and of the newest.
        max_rereads=spec.buffer + spec.batch_size + STACKED,
    )


@pytest.mark.parametrize("name", SPECS)
def test_all_ways_give_one_sequence(name):
    others = [*WAYS.values(), stacked_echo]
    assert_echo_laws(host_echo, SPECS[name], laws=[8], others=others)


def test_a_long_stream_obeys_the_laws_of_order():
    spec = ej.EchoSpec(2.5, order="spread", buffer=200, batch_size=16)
    laws = [1, 3, 6, 7, 9]
    assert_echo_laws(host_batches, spec, num_items=2001, laws=laws)


@pytest.mark.slow
def test_worker_processes_change_nothing_not_even_after_a_restore():
    spec, items = spec_of("spread", "1.5"), [np.array(k) for k in range(37)]
    first = grain_echo(2)(CountingUpstream(items), spec)
    head = [next(first) for _ in range(21)]
    state = json.dumps(first.get_state())
    first.close()
    second = grain_echo(2)(CountingUpstream(items), spec)
    second.set_state(json.loads(state))
    assert [*head, *second] == [*ej.echo(items, spec, tags=True)]
    second.close()
