"""`assert_echo_laws` catches broken echoes, each by the law that it breaks."""

import copy
import itertools
import math
import random
from dataclasses import replace
from fractions import Fraction

import jax
import numpy as np
import pytest
from echo_cases import LOAD, host_batches, host_echo

import echo_jax as ej
from echo_jax.echo.driver import Turn
from echo_jax.echo.laws import (
    CountingUpstream,
    assert_device_laws,
    assert_echo_laws,
)


class OwnEcho:
    """A small correct echo, back to back, for the broken ones to get wrong."""

    def __init__(self, upstream, spec):
        self.upstream = upstream
        self.factor = Fraction(str(spec.factor))
        self.before = upstream.get_state()
        self.item = None
        self.index = -1
        self.repeat = 0
        self.left = 0
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
            self.turn.consistent = False
            try:
                return self.output()
            except StopIteration:
                self.turn.consistent = True
                raise

    def output(self):
        self.advance()
        return self.use(), ej.Tags(self.index, self.repeat)

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


class AliasedItem(OwnEcho):
    def use(self):
        return self.item


class AliasedView(OwnEcho):
    def use(self):
        return {key: leaf[...] for key, leaf in self.item.items()}


class FirstUseIsTheMaster(OwnEcho):
    """Uses share no memory, but the later ones are copies of the first."""

    def use(self):
        return self.item if self.repeat == 0 else super().use()


class OffByOneRestore(OwnEcho):
    def get_state(self):
        state = super().get_state()
        return state | {"left": max(0, state["left"] - 1)}


class RestartOnRestore(OwnEcho):
    def set_state(self, state):
        pass


class SkipAheadRestore(OwnEcho):
    """Restores exactly, but by reading the upstream from its start again."""

    def set_state(self, state):
        while (self.index, self.repeat) != (state["index"], state["repeat"]):
            self.advance()


class WrongThirdUse(OwnEcho):
    """What goes wrong after a restore shows after some outputs only."""

    since_restore = 99

    def advance(self):
        super().advance()
        self.since_restore += 1
        self.repeat += self.since_restore == 3

    def set_state(self, state):
        super().set_state(state)
        self.since_restore = 0


class OldState(OwnEcho):
    """Restores well, but goes on to give out the state that it was given."""

    given = None

    def get_state(self):
        return self.given or super().get_state()

    def set_state(self, state):
        super().set_state(state)
        self.given = state


class DropsOnSave(OwnEcho):
    """Gives up the rest of an item to be saved; consistently so."""

    def get_state(self):
        self.left = 0
        return super().get_state()


class DroppedLastUse(OwnEcho):
    def num_uses(self, index):
        num_uses = super().num_uses(index)
        return num_uses - 1 if index == len(self.upstream.items) - 1 else num_uses


class EndsEarlyAfterRestore(DroppedLastUse):
    restored = False

    def num_uses(self, index):
        parent = super() if self.restored else super(DroppedLastUse, self)
        return parent.num_uses(index)

    def set_state(self, state):
        self.restored = True
        super().set_state(state)


class RepeatLostOnRestore(OwnEcho):
    def set_state(self, state):
        super().set_state(state | {"repeat": 0})


class FloatFactor(OwnEcho):
    def num_uses(self, index):
        factor = float(self.factor)
        return math.floor((index + 1) * factor) - math.floor(index * factor)


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


class StartsAgain(OwnEcho):
    """Ends as it should, and then does not stay ended."""

    def __next__(self):
        try:
            return super().__next__()
        except StopIteration:
            self.upstream.set_state({"next_item": 0})
            self.index = -1
            raise


class RepeatTagThatDoesNotCount(OwnEcho):
    def __next__(self):
        item, tags = super().__next__()
        return item, tags._replace(repeat=0)


class RepeatsFromOne(OwnEcho):
    def __next__(self):
        item, tags = super().__next__()
        return item, tags._replace(repeat=tags.repeat + 1)


class ChangedContent(OwnEcho):
    def use(self):
        item = super().use()
        return item | {"payload": item["payload"] * np.float32(1.0001)}


class ChangedDtype(OwnEcho):
    def use(self):
        item = super().use()
        return item | {"payload": item["payload"].astype(np.float64)}


class GrowingState(OwnEcho):
    """Remembers all it has given out."""

    def __init__(self, upstream, spec):
        super().__init__(upstream, spec)
        self.history = []

    def advance(self):
        super().advance()
        self.history.append(self.index)

    def get_state(self):
        return super().get_state() | {"history": list(self.history)}


