"""`spread`: no twins, an even feed, bounded lags, and buffers that allow them."""

import itertools
import math
import re
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from echo_cases import host_echo, specs, take
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo.laws import assert_echo_laws
from echo_jax.echo.orders import spread
from echo_jax.echo.orders.spread import CohortSizes, _Windows
from echo_jax.echo.plans.fixed import FixedPlan


def first_uses(spec, n):
    """Index and repeat of the first ``n`` uses."""
    parts = take(FixedPlan(spec), n)
    return (
        np.concatenate([part.fresh_index[0] for part in parts]),
        np.concatenate([part.repeat[0] for part in parts]),
    )


@settings(max_examples=60)
@given(specs(orders=["spread"], max_buffer=100), st.integers(100, 400))
def test_what_spread_promises_holds_for_any_spec(spec, num_items):
    laws = [1, 3, 6]
    assert_echo_laws(
        host_echo, spec, num_items=num_items, laws=laws, make_item=lambda index: index
    )


@pytest.mark.parametrize(
    ("factor", "buffer", "batch_size"),
    [(2, 24, 16), (2.5, 34, 16), (4, 36, 16), (7.3, 90, 64), (1.15, 30, 32)],
)
def test_the_smallest_buffers_part_twins_too(factor, buffer, batch_size):
    """Where a round is hardly longer than a batch, items may hardly move."""
    spec = ej.EchoSpec(factor, buffer, "spread", batch_size)
    index, _ = first_uses(spec, 1000 * batch_size)
    assert all(np.unique(row).size == batch_size for row in index.reshape(1000, -1))


@settings(max_examples=200)
@given(specs(orders=["spread"], max_buffer=5000))
def test_a_restore_reads_at_most_four_buffers(spec):
    """The rounds that an item lives for, warm-up included, hold so many items."""
    if spec.schedule.max_factor == 1:
        return
    sizes = CohortSizes(spec.schedule, spec.buffer, spec.batch_size)
    alive = [
        sum(sizes.size(r - age) for age in range(min(sizes.max_uses, r + 1)))
        for r in range(len(sizes.warm) + sizes.max_uses)
    ]
    factor = spec.schedule.constant
    bound = 4
    if factor is None or factor.denominator == 1:
        bound = 2
    elif factor > 2:
        bound = 3
    assert max(alive) <= bound * spec.buffer


@pytest.mark.parametrize(
    ("factor", "buffer"),
    [(1000, 4000), (999.5, 4000), ({0: 1000, 5: 1}, 1_100_000)],
)
def test_rounds_are_laid_out_in_one_look_at_each(factor, buffer, monkeypatch):
    """Not in one at every cohort of each: that took seconds."""
    looks = []
    survivors = CohortSizes._survivors

    def counted(self, size, age):
        looks.append(age)
        return survivors(self, size, age)

    monkeypatch.setattr(CohortSizes, "_survivors", counted)
    schedule = ej.EchoSpec(factor, buffer, "spread", 2).schedule
    sizes = CohortSizes(schedule, buffer, 2)
    assert len(looks) < 10 * (len(sizes.warm) + sizes.max_uses)


def test_a_large_factor_takes_memory_for_its_buffer_alone():
    tracemalloc.start()
    try:
        FixedPlan(ej.EchoSpec(10_000, 40_000, "spread", 32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500 * 40_000
    with pytest.raises(ValueError, match="factors of at most 10000, and this one is"):
        FixedPlan(ej.EchoSpec(10_000.5, 40_000, "spread", 32))


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 5))
def test_windows_recur_where_the_last_numbers_were_the_last_before(numbers, length):
    grown = []
    windows, before = _Windows(length, grown), set()
    for number in numbers:
        grown.append(number)
        latest = tuple(grown[-length:])
        assert windows.recurs() == (latest in before)
        if len(grown) >= length:
            before.add(latest)


def test_equal_hashes_of_windows_are_looked_into(monkeypatch):
    monkeypatch.setattr(spread, "_PRIME", 1)
    grown = []
    windows = _Windows(2, grown)
    for number in (1, 2, 3, 4):
        grown.append(number)
        assert not windows.recurs()


