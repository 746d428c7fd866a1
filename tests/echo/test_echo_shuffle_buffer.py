"""`shuffle_buffer`: the paper's algorithm, beside a list that it is run over."""

import itertools
import json
from collections import Counter
from typing import get_args

import numpy as np
import pytest
from echo_cases import FACTORS, specs
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.config import default_config
from echo_jax.config.check import check_config
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.laws import CountingUpstream
from echo_jax.echo.laws.orders import ORDER_LAWS
from echo_jax.echo.orders import ORDERS, rounds_of, shuffle_buffer
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import Order


def drawn_slot(spec, draw):
    """The slot that a draw takes: 32 random bits, as a fraction of the buffer."""
    random = int(mix(sequence(spec.seed, 3), np.array([draw]))[0])
    return (random >> 32) * spec.buffer >> 32


def by_a_list(spec, num_items):
    """(index, repeat) of all uses: repeat, then a buffer from which a random one goes.

    As in Choi et al. 2019 and in ``dataset.repeat(e).shuffle(M)``; at the end an empty
    place may be drawn, and is drawn again.
    """
    counts, _ = spec.schedule.uses(0, num_items, 0)
    stream = iter(np.repeat(np.arange(num_items), counts).tolist())
    buffer = list(itertools.islice(stream, spec.buffer))
    buffer += [None] * (spec.buffer - len(buffer))
    repeats = Counter()
    for draw in itertools.count():
        if buffer.count(None) == spec.buffer:
            return
        slot = drawn_slot(spec, draw)
        item, buffer[slot] = buffer[slot], next(stream, None)
        if item is not None:
            yield item, repeats[item]
            repeats[item] += 1


def in_batches(spec, num_items):
    for _, tags in ej.echo(range(num_items), spec, batch=True, tags=True):
        yield from zip(tags.fresh_index.tolist(), tags.repeat.tolist(), strict=True)


@settings(max_examples=150)
@given(specs(["shuffle_buffer"], max_buffer=40), st.integers(0, 90))
def test_it_is_the_algorithm_of_the_paper(spec, num_items):
    expected = list(by_a_list(spec, num_items))
    assert list(in_batches(spec, num_items)) == expected
    one_by_one = ej.echo(range(num_items), spec, tags=True)
    assert [tuple(tags) for _, tags in one_by_one] == expected


@pytest.mark.parametrize("factor", FACTORS)
def test_it_is_the_algorithm_of_the_paper_for_many_rounds(factor):
    spec = ej.EchoSpec(FACTORS[factor], 50, "shuffle_buffer", batch_size=7, seed=4)
    assert list(in_batches(spec, 800)) == list(by_a_list(spec, 800))


def decided(plan, uses):
    """The indices that a plan decides next, in as many parts as it takes."""
    parts = []
    while uses:
        plan.write(plan.need(uses).must)
        parts.append(plan.next(uses).fresh_index[0])
        uses -= parts[-1].size
    return parts


def uses_of(spec, hundreds):
    """The first uses: asked for all at once, a plan would look at them in each part."""
    plan = FixedPlan(spec)
    parts = itertools.chain.from_iterable(decided(plan, 100) for _ in range(hundreds))
    return np.concatenate([*parts])


