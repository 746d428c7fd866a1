"""`assert_echo_laws` catches echoes that break under failures, or in other modes."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from echo_cases import MODES
from test_testing import OwnEcho, host_batches, host_echo

import echo_jax as ej
from echo_jax.echo.laws import assert_echo_laws, consumers
from echo_jax.echo.laws.interruption import Interrupted

SPEC = ej.EchoSpec("5/2")


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


class EndsAfterAFailure(OwnEcho):
    def __next__(self):
        try:
            return super().__next__()
        except RuntimeError:
            raise StopIteration from None


class LosesWhatItRead(OwnEcho):
    """Takes an item that could not be read for used."""

    def read(self):
        try:
            super().read()
        except OSError:
            next(self.upstream)
            self.turn.consistent = True
            raise


class WrongTagsAfterAFailure(OwnEcho):
    def read(self):
        self.index += 1
        try:
            super().read()
        except OSError:
            self.turn.consistent = True
            raise
        self.index -= 1


class SkipsWhatItRefuses(OwnEcho):
    def read(self):
        super().read()
        if self.item["payload"].ndim == 3:
            self.read()


class StateThatLies(OwnEcho):
    """Gives, after a failure, a state that has lost an item."""

    failed = False

    def read(self):
        try:
            super().read()
        except OSError:
            self.failed = True
            raise

    def get_state(self):
        if not self.failed:
            return super().get_state()
        next_item = self.before["next_item"] + 1
        state = {"index": self.index, "repeat": 0, "left": 0}
        return state | {"upstream": {"next_item": next_item}}


class Waits(OwnEcho):
    """Lets a second thread wait for the first one."""

    def __init__(self, upstream, spec):
        super().__init__(upstream, spec)
        self.lock = threading.RLock()

    def __next__(self):
        with self.lock:
            return super().__next__()


class OpensAgain(OwnEcho):
    def close(self):
        pass


class EndsOnClose(OwnEcho):
    closed = False

    def close(self):
        self.closed = True

    def __next__(self):
        if self.closed:
            raise StopIteration
        return super().__next__()


class AnotherInAWith(OwnEcho):
    def __enter__(self):
        return iter([])


class LeaksOnClose(OwnEcho):
    """Has a thread that waits for ever, or until it is dropped."""

    def __init__(self, upstream, spec):
        super().__init__(upstream, spec)
        self.stop = THREADS
        threading.Thread(target=self.stop.wait, daemon=True).start()


class LeaksIfDropped(OwnEcho):
    def __init__(self, upstream, spec):
        super().__init__(upstream, spec)
        self.stop = threading.Event()
        stops = (self.stop, THREADS)
        threading.Thread(target=wait_for_any, args=stops, daemon=True).start()

    def close(self):
        super().close()
        self.stop.set()


THREADS = threading.Event()


def wait_for_any(*events):
    while not any(event.wait(0.01) for event in events):
        pass


@pytest.fixture
def impatient(monkeypatch, make_echo):
    """Waits briefly for what never comes, and as long as ever for what does."""
    monkeypatch.setattr(consumers, "_END_S", 0.3)
    if make_echo is Waits:
        monkeypatch.setattr(consumers, "_ANSWER_S", 0.3)
    before = set(threading.enumerate())
    yield
    THREADS.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(10)
    THREADS.clear()


@pytest.mark.parametrize(
    ("make_echo", "law", "complaint"),
    [
        (CarriesOn, 10, "after an interruption"),
        (EndsAfterAFailure, 10, "after a failed read.* got the end of the stream"),
        (LosesWhatItRead, 10, "after a failed read.* other content under the tags"),
        (WrongTagsAfterAFailure, 10, "after a failed read.* got .item 1 repeat 0"),
        (SkipsWhatItRefuses, 10, "of another shape.* got .item 1 repeat 0"),
        (StateThatLies, 10, "of a state that was saved at output 0 after a failed"),
        (NoTurn, 11, "another thread waits.* expected a ValueError, got"),
        (Waits, 11, "another thread waits.* a ValueError at once, got waiting"),
        (OpensAgain, 11, "after a close.* expected a ValueError"),
        (EndsOnClose, 11, "after a close.* got StopIteration"),
        (AnotherInAWith, 11, "the echo itself"),
        (LeaksOnClose, 11, "of an echo that was closed.* no thread left"),
        (LeaksIfDropped, 11, "of an echo that was dropped.* no thread left"),
    ],
)
def test_an_echo_that_breaks_under_a_failure_is_caught(
    make_echo, law, complaint, impatient
):
    with pytest.raises(AssertionError, match=rf"^law {law} \((?s:.*){complaint}"):
        assert_echo_laws(make_echo, SPEC, laws=[law])


def test_an_echo_without_a_close_is_caught():
    def generator(upstream, spec):
        yield from host_echo(upstream, spec)

    with pytest.raises(AssertionError, match=r"^law 11 .*a context manager"):
        assert_echo_laws(generator, SPEC, laws=[11])


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


def other(**fields):
    return lambda upstream, spec: host_echo(upstream, replace(spec, **fields))


def reads_all(upstream, spec):
    return host_echo(iter(list(upstream)), spec)


ADAPTIVE, STOCHASTIC = MODES["adaptive"], MODES["stochastic"]
FRESH, OLD = [True] * 2 + [False], [True] * 4 + [False]


@pytest.mark.parametrize(
    ("make_echo", "spec", "law", "complaint"),
    [
        (changed(lambda uses: uses[:-1]), ADAPTIVE, 1, "for item .* 3 uses, got 2"),
        (changed(without_item_0), ADAPTIVE, 1, "for item 0: .* 1 to 3 uses"),
        (changed(lambda uses: uses[:-1]), STOCHASTIC, 1, "uses, got"),
        (changed(lambda uses: [*uses, uses[-1]]), STOCHASTIC, 1, "at the end"),
        (other(seed=5), STOCHASTIC, 1, "in batch .* fresh items|repeats alone"),
        (changed(lambda uses: uses[1:]), ADAPTIVE, 2, "at cap 1"),
        (changed(lambda uses: uses[1:]), STOCHASTIC, 2, "at p = 1"),
        (reads_all, ADAPTIVE, 3, "upstream reads, got 37"),
        (reads_all, STOCHASTIC, 3, "upstream reads, got 37"),
        (changed(lambda uses: uses[1::-1] + uses[2:]), ADAPTIVE, 6, "0 to 3 first"),
        (other(buffer=100), STOCHASTIC, 6, "repeats of items"),
        (other(replay=None, cap=1), ADAPTIVE, 7, "beside the plan"),
        (other(seed=5, load=ej.LoadSchedule()), STOCHASTIC, 7, "beside the plan"),
    ],
)
def test_a_broken_echo_of_another_mode_is_caught(make_echo, spec, law, complaint):
    with pytest.raises(AssertionError, match=rf"^law {law} \(.*({complaint})"):
        assert_echo_laws(make_echo, spec, laws=[law], read_ahead=8)


@pytest.mark.parametrize(
    ("spec", "at", "index", "complaint"),
    [
        # Of the first batch that repeats, the second use: twice, too new, too old.
        (replace(ADAPTIVE, replay=FRESH), 9, 0, "in batch 2.* once, got 2 times"),
        (replace(ADAPTIVE, replay=FRESH), 9, 30, "below the cap, got item 30"),
        (replace(ADAPTIVE, replay=OLD), 17, 0, "from 4 on, below the cap, got item 0"),
    ],
)
def test_an_adaptive_repeat_that_is_not_due_is_caught(spec, at, index, complaint):
    if index == 0 and at == 9:
        uses = list(host_echo(iter(range(37)), spec))
        index = uses[8][1].fresh_index
    with pytest.raises(AssertionError, match=rf"^law 6 .*{complaint}"):
        assert_echo_laws(retagged(at, index), spec, laws=[6])


def test_an_adaptive_repeat_of_the_batch_before_is_caught():
    spec = ej.AdaptiveSpec(cap=3, buffer=8, batch_size=1, replay=[True] * 6 + [False])
    with pytest.raises(AssertionError, match=r"^law 6 .*none of the batch before"):
        assert_echo_laws(retagged(6, 5), spec, laws=[6])


class Wrapped:
    """An adaptive echo without what the derived class leaves out."""

    def __init__(self, upstream, spec):
        self.echo = host_batches(upstream, spec)
        self.set_state, self.close = self.echo.set_state, self.echo.close

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.echo)

    def get_state(self):
        return self.echo.get_state()


class LogThatLies(Wrapped):
    """Says in its state that it took fresh items always."""

    def get_state(self):
        state = super().get_state()
        size = state["plan"]["log"]["decisions"]
        state["plan"]["log"] = ej.DecisionLog([True] * size).to_json()
        return state


class LogThatIsNone(Wrapped):
    def get_state(self):
        state = super().get_state()
        state["plan"]["log"] = {"version": 1, "decisions": 1, "bits": "x" * 1000}
        return state


@pytest.mark.parametrize(
    ("make_echo", "complaint"),
    [
        (LogThatLies, "the decisions so far as log"),
        (LogThatIsNone, "a decision log, got"),
        (Wrapped, "what it decided as `log`"),
    ],
)
def test_a_log_that_is_wrong_or_missing_is_caught(make_echo, complaint):
    with pytest.raises(AssertionError, match=rf"^law 4 .*{complaint}"):
        assert_echo_laws(make_echo, ADAPTIVE, laws=[4], read_ahead=8)


def test_a_stochastic_twin_is_caught():
    items = [np.array(k) for k in range(37)]
    uses = [tags for _, tags in host_echo(iter(items), STOCHASTIC)]
    pairs = itertools.pairwise(enumerate(uses))
    at = next(b for (a, x), (b, y) in pairs if x.repeat and y.repeat and b % 4)
    make_echo = retagged(at, uses[at - 1].fresh_index)
    with pytest.raises(AssertionError, match=r"^law 6 .*once, got 2 times"):
        assert_echo_laws(make_echo, STOCHASTIC, laws=[6])
