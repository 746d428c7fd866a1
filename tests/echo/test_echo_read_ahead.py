"""Reading ahead of a device: nothing is lost, and sending holds up no read."""

import copy
import itertools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from echo_jax.echo import reader
from echo_jax.echo.read_ahead import ReadAhead
from echo_jax.echo.stores.device import EchoBuffer

_SOON_S = 60.0


class Upstream:
    """Counts up to a total, and raises once before some numbers."""

    def __init__(self, total, failures=()):
        self.total, self.failures = total, set(failures)
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place in self.failures:
            self.failures.discard(self.place)
            raise OSError(f"before {self.place}")
        if self.place == self.total:
            raise StopIteration
        self.place += 1
        return self.place - 1

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


def rest_of(ahead):
    """All values, asking again after every error, with the state before each."""
    found, errors = [], 0
    while True:
        state = copy.deepcopy(ahead.get_state())
        try:
            found.append((state["place"], next(ahead)))
        except OSError:
            errors += 1
        except StopIteration:
            return found, errors


@settings(max_examples=40)
@given(st.integers(0, 9), st.sets(st.integers(0, 8)), st.integers(0, 9))
def test_values_errors_and_states_are_those_of_the_upstream(total, failures, place):
    failures = {at for at in failures if at < total}
    ahead = ReadAhead(Upstream(total, failures))
    found, errors = rest_of(ahead)
    assert found == [(value, value) for value in range(total)]
    assert errors == len(failures)
    ahead.set_state({"place": min(place, total)})
    again, _ = rest_of(ahead)
    assert again == found[place:]
    ahead.close()


def test_an_upstream_without_a_state_has_none_here():
    ahead = ReadAhead(iter("a"))
    assert not hasattr(ahead, "get_state") and not hasattr(ahead, "set_state")
    ahead.close()


def test_the_next_batch_is_read_while_one_is_sent(monkeypatch):
    """The second is asked for before the first is on its way."""
    asked = [threading.Event() for _ in range(2)]

    def batches():
        for number in itertools.count():
            if number < len(asked):
                asked[number].set()
            yield {"x": np.full(8, number)}

    put, waited = EchoBuffer.put, []

    def slow_put(self, batch):
        waited.append(asked[1].wait(_SOON_S))
        return put(self, batch)

    monkeypatch.setattr(EchoBuffer, "put", slow_put)
    with ej.device.echo_batches(
        batches(), ej.EchoSpec(2, batch_size=8), num_lanes=8
    ) as echo:
        # The look at the first batch, for its layout, reads no other.
        assert not asked[1].is_set()
        assert next(echo)["x"].tolist() == [0] * 8
    assert waited[0]


class Hanging(Upstream):
    """Never gives its second number until it may."""

    def __init__(self):
        super().__init__(2)
        self.hangs, self.may = threading.Event(), threading.Event()

    def __next__(self):
        if self.place == 1:
            self.hangs.set()
            self.may.wait(_SOON_S)
        return super().__next__()


def test_who_waits_is_told_of_a_close(monkeypatch):
    monkeypatch.setattr(reader, "_CLOSE_S", 0.01)
    upstream = Hanging()
    ahead, told = ReadAhead(upstream), []

    def wait():
        next(ahead)
        with pytest.raises(ValueError, match="was closed while it waited"):
            next(ahead)
        told.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    assert upstream.hangs.wait(_SOON_S)
    ahead.close()
    thread.join(_SOON_S)
    assert told
    upstream.may.set()