def test_a_buffer_holds_a_lag_as_long_as_it_can():
    """On average an item stays so long that the buffer is nearly full."""
    spec = ej.EchoSpec(4, 4096, "spread", 64)
    index, repeat = first_uses(spec, 200_000)
    position = np.arange(index.size)
    order = np.lexsort((repeat, index))
    follows = index[order][1:] == index[order][:-1]
    lags = np.diff(position[order])[follows]
    late = lags[position[order][1:][follows] > index.size // 2]
    # An item that lies three lags long, at one fresh item in four uses.
    assert late.mean() * 3 / 4 > 0.9 * spec.buffer


def test_the_lag_grows_from_the_first_batch_on():
    spec = ej.EchoSpec(4, 4096, "spread", 64)
    index, repeat = first_uses(spec, 30_000)
    assert (repeat[:64] == 0).all()
    assert (repeat[64:128] > 0).any()
    seen, lags = {}, []
    for position, item in enumerate(index.tolist()):
        if item in seen:
            lags.append(position - seen[item])
        seen[item] = position
    thirds = [np.mean(part) for part in np.array_split(lags, 3)]
    assert thirds == sorted(thirds)


def test_neighbours_change_from_round_to_round():
    """Two items that came one after the other do not stay so."""
    index, repeat = first_uses(ej.EchoSpec(4, 1024, "spread", 16), 40_000)
    uses = zip(index.tolist(), repeat.tolist(), strict=True)
    following = {use: after for use, (after, _) in itertools.pairwise(uses)}
    kept = [
        following.get((item, later)) == after
        for (item, repeat), after in following.items()
        if repeat == 0
        for later in (1, 2, 3)
    ]
    assert np.mean(kept) < 0.02


def test_a_seed_gives_another_order_of_the_same_feed():
    one, two = (
        first_uses(ej.EchoSpec(2.5, 64, "spread", 8, seed), 4000) for seed in (1, 2)
    )
    assert (one[0] != two[0]).mean() > 0.3
    assert (one[1] == two[1]).all()


def test_factor_one_is_the_identity_even_without_a_buffer():
    index, repeat = first_uses(ej.EchoSpec(1, 1, "spread", 64), 500)
    assert index.tolist() == list(range(500))
    assert not repeat.any()


@pytest.mark.parametrize("factor", [1.15, 2, 4, 7.3, {0: 3, 20: 1.1}])
@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_a_small_buffer_is_refused_by_its_value(factor, batch_size):
    with pytest.raises(ValueError) as caught:
        ej.echo([], ej.EchoSpec(factor, 1, "spread", batch_size))
    assert str(caught.value).startswith("buffer=1 is too small for order='spread'")
    assert f"a batch of {batch_size} at factor" in str(caught.value)
    assert "or a smaller batch_size" in str(caught.value)


def test_the_buffer_that_a_refusal_advises_is_the_smallest_that_does():
    factors = [1.01, 1.15, 1.5, 2, 2.5, 4, 7.3, {0: 3, 20: 1.1}]
    for factor, batch_size in itertools.product(factors, [1, 3, 4, 8]):
        with pytest.raises(ValueError) as caught:
            ej.echo([], ej.EchoSpec(factor, 1, "spread", batch_size))
        advised = int(re.search(r"use buffer=(\d+) or more", str(caught.value))[1])
        with pytest.raises(ValueError, match=rf"={advised - 1} .*={advised} or more"):
            ej.echo([], ej.EchoSpec(factor, advised - 1, "spread", batch_size))
        for buffer in (advised, advised + 1, 2 * advised, 10 * advised):
            ej.echo([], ej.EchoSpec(factor, buffer, "spread", batch_size))


@settings(max_examples=60)
@given(
    st.fractions(Fraction(21, 20), 8, max_denominator=20),
    st.integers(1, 32),
    st.integers(1, 3),
)
def test_cohorts_tile_the_upstream(factor, batch_size, roomy):
    spec = ej.EchoSpec(factor, 400 * roomy, "spread", batch_size)
    sizes = CohortSizes(spec.schedule, spec.buffer, batch_size)
    start = 0
    for cohort in range(len(sizes.warm) + 3):
        assert sizes.start(cohort) == start
        assert sizes.cohort_from(start) <= cohort
        start += sizes.size(cohort)
        if sizes.size(cohort):
            assert sizes.cohort_from(start - sizes.size(cohort) + 1) == cohort + 1
    assert sizes.size(len(sizes.warm) + 2) == sizes.steady
    # A round is a batch at least, for an item comes once in a round.
    assert sizes.round_length(len(sizes.warm) + 9) >= batch_size
    assert sizes.steady <= 2 * spec.buffer


def test_the_feed_is_even_once_warm():
    """Fresh items of a batch: floor(B / e) or ceil(B / e), spelt out once."""
    factor, batch_size = Fraction(5, 2), 16
    spec = ej.EchoSpec(factor, 300, "spread", batch_size)
    _, repeat = first_uses(spec, 1000 * batch_size)
    fresh = (repeat.reshape(-1, batch_size) == 0).sum(axis=1)
    assert fresh[0] == batch_size
    assert set(fresh[-500:].tolist()) == {
        math.floor(batch_size / factor),
        math.ceil(batch_size / factor),
    }
    # And with no drift: any stretch of batches takes its share, to one item.
    taken = np.array(list(itertools.accumulate(fresh[-500:].tolist())))
    share = np.arange(1, 501) * float(batch_size / factor)
    assert np.ptp(taken - share) < 2
