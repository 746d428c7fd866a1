"""Every order obeys the laws, on the host and in Grain, whatever the factor."""

import itertools
import json
from dataclasses import replace

import grain
import numpy as np
import pytest
from echo_cases import (
    FACTORS,
    MANY_MODES,
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


STACKED = 5


def stacked_echo(upstream, spec):
    stacks = Stacked(upstream, STACKED)
    return ej.echo_batches(stacks, spec, tags=True)


MODE_ECHOES = {
    "items": host_echo,
    "batches": host_batches,
    "grain-items": grain_echo(),
    "grain-batches": grain_echo(batch=True),
}


def _cases(list_of_ways, factors, lengths_of):
    """Orders, ways to echo, factors and lengths; some by default, all with `slow`.

    By default each order with each factor takes one of two ways at a single item, in
    turns, and half of them the other way at its longest length: so that every order
    and every factor is there at both, and of eight factors with both ways.
    """
    grid = itertools.product(*map(enumerate, (ORDERS, list_of_ways, factors)))
    for (row, order), (way, made), (column, factor) in grid:
        is_turn = (row + column) % 2 == way
        is_long = not is_turn and (row // 2 + column + column // 2) % 2 == 0
        usual, *more = lengths_of(made, factor)
        for length, is_default in ((0, is_turn), (1, is_turn), (usual, is_long)):
            marks = () if is_default else pytest.mark.slow
            yield pytest.param(order, made, factor, length, marks=marks)
        for length in more:
            yield pytest.param(order, made, factor, length, marks=pytest.mark.slow)


def _host_lengths(make_echo, factor):
    """Lengths, by the number of outputs.

    A restore at every output takes time of the order of the square of that number.
    """
    has_many = make_echo is host_echo and factor in ("4", "7.3")
    return (11, 23) if has_many else (23, 37)


@pytest.mark.parametrize(
    ("order", "make_echo", "factor", "num_items"),
    [*_cases([host_echo, host_batches], FACTORS, _host_lengths)],
)
def test_laws_on_the_host(order, make_echo, factor, num_items):
    assert_echo_laws(make_echo, spec_of(order, factor), num_items=num_items)


@pytest.mark.parametrize(
    ("order", "batch", "factor", "num_items"),
    [*_cases([False, True], ["1.15", "2"], lambda *_: [15])],
)
def test_laws_in_grain(order, batch, factor, num_items):
    spec = spec_of(order, factor)
    assert_echo_laws(grain_echo(batch=batch), spec, num_items=num_items)


def _grain_cases():
    for batch, factor in itertools.product([False, True], FACTORS):
        # Items one by one, and large factors, are more outputs, each of them restored.
        lengths = (23, 37) if factor not in ("4", "7.3") else (11, 23)
        for num_items in (0, 1, lengths[batch]):
            yield batch, factor, num_items


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "factor", "num_items"), [*_grain_cases()])
@pytest.mark.parametrize("order", ORDERS)
def test_laws_in_grain_for_all_factors(order, batch, factor, num_items):
    spec = spec_of(order, factor)
    assert_echo_laws(grain_echo(batch=batch), spec, num_items=num_items)


@pytest.mark.parametrize("num_items", [0, 1, 23])
@pytest.mark.parametrize("make_echo", MODE_ECHOES.values(), ids=MODE_ECHOES)
@pytest.mark.parametrize("mode", MODES)
def test_laws_of_the_other_modes(mode, make_echo, num_items):
    spec = MODES[mode]
    assert_echo_laws(make_echo, spec, num_items=num_items, read_ahead=ahead_of(spec))


