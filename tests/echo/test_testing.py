"""`ej.testing` catches broken echoes, each by the law that it breaks."""

import contextlib
import copy
import functools
import itertools
import math
import random
import sys
import threading
from dataclasses import replace
from fractions import Fraction

import jax
import numpy as np
import pytest
from echo_cases import LOAD, MODES, host_batches, host_echo

import echo_jax as ej
from echo_jax.echo.driver import Turn
from echo_jax.echo.laws import (
    Interrupted,
    assert_device_laws,
    assert_echo_laws,
    failures,
    interruption,
)


class OwnEcho:
    """A small correct echo, back to back, for the broken ones to get wrong."""

    def __init__(self, upstream, spec):
        self.upstream = upstream
        self.factor = Fraction(str(spec.factor))
        self.before = upstream.get_state()
        self.item = None
        self.index, self.repeat, self.left = -1, 0, 0
        self.turn = Turn()

    def __iter__(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        self.turn.close()

    def __next__(self):
        with self.turn:
            self.turn.check()
            self.turn.consistent = False
            try:
                return self.output()
            except StopIteration:
                self.turn.consistent = True
                raise

    def output(self):
        self.advance()
        return self.use(), ej.UseInfo(self.index, self.repeat)

    def advance(self):
        if self.left == 0:
            self.read()
        else:
            self.repeat += 1
        self.left -= 1

    def read(self):
        self.before = self.upstream.get_state()
        self.item = copy.deepcopy(next(self.upstream))
        self.index += 1
        self.repeat = 0
        self.left = self.num_uses(self.index)

    def num_uses(self, index):
        return math.floor((index + 1) * self.factor) - math.floor(index * self.factor)

    def use(self):
        return copy.deepcopy(self.item)

    def get_state(self):
        with self.turn:
            self.turn.check()
            state = {"index": self.index, "repeat": self.repeat, "left": self.left}
            if self.left == 0:
                self.before = self.upstream.get_state()
            return state | {"upstream": self.before}

    def set_state(self, state):
        self.turn = Turn()
        self.upstream.set_state(state["upstream"])
        self.index = state["index"]
        if state["left"]:
            self.index -= 1
            self.read()
        self.repeat, self.left = state["repeat"], state["left"]


def mutant(name, change):
    """An echo that changes what one of its methods returns."""
    method = getattr(OwnEcho, name)

    def changed(echo, *args):
        return change(echo, method(echo, *args), *args)

    return type("Mutant", (OwnEcho,), {name: changed})


saves = functools.partial(mutant, "get_state")
gives = functools.partial(mutant, "output")
uses = functools.partial(mutant, "num_uses")


def other_payload(_, use):
    item, tags = use
    return item | {"payload": item["payload"] + 1}, tags


def float_uses(echo, _, index):
    factor = float(echo.factor)
    return math.floor((index + 1) * factor) - math.floor(index * factor)


class LosesRepeat(OwnEcho):
    def set_state(self, state):
        super().set_state(state | {"repeat": 0})


class SkipAheadRestore(OwnEcho):
    """Restores exactly, but by reading the upstream from its start again."""

    def set_state(self, state):
        while (self.index, self.repeat) != (state["index"], state["repeat"]):
            self.advance()


class OldState(OwnEcho):
    """Restores well, but goes on to give out the state that it was given."""

    given = None

    def get_state(self):
        return self.given or super().get_state()

    def set_state(self, state):
        super().set_state(state)
        self.given = state


class DisturbedBySave(OwnEcho):
    def get_state(self):
        state = super().get_state()
        self.repeat += 1
        return state


class ExtraRead(OwnEcho):
    """Reads an item before the one that it gives out is used up."""

    def __init__(self, upstream, spec):
        super().__init__(upstream, spec)
        self.ahead = list(itertools.islice(upstream, 1))

    def read(self):
        if not self.ahead:
            raise StopIteration
        self.item = self.ahead.pop()
        self.ahead = list(itertools.islice(self.upstream, 1))
        self.index += 1
        self.repeat = 0
        self.left = self.num_uses(self.index)


aliased_item = gives(lambda echo, use: (echo.item, use[1]))
no_repeats = gives(lambda _, use: (use[0], use[1]._replace(repeat=0)))
from_one = gives(lambda _, use: (use[0], ej.UseInfo(use[1][0], use[1][1] + 1)))
off_by_one = saves(lambda _, state: state | {"left": max(0, state["left"] - 1)})
grows = saves(lambda echo, state: state | {"seen": [0] * (echo.index + 2)})
grows_in_bits = saves(lambda echo, state: state | {"seen": 1 << 20 * echo.index + 20})
float_state = saves(lambda _, state: state | {"left": float(state["left"])})
TWO_AND_A_HALF, ONE = ej.EchoSpec("5/2"), ej.EchoSpec(1)
OVERWRITTEN = "after all earlier outputs were overwritten"


@pytest.mark.parametrize(("factor", "num_items"), [(2, 0), (4, 1), (1, 23), (1.15, 23)])
def test_an_echo_of_ones_own_passes(factor, num_items):
    assert_echo_laws(OwnEcho, ej.EchoSpec(factor), num_items=num_items)


@pytest.mark.parametrize(
    ("make_echo", "law", "complaint", "spec"),
    [
        (aliased_item, 5, OVERWRITTEN, TWO_AND_A_HALF),
        (off_by_one, 4, "after a restore at output 1", TWO_AND_A_HALF),
        (OldState, 4, "restored again and again", TWO_AND_A_HALF),
        (DisturbedBySave, 4, "when states are asked for", TWO_AND_A_HALF),
        (SkipAheadRestore, 4, "items read again", TWO_AND_A_HALF),
        (grows, 4, "the structure", TWO_AND_A_HALF),
        (grows_in_bits, 4, "at most .* bytes", TWO_AND_A_HALF),
        (float_state, 4, r"a plain integer at \['left'\], got 0.0", TWO_AND_A_HALF),
        # Floats count 1.15 right for 99 items.
        (uses(float_uses), 1, "item 99", ej.EchoSpec(1.15)),
        (gives(other_payload), 1, "other content", TWO_AND_A_HALF),
        (gives(other_payload), 2, "other content", ONE),
        (ExtraRead, 2, "after 0 outputs: .* at most 0 .*, got 1", TWO_AND_A_HALF),
        (ExtraRead, 3, "after 0 outputs: .* at most 0 .*, got 1", TWO_AND_A_HALF),
        (no_repeats, 7, "item 0 repeat 1|0, 1", TWO_AND_A_HALF),
        (no_repeats, 9, "item 0 repeat 1, got item 0 repeat 0", TWO_AND_A_HALF),
        (from_one, 9, "item 0 repeat 0, got item 0 repeat 1", TWO_AND_A_HALF),
        (LosesRepeat, 4, "after a restore at output 2", ej.EchoSpec(4)),
    ],
)
def test_a_broken_echo_is_caught(make_echo, law, complaint, spec):
    num_items = 100 if law == 1 else 37
    with pytest.raises(AssertionError, match=rf"^law {law} \(.*{complaint}"):
        assert_echo_laws(make_echo, spec, num_items=num_items, laws=[law])


def per_host_draw(upstream, spec):
    """Swaps neighbours by the global generator, which differs between hosts."""
    uses = host_echo(upstream, spec)
    while pair := list(itertools.islice(uses, 2)):
        yield from pair if random.random() < 0.5 else reversed(pair)


SPREAD = ej.EchoSpec(4, order="spread", buffer=64, batch_size=8, seed=1)


def other(**fields):
    return lambda upstream, spec: host_echo(upstream, replace(spec, **fields))


def as_cycles(length):
    """A bursty feed: so many fresh items, then the same ones again and again."""

    def make_echo(upstream, spec):
        while block := list(itertools.islice(enumerate(upstream), length)):
            for repeat in range(int(spec.factor)):
                for index, item in block:
                    yield copy.deepcopy(item), ej.UseInfo(index, repeat)

    return make_echo


# At factor 5 the uses of item 2 are number 10 to 14; before output 2 there are ten.
PAPER = ej.EchoSpec(5, order="shuffle_buffer", buffer=8)


@pytest.mark.parametrize(
    ("make_echo", "spec", "complaint"),
    [
        # Lags of little more than a batch.
        (other(buffer=50), replace(SPREAD, buffer=256), "half to one and a half round"),
        (as_cycles(4), ej.EchoSpec(4), "a lag of 1"),
        (
            as_cycles(400),
            ej.EchoSpec(4, order="window_shuffle", buffer=8),
            "items 392 to 399",
        ),
        (as_cycles(3), PAPER, "one of the first 10 uses, got use 10, item 2 repeat 0"),
    ],
)
def test_an_order_that_breaks_its_promise_is_caught(make_echo, spec, complaint):
    with pytest.raises(AssertionError, match=rf"^law 6 .*{complaint}"):
        assert_echo_laws(make_echo, spec, num_items=800, laws=[6])


def test_laws_and_read_ahead_can_be_chosen():
    all_but_5 = {*range(1, 12)} - {5}
    assert_echo_laws(aliased_item, ej.EchoSpec(2), num_items=9, laws=all_but_5)
    with pytest.raises(ValueError, match=r"no law \[0, 12\]; laws are 1 to 11"):
        assert_echo_laws(OwnEcho, ej.EchoSpec(2), laws=range(13))
    assert_echo_laws(ExtraRead, ej.EchoSpec(2), laws=[2, 3], read_ahead=1)


def device_echo(batches, spec, augment):
    return ej.device.echo_batches(batches, spec, augment=augment, tags=True)


def pads_inside(batches, spec, augment):
    """An echo that augments a smaller batch together with rows that are no data."""
    augment = jax.jit(augment)
    for batch, tags in ej.device.echo_batches(batches, spec, tags=True, num_lanes=8):
        size = tags.repeat.size
        index = np.zeros(spec.batch_size, np.int32)
        index[:size] = jax.device_get(batch["index"])
        words = np.zeros((spec.batch_size, 2), np.uint32)
        words[:size] = ej.seed_for_use(spec.seed, *tags).view(np.uint32).reshape(-1, 2)
        keys = jax.random.wrap_key_data(jax.device_put(words), impl="threefry2x32")
        whole = augment({"index": jax.device_put(index)}, keys)
        yield {name: jax.device_get(leaf)[:size] for name, leaf in whole.items()}, tags


def sends_implicitly(batches, spec, augment):
    add = jax.jit(lambda leaf, number: leaf + number)
    for batch, tags in device_echo(batches, spec, augment):
        number = np.int32(0)  # crosses with the call
        yield {**batch, "index": add(batch["index"], number)}, tags


SHORT = {"spec": ej.EchoSpec(2, 64, "spread", 24), "rows": 16, "num_batches": 4}


@pytest.mark.parametrize(
    "case",
    [
        SHORT,
        {"spec": ej.AdaptiveSpec(max_uses=2, buffer=48, batch_size=16), "rows": 24},
        {"spec": ej.StochasticSpec(LOAD, buffer=32, batch_size=16)},
    ],
)
def test_the_echo_on_the_devices_passes_their_laws(case):
    assert_device_laws(device_echo, **case)


@pytest.mark.parametrize(
    ("make_echo", "message"),
    [
        (pads_inside, r"law 12 \(no padding\) is broken at output 5: expected rows"),
        (sends_implicitly, r"law 13 \(explicit transfers\) is broken: .*to-device"),
    ],
)
def test_broken_echoes_on_devices_are_caught(make_echo, message):
    guard = jax.config.jax_transfer_guard_host_to_device
    with pytest.raises(AssertionError, match=message):
        assert_device_laws(make_echo, **SHORT)
    assert jax.config.jax_transfer_guard_host_to_device == guard


def test_a_run_without_a_smaller_batch_is_refused():
    with pytest.raises(ValueError, match="so padding was not checked"):
        assert_device_laws(device_echo, ej.EchoSpec(2, batch_size=8))


class NoTurn(OwnEcho):
    """Has no idea that it may be interrupted, or asked by two threads."""

    def __next__(self):
        return self.output()

    def get_state(self):
        self.turn = type(self.turn)()
        return super().get_state()


class CarriesOn(OwnEcho):
    """Goes on from the middle of an output."""

    def __next__(self):
        try:
            return super().__next__()
        except Interrupted:
            self.turn.consistent = True
            raise


class LosesWhatItRead(OwnEcho):
    """Takes an item that could not be read for used."""

    def read(self):
        try:
            super().read()
        except OSError:
            next(self.upstream)
            self.turn.consistent = True
            raise


class SkipsWhatItRefuses(OwnEcho):
    def read(self):
        super().read()
        if self.item["payload"].ndim == 3:
            self.read()


class StateThatLies(OwnEcho):
    """Gives, after a failure, a state that has lost an item."""

    def get_state(self):
        if self.turn.consistent:
            return super().get_state()
        upstream = {"next_item": self.before["next_item"] + 1}
        return {"index": self.index, "repeat": 0, "left": 0, "upstream": upstream}


class OpensAgain(OwnEcho):
    def close(self):
        pass


def test_an_echo_that_leaves_a_thread_is_caught(monkeypatch):
    end = threading.Event()

    def leaks(upstream, spec):
        threading.Thread(target=end.wait, daemon=True).start()
        return OwnEcho(upstream, spec)

    failures = sys.modules["echo_jax.echo.laws.failures"]
    monkeypatch.setattr(failures, "_END_S", 0.3)
    with pytest.raises(AssertionError, match=r"^law 11 .*closed: expected no thread"):
        assert_echo_laws(leaks, ej.EchoSpec(2), laws=[11])
    end.set()


@pytest.mark.parametrize(
    ("make_echo", "law", "complaint"),
    [
        (CarriesOn, 10, "after an interruption"),
        (LosesWhatItRead, 10, "after a failed read.* other content under the tags"),
        (SkipsWhatItRefuses, 10, "of another shape.* got .item 1 repeat 0"),
        (StateThatLies, 10, "of a state that was saved at output 0 after a failed"),
        (NoTurn, 11, "another thread waits.* expected a ValueError at once, got"),
        (OpensAgain, 11, "after close: expected a ValueError"),
    ],
)
def test_an_echo_that_breaks_under_a_failure_is_caught(
    make_echo, law, complaint, monkeypatch
):
    # So long a thread waits in vain for the broken echo to refuse another one.
    monkeypatch.setattr(failures, "_ANSWER_S", 2.0)
    with pytest.raises(AssertionError, match=rf"^law {law} \((?s:.*){complaint}"):
        assert_echo_laws(make_echo, TWO_AND_A_HALF, laws=[law])


def changed(change):
    """An echo whose uses are changed as a whole."""

    def make_echo(upstream, spec):
        yield from change(list(host_echo(upstream, spec)))

    return make_echo


def retagged(at, index):
    """Gives one use the number of another item."""

    def change(uses):
        uses[at] = (uses[at][0], uses[at][1]._replace(fresh_index=index))
        return uses

    return changed(change)


def without_item_0(uses):
    return [use for use in uses if use[1].fresh_index]


def reused_batch(upstream, spec):
    arrays = {}
    for batch, tags in host_batches(upstream, spec):
        for key, leaf in batch.items():
            arrays.setdefault(key, leaf)[: len(leaf)] = leaf
        yield {key: arrays[key][: len(batch[key])] for key in batch}, tags


def reads_all(upstream, spec):
    return host_echo(iter(list(upstream)), spec)


ADAPTIVE, TWICE, STOCHASTIC = MODES.values()
SINGLE = ej.AdaptiveSpec(max_uses=3, buffer=8, batch_size=1)
SHUFFLE = ej.EchoSpec(2, order="window_shuffle", buffer=8, seed=3)
FRESH, OLD, OLDER = ([True] * n + [False] for n in (2, 4, 6))


@pytest.mark.parametrize(
    ("make_echo", "spec", "law", "complaint"),
    [
        (reused_batch, ej.EchoSpec(2, batch_size=4), 5, "at outputs 0 and 1:.*shared"),
        (other(seed=0), SHUFFLE, 7, "beside the plan"),
        (per_host_draw, SHUFFLE, 8, "of instance 2"),
        (changed(list), TWO_AND_A_HALF, 11, "a context manager"),
        (changed(lambda uses: uses[:-8]), TWICE, 1, "for item .* 2 to 4 uses, got 0"),
        (changed(without_item_0), ADAPTIVE, 1, "for item 0: .* 1 to 3 uses"),
        (changed(without_item_0), TWICE, 1, "for item 0: .* 2 to 4 uses"),
        (changed(lambda uses: [*uses, uses[-1]]), STOCHASTIC, 1, "the end of"),
        (other(seed=5), STOCHASTIC, 1, "expected False, got True"),
        (changed(lambda uses: uses[1:]), ADAPTIVE, 2, "without repeats"),
        (changed(lambda uses: uses[1:]), STOCHASTIC, 2, "without repeats"),
        (reads_all, STOCHASTIC, 3, "upstream reads, got 37"),
        (changed(lambda uses: uses[1::-1] + uses[2:]), ADAPTIVE, 6, "from 0 on first"),
        (other(buffer=100), STOCHASTIC, 6, "repeats of items"),
        (retagged(29, 9), SPREAD, 6, "batch of uses 24 to 31: expected item 9 once"),
        # In the first batch of repeats, item 2 takes the place of item 0.
        (retagged(5, 2), STOCHASTIC, 6, "item 2 once, got 2 times"),
        # Of the first batch that repeats, a use that is too new, too old, or just used.
        (retagged(9, 30), replace(ADAPTIVE, replay=FRESH), 6, "from 8 on first"),
        (retagged(17, 0), replace(ADAPTIVE, replay=OLD), 6, "from 4 on, .* item 0"),
        (retagged(6, 5), replace(SINGLE, replay=[True] * 2 + OLD), 6, "none of the b"),
    ],
)
def test_what_breaks_a_law_of_its_spec_is_caught(make_echo, spec, law, complaint):
    with pytest.raises(AssertionError, match=rf"^law {law} \(.*({complaint})"):
        assert_echo_laws(make_echo, spec, laws=[law], read_ahead=8)


def test_a_log_that_is_wrong_is_caught():
    def log_that_lies(upstream, spec):
        """Says in its states that it took fresh items always."""

        def get_state():
            state = ej.EchoIterator.get_state(echo)
            always = [True] * state["plan"]["log"]["decisions"]
            state["plan"]["log"] = ej.DecisionLog(always).to_json()
            return state

        echo = host_batches(upstream, spec)
        echo.get_state = get_state
        return echo

    with pytest.raises(AssertionError, match=r"^law 4 .*the decisions so far as log"):
        assert_echo_laws(log_that_lies, ADAPTIVE, laws=[4], read_ahead=8)


def test_a_smaller_last_fetch_is_a_batch_of_its_own():
    spec = ej.StochasticSpec(LOAD, buffer=4, batch_size=4, seed=1)
    assert_echo_laws(host_batches, spec, num_items=5, laws=[6])


def test_an_interruption_leaves_no_handled_error_to_the_thread():
    def handles():
        with contextlib.suppress(ZeroDivisionError):
            _ = 1 / 0

    for line in range(1, 6):
        with contextlib.suppress(Interrupted), interruption(line):
            handles()
        assert sys.exception() is None