class GrowingInteger(GrowingState):
    """The same, but hidden in the bits of one integer."""

    def get_state(self):
        return OwnEcho.get_state(self) | {"history": 1 << (4 * len(self.history))}


class NumPyState(OwnEcho):
    def get_state(self):
        return super().get_state() | {"left": np.int64(self.left)}


class FloatState(OwnEcho):
    def get_state(self):
        return super().get_state() | {"left": float(self.left)}


class BoolState(OwnEcho):
    def get_state(self):
        return super().get_state() | {"started": self.index >= 0}


class StateOfChangingKeys(OwnEcho):
    def get_state(self):
        state = super().get_state()
        return state | {"echoing": 1} if self.repeat else state


class TupleState(OwnEcho):
    def get_state(self):
        return super().get_state() | {"place": (self.index, self.repeat)}


class StateThatDisturbs(OwnEcho):
    def get_state(self):
        state = super().get_state()
        self.repeat += 1
        return state


def _own(name, law, complaint="", spec=None, num_items=37):
    spec = spec or ej.EchoSpec("5/2")
    return pytest.param(name, law, complaint, spec, num_items, id=f"{name}-{law}")


@pytest.mark.parametrize("factor", [1, 1.15, 2, 4])
@pytest.mark.parametrize("num_items", [0, 1, 37])
def test_an_echo_of_ones_own_passes(factor, num_items):
    assert_echo_laws(OwnEcho, ej.EchoSpec(factor), num_items=num_items)


@pytest.mark.parametrize(
    ("name", "law", "complaint", "spec", "num_items"),
    [
        _own("AliasedItem", 5, "after all earlier outputs were overwritten"),
        _own("AliasedView", 5, "after all earlier outputs were overwritten"),
        _own("FirstUseIsTheMaster", 5, "after all earlier outputs were overwritten"),
        _own("OffByOneRestore", 4, "after a restore at output 1"),
        _own("RestartOnRestore", 4, "after a restore at output 1"),
        _own("WrongThirdUse", 4, "output 2 after a restore at output 0"),
        _own("EndsEarlyAfterRestore", 4, "expected 92 outputs, got 91"),
        _own("OldState", 4, "restored again and again"),
        _own("DropsOnSave", 4, "when states are asked for"),
        _own("StateThatDisturbs", 4, "when states are asked for"),
        _own("SkipAheadRestore", 4, "items read again"),
        _own("GrowingState", 4, "the structure"),
        _own("StateOfChangingKeys", 4, "the structure"),
        _own("GrowingInteger", 4, "at most .* bytes"),
        _own("NumPyState", 4, r"a plain integer at \['left'\], got np.int64"),
        _own("FloatState", 4, r"a plain integer at \['left'\], got 0.0"),
        _own("BoolState", 4, r"a plain integer at \['started'\], got False"),
        _own("TupleState", 4, "JSON without tuples"),
        # Floats count 1.15 right for 99 items.
        _own("FloatFactor", 1, "item 99", ej.EchoSpec(1.15), num_items=100),
        _own("DroppedLastUse", 1, "item 36: expected 2 uses, got 1"),
        _own("StartsAgain", 1, "item 0: expected 2 uses, got 3"),
        _own("ChangedContent", 1, "the content of item 0"),
        _own("ChangedContent", 2, "other content", ej.EchoSpec(1)),
        _own("ChangedDtype", 2, "other content", ej.EchoSpec(1)),
        _own("ExtraRead", 2, "after 0 outputs: expected 0 reads, got 1"),
        _own("ExtraRead", 3, "after 0 outputs: expected at most 0 .*, got 1"),
        _own("RepeatTagThatDoesNotCount", 7, "item 0 repeat 1|0, 1"),
        _own("RepeatTagThatDoesNotCount", 9, "a use_seed of its own"),
        _own("RepeatsFromOne", 9, "repeat 0 of item 0, got repeat 1"),
        _own("RepeatLostOnRestore", 9, "with a restore at output 74", ej.EchoSpec(4)),
    ],
)
def test_a_broken_echo_is_caught(name, law, complaint, spec, num_items):
    make_echo = globals()[name]
    with pytest.raises(AssertionError, match=rf"^law {law} \(.*{complaint}"):
        assert_echo_laws(make_echo, spec, num_items=num_items, laws=[law])
    with pytest.raises(AssertionError, match=r"^law \d"):
        assert_echo_laws(make_echo, spec, num_items=num_items)


def test_a_float_factor_goes_unseen_below_100_items():
    assert_echo_laws(FloatFactor, ej.EchoSpec(1.15), num_items=99, laws=[1])


