"""Loaders with state_dict and load_state_dict: their echo obeys the laws, too."""

import itertools
from functools import partial

import numpy as np
import pytest
from echo_cases import host_batches, spec_of

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws


class Loader:
    """Keeps its state as a StatefulDataLoader does: that of the latest pass."""

    def __init__(self, upstream):
        self.upstream = upstream
        self.num_passes = self.ended = 0
        self.begins_at = 0

    def __iter__(self):
        self.num_passes += 1
        self.upstream.set_state({"next_item": self.begins_at})
        self.ended = self.begins_at = 0
        return self

    def __next__(self):
        try:
            return next(self.upstream)
        except StopIteration:
            self.ended = 1
            raise

    def state_dict(self):
        return {**self.upstream.get_state(), "ended": self.ended}

    def load_state_dict(self, state):
        self.begins_at = 0 if state["ended"] else state["next_item"]


def test_the_echo_of_a_stateful_loader_obeys_the_laws():
    def of_loader(upstream, spec):
        return host_batches(Loader(upstream), spec)

    spec = spec_of("spread", "2")
    assert_echo_laws(of_loader, spec, num_items=13, others=[host_batches])


def batches(count):
    return [{"x": np.arange(8 * k, 8 * k + 8)} for k in range(count)]


@pytest.mark.parametrize(
    ("make_echo", "factor"),
    [(ej.echo, 1), (ej.echo_batches, 2), (ej.device.echo_batches, 2)],
)
def test_a_restored_pass_ends_where_the_pass_ends(make_echo, factor):
    def make():
        loader = Loader(CountingUpstream(batches(5)))
        spec = ej.EchoSpec(factor, order="consecutive", batch_size=8)
        return loader, make_echo(loader, spec)

    outputs = [np.asarray(batch["x"]) for batch in make()[1]]
    assert len(outputs) == 5 * factor
    for taken in (0, 1, len(outputs) + 1):
        _, echo = make()
        assert len([*itertools.islice(echo, taken)]) == min(taken, len(outputs))
        loader, other = make()
        other.set_state(echo.get_state())
        rest = [
            np.asarray(batch["x"]) for batch in iter(partial(next, other, None), None)
        ]
        np.testing.assert_array_equal(rest, outputs[taken:] or np.zeros(0))
        # Workers start with a pass. An echo on the devices looks at a batch first.
        assert loader.num_passes <= (2 if make_echo is ej.device.echo_batches else 1)


def test_an_echo_of_the_next_epoch_begins_at_its_start():
    loader = Loader(CountingUpstream(batches(3)))
    for _ in range(2):
        echo = ej.echo(loader, ej.EchoSpec(2))
        state = echo.get_state()
        assert state["upstream"]["loader"]["next_item"] == 0
        assert len([*echo]) == 6