def test_how_long_a_use_stays_is_geometric_with_the_buffer_as_mean():
    """At factor 1 item n is use n, which draw n - M puts into a slot of M.

    So it stays for more than j draws with probability (1 - 1/M)^j: for 50 on average,
    with a standard deviation of 49.5. Of 199,000 uses the mean lies within 0.45 of
    that, and the share that stays longer within 0.0045, four deviations of each.
    """
    size, count = 50, 200_000
    index = uses_of(ej.EchoSpec(1, size, "shuffle_buffer", seed=7), count // 100)
    stayed = np.arange(count) - (index - size)
    # Of those that enter at the end some have not left yet.
    stayed = stayed[(index >= size) & (index < count - 1000)]
    assert stayed.min() == 1
    assert stayed.mean() == pytest.approx(size, abs=0.45)
    for draws in (1, 5, 20, 50, 100, 200):
        longer = np.mean(stayed > draws)
        assert longer == pytest.approx((1 - 1 / size) ** draws, abs=0.0045)


def test_every_slot_is_drawn_equally_often():
    """Of 10^6 draws from 10, each 100,000 times within 4.5 deviations of 300."""
    order = rounds_of(ej.EchoSpec(1, 10, "shuffle_buffer", seed=2))
    counts = np.bincount(order._slots(0, 10**6))
    assert counts.size == 10
    assert np.abs(counts - 100_000).max() < 1350


@pytest.mark.parametrize("factor", ["1", "2", "7.3", "piecewise", "by_item"])
def test_any_round_is_made_anew_from_its_three_integers(factor):
    spec = ej.EchoSpec(FACTORS[factor], 100, "shuffle_buffer", seed=3)
    for piece in itertools.islice(rounds_of(spec).pieces(0, 0, 0), 0, 60, 3):
        again = next(rounds_of(spec).pieces(piece.round, piece.anchor, piece.carry))
        assert (again.anchor, again.carry) == (piece.anchor, piece.carry)
        for name in ("index", "repeat", "last"):
            assert np.array_equal(getattr(again, name), getattr(piece, name))


def test_anchors_are_where_states_of_the_upstream_are_kept():
    order = rounds_of(ej.EchoSpec(2, 100, "shuffle_buffer"))
    assert [order.next_anchor(k) for k in (0, 1, 13, 14)] == [0, 13, 13, 26]
    for piece in itertools.islice(order.pieces(0, 0, 0), 60):
        assert order.next_anchor(piece.anchor) == piece.anchor
        assert piece.anchor <= piece.index.min()


def test_a_restore_reads_what_the_docs_say():
    """About M (ln M + 2) / e items: 697 for M = 192, e = 2; by the law 4467 at most."""
    spec = ej.EchoSpec(2, 192, "shuffle_buffer", batch_size=16)
    rereads = []
    for at in range(4000, 8000, 500):
        echo = ej.echo(CountingUpstream(range(9000)), spec)
        for _ in itertools.islice(echo, at):
            pass
        upstream = CountingUpstream(range(9000))
        other = ej.echo(upstream, spec)
        other.set_state(json.loads(json.dumps(echo.get_state())))
        rereads.append(upstream.reads)
        assert list(itertools.islice(other, 50)) == list(itertools.islice(echo, 50))
    assert 400 < np.mean(rereads) < 900
    # 192 * (ln 192 + 40) = 8689.4, and 192 draws of a round; 24 items to an anchor.
    assert ORDER_LAWS["shuffle_buffer"].most_rereads(spec) == 4441 + 24 + 2


def test_a_state_says_what_has_left_of_the_items_in_use():
    """By hand: see `test_echo_golden.py` for the first 32 uses, which are a round.

    Both uses of item 0 are among them, so the others are 30 uses of the items from
    1 on. The carry before item 1 is 1/2, one unit: 30 * 2 + 1.
    """
    echo = ej.echo(
        CountingUpstream(range(99)),
        ej.EchoSpec("5/2", 8, "shuffle_buffer", batch_size=4, seed=1),
    )
    for _ in itertools.islice(echo, 40):
        pass
    plan = echo.get_state()["plan"]
    assert (plan["round"], plan["position"]) == (1, 8)
    assert (plan["anchor"], plan["carry"]) == (1, 30 * 2 + 1)


def test_the_state_is_small_whatever_the_buffer():
    def state(buffer):
        upstream = CountingUpstream(range(9999))
        echo = ej.echo(upstream, ej.EchoSpec(2, buffer, "shuffle_buffer"))
        for _ in itertools.islice(echo, 9000):
            pass
        return json.dumps(echo.get_state())

    assert abs(len(state(1000)) - len(state(4))) < 20


def test_few_states_of_the_upstream_are_kept():
    """One for every stride of M/8 items, of those that a restore may read again."""
    spec = ej.EchoSpec(2, 200, "shuffle_buffer")
    echo = ej.echo(CountingUpstream(range(9999)), spec)
    for _ in itertools.islice(echo, 9000):
        pass
    assert 10 < len(echo._reader._saved) < 100


def test_a_batch_never_waits_for_slots_that_it_frees():
    """Also at factor 1, where every use in the buffer is another item."""
    for factor in (1, 1.15, 3):
        plan = FixedPlan(ej.EchoSpec(factor, 64, "shuffle_buffer", batch_size=16))
        assert max(len(decided(plan, 16)) for _ in range(2000)) == 1


def test_an_item_that_stays_beyond_all_bounds_is_an_error_and_no_wrong_item(
    monkeypatch,
):
    monkeypatch.setattr(shuffle_buffer, "_SURELY_GONE", -2)
    plan = FixedPlan(ej.EchoSpec(1, 100, "shuffle_buffer"))
    with pytest.raises(RuntimeError, match=r"has stayed in a shuffle buffer of 100"):
        for _ in range(1000):
            decided(plan, 100)


def test_a_buffer_beyond_what_can_be_drawn_is_refused():
    with pytest.raises(ValueError, match="use at most 2147483648"):
        rounds_of(ej.EchoSpec(2, 2**31 + 1, "shuffle_buffer"))
    rounds_of(ej.EchoSpec(2, 2**31, "shuffle_buffer"))


def test_every_order_has_a_name_rounds_and_laws_and_can_be_configured():
    assert list(ORDERS) == list(ORDER_LAWS) == list(get_args(Order))
    config = default_config()
    config.workload = "lm"
    for config.echo.order in ORDERS:
        check_config(config)