def per_host_draw(upstream, spec):
    """Swaps neighbours by the global generator, which differs between hosts."""
    uses = host_echo(upstream, spec)
    while pair := list(itertools.islice(uses, 2)):
        yield from pair if random.random() < 0.5 else reversed(pair)


def shared_generator(generator=np.random.default_rng(0)):  # noqa: B008
    """Draws from one generator for all instances."""

    def make_echo(upstream, spec):
        return host_echo(upstream, replace(spec, seed=int(generator.integers(10**6))))

    return make_echo


def ready_first(upstream, spec):
    """Gives a slow upstream more time: its second item comes later."""
    uses = host_echo(upstream, spec)
    head = list(itertools.islice(uses, 4))
    yield from reversed(head) if upstream._pause_s else head
    yield from uses


@pytest.mark.parametrize("make_echo", [per_host_draw, shared_generator(), ready_first])
def test_a_sequence_that_depends_on_host_or_timing_is_caught(make_echo):
    spec = ej.EchoSpec(2, order="shuffle", buffer=8)
    with pytest.raises(AssertionError, match=r"^law 8 \(independence\)"):
        assert_echo_laws(make_echo, spec, laws=[8])


def test_another_build_that_differs_is_caught():
    spec = ej.EchoSpec(2, order="shuffle", buffer=8)

    def deeper(upstream, spec):
        return host_echo(upstream, replace(spec, buffer=9))

    with pytest.raises(AssertionError, match=r"^law 8 .* of instance 6"):
        assert_echo_laws(
            host_echo, spec, laws=[8], others=[host_batches, host_echo, deeper]
        )


SPREAD = ej.EchoSpec(4, order="spread", buffer=64, batch_size=8, seed=1)


def as_shuffle(upstream, spec):
    """Twins: a shuffle buffer where `spread` was asked for."""
    return host_echo(upstream, replace(spec, order="shuffle"))


def as_cycles(length):
    """A bursty feed: so many fresh items, then the same ones again and again."""

    def make_echo(upstream, spec):
        while block := list(itertools.islice(enumerate(upstream), length)):
            for repeat in range(int(spec.factor)):
                for index, item in block:
                    yield copy.deepcopy(item), ej.Tags(index, repeat)

    return make_echo


def in_bursts(upstream, spec):
    """Two batches at a time, with all that is fresh in the first of them."""
    uses = host_echo(upstream, spec)
    yield from itertools.islice(uses, 2 * spec.batch_size)
    while pair := list(itertools.islice(uses, 2 * spec.batch_size)):
        yield from sorted(pair, key=lambda use: use[1].repeat > 0)


def late_start(upstream, spec):
    """Fills its buffer before it repeats."""
    small = list(host_echo(upstream, spec))
    first = [use for use in small if use[1].repeat == 0]
    yield from first[: spec.buffer]
    yield from (
        use for use in small if use[1].repeat > 0 or use[1].fresh_index >= spec.buffer
    )


# At factor 5 the uses of item 2 are number 10 to 14; before output 2 there are ten.
PAPER = ej.EchoSpec(5, order="shuffle_buffer", buffer=8)


def as_larger_buffer(upstream, spec):
    """Lets one use more into its buffer than it is to hold."""
    return host_echo(upstream, replace(spec, buffer=spec.buffer + 1))


def short_lag(upstream, spec):
    """Never a twin in a batch, but lags of little more than a batch."""
    return host_echo(upstream, replace(spec, buffer=50))


@pytest.mark.parametrize(
    ("make_echo", "spec", "complaint"),
    [
        (as_shuffle, SPREAD, "once, got"),
        (in_bursts, SPREAD, "2 to 2 fresh items"),
        (late_start, SPREAD, "the first repeats"),
        (short_lag, replace(SPREAD, buffer=256), "half to one and a half rounds"),
        (as_cycles(4), ej.EchoSpec(4), "a lag of 1"),
        (as_cycles(400), ej.EchoSpec(4, order="shuffle", buffer=8), "items 392 to 399"),
        (as_cycles(3), PAPER, "one of the first 10 uses, got use 10, item 2 repeat 0"),
        (as_larger_buffer, PAPER, "one of the first"),
    ],
)
def test_an_order_that_breaks_its_promise_is_caught(make_echo, spec, complaint):
    with pytest.raises(AssertionError, match=rf"^law 6 .*{complaint}"):
        assert_echo_laws(make_echo, spec, num_items=800, laws=[6])


