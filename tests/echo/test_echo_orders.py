"""The orders: the paper's shuffle buffer beside a list, and what `spread` promises."""

import itertools
import json
import re
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from echo_cases import Fetched, host_echo, item_of, specs, take
from hypothesis import example, given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.config import check_config, default_config
from echo_jax.echo.keys import mix
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws
from echo_jax.echo.orders import ORDERS, Order, Piece
from echo_jax.echo.plans import FixedPlan


def test_every_order_can_be_configured_and_is_in_the_docs():
    config = default_config()
    config.workload = "lm"
    docs = (Path(__file__).parents[2] / "docs/in-your-trainer.md").read_text()
    for config.echo.order in ORDERS:
        check_config(config)
        sentence = ORDERS[config.echo.order].sentence
        assert f"| `{config.echo.order}` | {sentence} |" in docs


def first_uses(spec, n):
    parts = take(FixedPlan(spec), n, spec.batch_size)
    pairs = [(part.fresh_index[0], part.repeat[0]) for part in parts]
    return map(np.concatenate, zip(*pairs, strict=True))


def by_a_list(spec, num_items):
    """(index, repeat) of all uses, as ``dataset.repeat(e).shuffle(M)`` gives them."""
    counts, _ = spec.schedule.uses(0, num_items, 0)
    stream = iter(np.repeat(np.arange(num_items), counts).tolist())
    buffer = list(itertools.islice(stream, spec.buffer))
    buffer += [None] * (spec.buffer - len(buffer))
    repeats = Counter()
    # 32 random bits, as a fraction of the buffer; 3 is the purpose of the sequence.
    start = int(mix(int(mix(0, np.array([spec.seed]))[0]), np.array([3]))[0])
    for draw in itertools.count():
        if buffer.count(None) == spec.buffer:
            return
        slot = (int(mix(start, np.array([draw]))[0]) >> 32) * spec.buffer >> 32
        item, buffer[slot] = buffer[slot], next(stream, None)
        if item is not None:
            yield item, repeats[item]
            repeats[item] += 1


def in_batches(spec, num_items):
    for _, tags in ej.echo(range(num_items), spec, batch=True, tags=True):
        yield from zip(tags.fresh_index.tolist(), tags.repeat.tolist(), strict=True)


@settings(max_examples=30)
@given(specs(["shuffle_buffer"], max_buffer=40), st.integers(0, 90))
@example(ej.EchoSpec(7.3, 50, "shuffle_buffer", 7, 4), 400)  # many rounds
def test_shuffle_buffer_is_the_algorithm_of_the_paper(spec, num_items):
    expected = list(by_a_list(spec, num_items))
    assert list(in_batches(spec, num_items)) == expected
    one_by_one = ej.echo(range(num_items), spec, tags=True)
    assert [tuple(tags) for _, tags in one_by_one] == expected


def test_a_restore_of_shuffle_buffer_reads_what_the_docs_say():
    """About M (ln M + 2) / e items: 697 for M = 192, e = 2."""
    spec = ej.EchoSpec(2, 192, "shuffle_buffer", batch_size=16)
    rereads = []
    for at in range(4000, 8000, 2000):
        echo = ej.echo(CountingUpstream(range(9000)), spec)
        for _ in itertools.islice(echo, at):
            pass
        upstream = CountingUpstream(range(9000))
        other, state = ej.echo(upstream, spec), json.dumps(echo.get_state())
        assert len(state) < 300
        other.set_state(json.loads(state))
        rereads.append(upstream.reads)
        assert list(itertools.islice(other, 50)) == list(itertools.islice(echo, 50))
    assert 400 < np.mean(rereads) < 900


# --- `spread`


@settings(max_examples=15)
@given(specs(orders=["spread"], max_buffer=100), st.integers(100, 300))
def test_what_spread_promises_holds_for_any_spec(spec, num_items):
    items = {"num_items": num_items, "make_item": lambda index: index}
    assert_echo_laws(host_echo, spec, laws=[1, 3, 6], **items)


def test_a_large_factor_takes_memory_for_its_buffer_alone():
    tracemalloc.start()
    try:
        FixedPlan(ej.EchoSpec(2_000, 8_000, "spread", 32))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 600 * 8_000
    with pytest.raises(ValueError, match="factors of at most 10000, and this one is"):
        FixedPlan(ej.EchoSpec(10_000.5, 40_000, "spread", 32))