# One sequence is made everywhere, so other seeds are tried in one place.
SEED_CASES = [*((name, 0) for name in MODE_ECHOES), ("batches", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("num_items", [4, 29])
@pytest.mark.parametrize(("name", "seed"), SEED_CASES)
@pytest.mark.parametrize("mode", MANY_MODES)
def test_laws_of_the_other_modes_for_many_specs(mode, name, seed, num_items):
    spec, make_echo = replace(MANY_MODES[mode], seed=seed), MODE_ECHOES[name]
    assert_echo_laws(make_echo, spec, num_items=num_items, read_ahead=ahead_of(spec))


@pytest.mark.parametrize("mode", MODES)
def test_laws_of_the_other_modes_behind_a_stage_that_stacks(mode):
    spec = MODES[mode]
    assert_echo_laws(
        stacked_echo,
        spec,
        num_items=23,
        read_ahead=ahead_of(spec) + STACKED - 1,
        # Whole stacks: those of the oldest item in use, and of the newest.
        max_rereads=spec.buffer + spec.batch_size + STACKED,
    )


@pytest.mark.parametrize("mode", MODES)
def test_all_modes_give_one_sequence_everywhere(mode):
    others = [host_batches, stacked_echo, grain_echo(), grain_echo(batch=True)]
    assert_echo_laws(host_echo, MODES[mode], laws=[8], others=others)


@pytest.mark.parametrize("order", ORDERS)
def test_host_and_grain_and_batches_give_one_sequence(order):
    others = [host_batches, grain_echo(), grain_echo(batch=True)]
    assert_echo_laws(host_echo, spec_of(order, "1.5"), laws=[8], others=others)


def test_a_long_stream_obeys_the_laws_of_order():
    """Far beyond the warm-up, where `spread` promises an even feed."""
    spec = ej.EchoSpec(2.5, order="spread", buffer=200, batch_size=16)
    laws = [1, 3, 6, 7, 9]
    assert_echo_laws(host_batches, spec, num_items=2001, laws=laws)


@pytest.mark.slow
def test_worker_processes_change_nothing_not_even_after_a_restore():
    """Workers take seconds to start, so this starts them twice only."""
    spec = spec_of("spread", "1.5")
    items = [{"index": np.array(k)} for k in range(37)]
    expected = [
        (int(item["index"]), tags) for item, tags in ej.echo(items, spec, tags=True)
    ]
    first = grain_echo(2)(CountingUpstream(items), spec)
    head = [next(first) for _ in range(21)]
    state = json.dumps(first.get_state())
    first.close()
    second = grain_echo(2)(CountingUpstream(items), spec)
    second.set_state(json.loads(state))
    got = [(int(item["index"]), tags) for item, tags in [*head, *second]]
    second.close()
    assert got == expected


def _by_hand_but(kept, *lists):
    """All combinations: a few are slow tests, the others a campaign by hand."""
    return [
        pytest.param(
            *case, marks=pytest.mark.slow if case in kept else pytest.mark.exhaustive
        )
        for case in itertools.product(*lists)
    ]


CASE = ("order", "num_workers", "factor", "num_items")
# Workers know nothing of the factor and little of the order, and take seconds to start.
WORKER_CASES = _by_hand_but(
    {
        *((order, 2, "1.15", 37) for order in ORDERS),
        *(("spread", 2, "1.5", num_items) for num_items in (0, 1)),
        ("shuffle", 2, "by_item", 37),
    },
    ORDERS,
    [1, 2],
    FACTORS,
    [0, 1, 37],
)


@pytest.mark.parametrize(CASE, WORKER_CASES)
def test_laws_in_grain_behind_workers(order, num_workers, factor, num_items):
    # The laws that one run of the echo decides, at one start of workers.
    laws = [1, 3, 6, 7]
    make_echo = grain_echo(num_workers)
    assert_echo_laws(make_echo, spec_of(order, factor), num_items=num_items, laws=laws)


# Each starts workers a dozen times, which takes a minute. Every order obeys these laws
# without workers, and some of them with, in the tests above.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    CASE, list(itertools.product(ORDERS, [1, 2], FACTORS, [0, 1, 37]))
)
def test_all_laws_in_grain_behind_workers(order, num_workers, factor, num_items):
    assert_echo_laws(
        grain_echo(num_workers),
        spec_of(order, factor),
        num_items=num_items,
        positions=[num_items // 2],
        # What fails or waits would do so in the worker processes.
        laws=range(1, 10),
    )
