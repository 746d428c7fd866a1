"""`echo` on any iterator: kinds of items, counts, states, and what it refuses."""

import contextlib
import itertools
import json

import numpy as np
import pytest
from echo_cases import ORDERS, Stacked, host_echo, spec_of

import echo_jax as ej
from echo_jax.echo.laws import (
    CountingUpstream,
    Interrupted,
    assert_echo_laws,
    interruption,
)

# Many items here are arrays of some rows, as a batch is.
pytestmark = pytest.mark.filterwarnings("ignore:each item that ej.echo")


@pytest.mark.parametrize(("order", "size"), [("window_shuffle", 3), ("spread", 8)])
def test_laws_behind_an_upstream_of_batches(order, size):
    def make_echo(upstream, spec):
        return ej.echo_batches(Stacked(upstream, size), spec, tags=True)

    options = {"num_items": 13, "read_ahead": size - 1}
    assert_echo_laws(make_echo, spec_of(order, "2"), **options)
    assert_echo_laws(host_echo, spec_of(order, "2"), laws=[8], others=[make_echo])


def test_tags_of_items_are_integers_and_of_batches_arrays():
    spec = ej.EchoSpec(2, batch_size=4)
    _, tags = next(ej.echo(range(4), spec, tags=True))
    assert (type(tags.fresh_index), type(tags.repeat)) == (int, int)
    batches = ej.echo(range(4), spec, batch=True, tags=True)
    _, tags = next(batches)
    assert tags.fresh_index.tolist() == [0, 0, 1, 1]
    assert tags.repeat.tolist() == [0, 1, 0, 1]
    assert (tags.fresh_index.dtype, tags.repeat.dtype) == (np.int64, np.int32)
    assert batches.tags.fresh_index is tags.fresh_index
    assert batches.tags.repeat is tags.repeat


@pytest.mark.parametrize("order", ORDERS)
def test_counts_are_exact_after_every_output_and_restore(order):
    spec = spec_of(order, "1.5")
    upstream = CountingUpstream(list(range(19)))
    echo = ej.echo(upstream, spec, tags=True)
    assert echo.counts == ej.Counts(0, 0, 0)
    tags = []
    for _, tag in echo:
        tags.append(tag)
        repeats = sum(t.repeat > 0 for t in tags)
        assert (echo.counts.uses, echo.counts.repeats) == (len(tags), repeats)
        newest = max(t.fresh_index for t in tags)
        assert newest < echo.counts.fresh <= upstream.reads
        # Items that were read to find the end are counted when they are taken.
        assert echo.counts.fresh == upstream.reads or upstream.reads == 19
        other = ej.echo(CountingUpstream(list(range(19))), spec)
        other.set_state(echo.get_state())
        assert other.counts == echo.counts
    assert echo.counts == ej.Counts(fresh=19, uses=28, repeats=9)


def test_an_interrupted_restore_gives_no_wrong_item():
    def make_echo():
        upstream = CountingUpstream(list(range(23)))
        return ej.echo(upstream, spec_of("spread", "1.5"), tags=True)

    echo, whole, refused = make_echo(), [*make_echo()], 0
    assert [*itertools.islice(echo, 4)] == whole[:4]
    state = echo.get_state()
    for line in range(1, 1600, 50):
        other = make_echo()
        with contextlib.suppress(Interrupted), interruption(line):
            other.set_state(state)
        try:
            found = [*other]
        except RuntimeError:
            refused += 1
            other.set_state(state)
            found = [*other]
        assert found in (whole, whole[4:])
    assert 3 < refused < 25


def test_echoes_nest():
    """An echo is an upstream: of states too."""

    def make_echo(upstream, spec):
        # Every item is read twice, as items of their own.
        inner = ej.echo(upstream, ej.EchoSpec(2))
        return ej.echo(inner, spec)

    echo = make_echo(CountingUpstream("abcd"), ej.EchoSpec("3/2"))
    assert "".join(echo) == "aaabbbcccddd"
    echo = make_echo(CountingUpstream("abcd"), ej.EchoSpec("3/2"))
    assert "".join(itertools.islice(echo, 5)) == "aaabb"
    other = make_echo(CountingUpstream("abcd"), ej.EchoSpec("3/2"))
    other.set_state(json.loads(json.dumps(echo.get_state())))
    assert "".join(other) == "bcccddd"


def test_an_upstream_without_states_echoes_but_has_none():
    echo = ej.echo((k for k in range(3)), ej.EchoSpec(2))
    assert list(echo) == [0, 0, 1, 1, 2, 2]
    with pytest.raises(TypeError) as caught:
        echo.get_state()
    message = str(caught.value)
    assert "a generator, has no get_state and set_state" in message
    assert "give an iterator that has both" in message


def middle_states(order, *, batch):
    """Uses of an echo with a large buffer, and states from all over a round."""
    spec = ej.EchoSpec(2.5, 1000, order, 32)
    echo = ej.echo(CountingUpstream(list(range(3000))), spec, batch=batch)
    uses, states = [], {}
    for position in range(100 if batch else 2000):
        if position % (7 if batch else 211) == 0:
            states[position] = echo.get_state()
        uses.append(next(echo))
    return spec, uses, states


@pytest.mark.parametrize(
    ("order", "batch"),
    [
        ("window_shuffle", False),
        ("window_shuffle", True),
        ("spread", True),
        ("shuffle_buffer", False),
    ],
)
def test_a_restore_reads_no_more_than_two_buffers(order, batch):
    spec, uses, states = middle_states(order, batch=batch)
    for position, state in states.items():
        upstream = CountingUpstream(list(range(3000)))
        restored = ej.echo(upstream, spec, batch=batch)
        restored.set_state(state)
        if order != "shuffle_buffer":
            assert upstream.reads <= 2 * spec.buffer
        for use in uses[position : position + 20]:
            np.testing.assert_array_equal(next(restored), use)


def test_batches_of_items_used_once_ask_the_upstream_once_each_for_its_state():
    class Asked(CountingUpstream):
        times = 0

        def get_state(self):
            self.times += 1
            return super().get_state()

    upstream = Asked(list(range(40)))
    echo = ej.echo(upstream, ej.EchoSpec(1, batch_size=8), batch=True)
    assert [next(echo).sum() for _ in range(4)] == [28, 92, 156, 220]
    assert upstream.times <= 5


def test_a_state_that_leaves_out_items_in_use_is_refused():
    spec, _, states = middle_states("window_shuffle", batch=True)
    for state in states.values():
        echo = ej.echo(CountingUpstream(list(range(3000))), spec, batch=True)
        with pytest.raises(ValueError, match="skip, an integer of at least 0"):
            echo.set_state(state | {"skip": -1})
        untouched = ej.echo(range(3000), spec, batch=True)
        assert next(echo).tolist() == next(untouched).tolist()
        echo.set_state(state)


def test_the_state_of_another_thing_is_refused():
    echo = ej.echo(CountingUpstream([1]), ej.EchoSpec(2))
    with pytest.raises(ValueError, match=r"'next_item': 3.*what get_state returned"):
        echo.set_state({"next_item": 3})
    state = echo.get_state()
    with pytest.raises(ValueError, match=r"not the state of an echo plan"):
        echo.set_state(state | {"plan": {"round": 1}})
    echo.set_state(state)
    assert list(echo) == [1, 1]