def test_lags_grow_from_the_first_batch_on_until_the_buffer_is_full():
    spec = ej.EchoSpec(4, 1024, "spread", 16)
    index, repeat = first_uses(spec, 50_000)
    assert (repeat[:16] == 0).all() and (repeat[16:32] > 0).any()
    position = np.arange(index.size)
    order = np.lexsort((repeat, index))
    follows = index[order][1:] == index[order][:-1]
    lags = np.diff(position[order])[follows]
    at = position[order][1:][follows]
    thirds = [lags[(at >= low) & (at < low + 2500)].mean() for low in (0, 2500, 5000)]
    assert thirds == sorted(thirds)
    # An item stays for three lags, at one fresh item in four uses.
    assert lags[at > index.size // 2].mean() * 3 / 4 > 0.9 * spec.buffer
    # Two items that came one after the other do not stay so.
    for later in (1, 2, 3):
        assert np.mean(np.diff(index[repeat == later]) == 1) < 0.02
    # Once warm, any stretch of batches takes its share of fresh items, to one item.
    fresh = (repeat.reshape(-1, 16) == 0).sum(axis=1)
    assert fresh[0] == 16
    assert np.ptp(np.cumsum(fresh[-500:]) - np.arange(1, 501) * 4) < 2


def test_the_buffer_that_a_refusal_advises_is_the_smallest_that_does():
    factors = [1.01, 1.5, 2, 7.3, {0: 3, 20: 1.1}]
    for factor, batch_size in itertools.product(factors, [1, 64]):
        with pytest.raises(ValueError) as caught:
            ej.echo([], ej.EchoSpec(factor, 1, "spread", batch_size))
        said = str(caught.value)
        why = "a batch of 64 would hold an item twice"
        assert (why if batch_size > 1 else "would be back to back") in said
        advised = int(re.search(r"Use buffer=(\d+) or more", said)[1])
        with pytest.raises(ValueError, match=rf"={advised - 1} .*={advised} or more"):
            ej.echo([], ej.EchoSpec(factor, advised - 1, "spread", batch_size))
        for buffer in (advised, advised + 1, 10 * advised):
            ej.echo([], ej.EchoSpec(factor, buffer, "spread", batch_size))


# --- An order of one's own.


class ReversedPairs(Order):
    """The uses of items 1, 0, 3, 2, ..."""

    name = "reversed_pairs"
    sentence = "back to back, in pairs of items, the second one first"
    stride = 2

    def __post_init__(self):
        self.num_slots = self.batch_size + 4
        self.window = self.num_slots + 1

    def pieces(self, round_, anchor, carry):
        while True:
            uses, after = self.schedule.uses(anchor, 2, carry)
            index = np.repeat([anchor + 1, anchor], uses[::-1])
            repeat = np.concatenate([np.arange(n) for n in uses[::-1]])
            last = repeat == uses[index - anchor] - 1
            yield Piece(round_, anchor, carry, index, repeat.astype(np.int32), last)
            round_, anchor, carry = round_ + 1, anchor + 2, after

    def most_rereads(self):
        return 2

    def broken(self, uses, due):
        pairs = [index // 2 for index, _ in uses]
        for position, (before, pair) in enumerate(itertools.pairwise(pairs)):
            if pair < before:
                yield f"at use {position + 1}", f"pair {before} or later", pair


def test_a_new_order_is_one_class(monkeypatch):
    with pytest.raises(ValueError, match=r"'reversed_pairs' is unknown; use one of 'c"):
        ej.EchoSpec(2.5, 4, "reversed_pairs")
    monkeypatch.setitem(ORDERS, ReversedPairs.name, ReversedPairs)
    spec = ej.EchoSpec(2.5, 4, "reversed_pairs", batch_size=4)
    assert list(ej.echo(range(4), spec)) == [1, 1, 1, 0, 0, 3, 3, 3, 2, 2]
    assert_echo_laws(host_echo, spec, num_items=14)
    # A fresh echo reads the first host batch to lay its buffer out.
    options = {"max_rereads": 3, "make_item": item_of}
    assert_echo_laws(Fetched, spec, num_items=14, **options)
    with pytest.raises(AssertionError, match=r"law 6 .* pair 1 or later, got"):
        spread = ej.EchoSpec(2.5, 8, "spread")
        assert_echo_laws(lambda up, _: host_echo(up, spread), spec, laws=[6])