def test_another_order_than_the_plan_is_caught():
    spec = ej.EchoSpec(2, order="shuffle", buffer=8, seed=3)

    def ignores_the_seed(upstream, spec):
        return host_echo(upstream, replace(spec, seed=0))

    with pytest.raises(AssertionError, match=r"^law 7 .*beside the plan"):
        assert_echo_laws(ignores_the_seed, spec)


def test_a_batch_whose_rows_share_memory_with_a_later_batch_is_caught():
    def reused_batch(upstream, spec):
        arrays = {}
        for batch, tags in host_batches(upstream, spec):
            for key, leaf in batch.items():
                arrays.setdefault(key, leaf)[: len(leaf)] = leaf
            yield {key: arrays[key][: len(batch[key])] for key in batch}, tags

    with pytest.raises(AssertionError, match=r"^law 5 .*at outputs 0 and 18:.*shared"):
        assert_echo_laws(reused_batch, ej.EchoSpec(2, batch_size=4), laws=[5])


def test_an_echo_that_never_ends_is_caught():
    def endless(upstream, spec):
        for index, item in enumerate(upstream):
            while True:
                yield item, ej.Tags(index, 0)

    with pytest.raises(AssertionError, match=r"^law 1 .* for item 0"):
        assert_echo_laws(endless, ej.EchoSpec(2))


def test_a_message_names_law_position_expected_and_got():
    with pytest.raises(AssertionError) as caught:
        assert_echo_laws(DroppedLastUse, ej.EchoSpec(2, seed=5), num_items=3)
    assert str(caught.value) == (
        "law 1 (exactness) is broken for item 2: expected 2 uses, got 1; "
        "EchoSpec(factor=2, buffer=1, order='consecutive', batch_size=1, seed=5), "
        "num_items=3"
    )


def test_it_is_public():
    assert ej.testing.assert_echo_laws is assert_echo_laws


def test_laws_can_be_left_out():
    assert_echo_laws(AliasedItem, ej.EchoSpec(2), laws={1, 2, 3, 4, 6, 7, 8, 9, 10, 11})
    with pytest.raises(ValueError, match=r"no law \[0, 12\]; laws are 1 to 11"):
        assert_echo_laws(OwnEcho, ej.EchoSpec(2), laws=range(13))


def test_a_stated_read_ahead_is_allowed():
    spec = ej.EchoSpec(2)
    assert_echo_laws(ExtraRead, spec, laws=[2, 3], read_ahead=1)


def test_a_stated_number_of_rereads_is_checked():
    spec = ej.EchoSpec(2, order="shuffle", buffer=8)
    assert_echo_laws(host_echo, spec, laws=[4], max_rereads=16)
    with pytest.raises(AssertionError, match=r"^law 4 .*at most 5 items read again"):
        assert_echo_laws(host_echo, spec, laws=[4], max_rereads=5)


def test_restores_can_be_limited_to_some_positions():
    restores = []

    class Counted(OwnEcho):
        def set_state(self, state):
            restores.append(state)
            super().set_state(state)

    spec = ej.EchoSpec(2)
    assert_echo_laws(Counted, spec, num_items=5, laws=[4], positions=[0, 3])
    assert len(restores) == 4  # each once alone, and once in the interrupted run
    restores.clear()
    assert_echo_laws(Counted, spec, num_items=5, laws=[4])
    assert len(restores) == 11 + 10  # nothing follows the last of 11 positions


def test_items_of_ones_own_are_fed():
    fed = []

    def make_echo(upstream, spec):
        fed.append(upstream.items[1])
        return host_echo(upstream, spec)

    assert_echo_laws(
        make_echo,
        ej.EchoSpec(2),
        num_items=2,
        laws=range(1, 10),
        make_item=lambda k: (k, "x"),
    )
    assert fed[0] == (1, "x")


def test_the_upstream_counts_and_resumes():
    upstream = CountingUpstream(["a", "b", "c"])
    assert next(upstream) == "a"
    state = upstream.get_state()
    assert list(upstream) == ["b", "c"]
    assert list(upstream) == []
    upstream.set_state(state)
    assert list(upstream) == ["b", "c"]
    assert upstream.reads == 5


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
        words[:size] = ej.use_seed(spec.seed, *tags).view(np.uint32).reshape(-1, 2)
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
        SHORT | {"spec": ej.EchoSpec("3/2", batch_size=16), "num_batches": 3},
        {"spec": ej.AdaptiveSpec(cap=2, buffer=48, batch_size=16), "rows": 24},
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
