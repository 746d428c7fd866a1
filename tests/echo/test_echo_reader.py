"""Reading for an echo: nothing is lost or doubled, and errors stay errors."""

import copy
import itertools
import json
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from echo_cases import mesh_of
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej

_SOON_S = 20.0


class Upstream:
    """Counts up; raises before some numbers, and changes its state in place."""

    def __init__(self, total, failures=(), error=OSError, make=lambda k: k):
        self.total, self.failures, self.error = total, dict(failures), error
        self.state, self.make, self.calls = {"place": 0}, make, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.calls += 1
        place = self.state["place"]
        if self.failures.get(place, 0):
            self.failures[place] -= 1
            raise self.error(f"before {place}")
        if place == self.total:
            raise StopIteration
        self.state["place"] += 1
        return self.make(place)

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def rows_of(k):
    """Stacks of one row, two, three, one, two, ..."""
    first = k // 3 * 6 + (0, 1, 3)[k % 3]
    return {"x": np.arange(first, first + 1 + k % 3, dtype=np.int32)}


def eight_rows(k):
    return {"x": np.arange(8 * k, 8 * k + 8, dtype=np.int32)}


SPEC = ej.EchoSpec("3/2", 6, "window_shuffle", 4, seed=1)
WAYS = {
    "items": (lambda up, n: ej.echo(up, SPEC, prefetch=n), lambda k: k),
    "batch": (lambda up, n: ej.echo(up, SPEC, batch=True, prefetch=n), np.int64),
    "stacks": (lambda up, n: ej.echo_batches(up, SPEC, prefetch=n), rows_of),
    "device": (
        lambda up, n: ej.device.echo_batches(
            up, ej.EchoSpec("3/2", 32, "spread", 8), prefetch=n, mesh=mesh_of(1)
        ),
        eight_rows,
    ),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
DEPTHS = pytest.mark.parametrize("depth", [0, 2])


def start(way, depth, total=20, **options):
    make_echo, make = WAYS[way]
    upstream = Upstream(total, make=make, **options)
    return upstream, make_echo(upstream, depth)


def plain(output):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), output)


def rest_of(echo, count=None):
    """The next outputs, asked for again after every error, and how many those were."""
    found, errors = [], 0
    while count is None or len(found) < count:
        try:
            found.append(plain(next(echo)))
        except OSError:
            errors += 1
        except StopIteration:
            break
    return found, errors


@EVERY_WAY
@DEPTHS
@settings(max_examples=6)
@given(
    total=st.integers(1, 12),
    failures=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=4),
    taken=st.integers(0, 9),
)
def test_nothing_is_lost_or_doubled_however_often_the_upstream_fails(
    way, depth, total, failures, taken
):
    failures = {place: n for place, n in failures.items() if place < total}
    with start(way, depth, total)[1] as echo:
        whole, _ = rest_of(echo)
    upstream, echo = start(way, depth, total, failures=failures)
    with echo:
        head, early = rest_of(echo, taken)
        # A device echo looks at the first batch before it gives a state.
        looks = failures.get(0, 0) if way == "device" and not taken else 0
        for _ in range(looks):
            with pytest.raises(OSError):
                echo.get_state()
        state = json.dumps(echo.get_state())
        tail, late = rest_of(echo)
        assert head + tail == whole
        assert early + late + looks == sum(failures.values())
        # Each element was asked for once, each failure was told, and one end was seen.
        assert upstream.calls == total + sum(failures.values()) + 1
        for again in (echo, start(way, depth, total)[1]):
            again.set_state(json.loads(state))
            assert rest_of(again) == (whole[taken:], 0)
    again.close()


def test_items_that_are_read_together_before_an_error_are_used():
    whole, _ = rest_of(start("batch", 0, 60)[1])
    upstream, echo = start("batch", 0, 60, failures={41: 1, 50: 2, 59: 1})
    assert rest_of(echo) == (whole, 4)
    assert upstream.calls == 60 + 4 + 1


@EVERY_WAY
@DEPTHS
def test_states_that_no_restore_needs_are_not_kept(way, depth):
    """A long run would else hold a state for every element that it ever read."""

    class State(dict):
        __hash__ = object.__hash__

        def __deepcopy__(self, memo):
            alive.add(found := State(self))
            return found

    alive, kept = weakref.WeakSet(), []
    upstream, echo = start(way, depth, 1000)
    upstream.state = State(upstream.state)
    with echo:
        for _ in itertools.islice(echo, 200):
            kept.append(len(alive))
    assert max(kept[100:]) <= max(kept[:50]) + 5 < 50


@EVERY_WAY
@DEPTHS
def test_a_restore_leaves_the_given_state_alone(way, depth):
    _, echo = start(way, depth)
    with echo:
        rest_of(echo, 4)
        state = echo.get_state()
        before = copy.deepcopy(state)
        tail, _ = rest_of(echo)
        for _ in range(2):
            echo.set_state(state)
            assert rest_of(echo)[0] == tail
        assert state == before


@EVERY_WAY
@DEPTHS
def test_an_upstream_that_an_error_has_ended_is_an_error_for_ever(way, depth):
    make_echo, make = WAYS[way]

    def upstream():
        yield from map(make, range(3))
        raise OSError("the disk is gone")

    with make_echo(upstream(), depth) as echo:
        with pytest.raises(OSError, match="the disk is gone"):
            list(echo)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="start again") as caught:
                next(echo)
        assert isinstance(caught.value.__cause__, OSError | RuntimeError)


@EVERY_WAY
@DEPTHS
@pytest.mark.parametrize("kind", ["interrupted", "refused"])
def test_after_an_element_is_gone_no_later_one_takes_its_place(way, depth, kind):
    """An interrupted read may have taken an element, and a refused one is gone."""
    _, make = WAYS[way]
    upstream, echo = start(way, depth)
    if kind == "interrupted":
        upstream.failures, upstream.error = {2: 1}, KeyboardInterrupt
    else:
        upstream.make = lambda k: make(k) if k != 2 else {"y": np.ma.zeros(8)}
    with echo:
        state = echo.get_state()
        with pytest.raises((KeyboardInterrupt, ValueError)):
            list(echo)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="go to a saved state"):
                next(echo)
        # One was interrupted, or refused; with a thread, others may have been read.
        # Items that are stacked are read together.
        more = way == "batch" or (way == "device" and depth)
        assert upstream.calls <= 3 + 2 * bool(more)
        upstream.make = make
        echo.set_state(state)
        with start(way, 0)[1] as other:
            assert rest_of(echo) == rest_of(other)


def wait_until(condition):
    end = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@EVERY_WAY
def test_a_close_tells_who_waits_and_lets_a_read_end(way):
    before = set(threading.enumerate())
    hangs, may = threading.Event(), threading.Event()
    _, make = WAYS[way]

    def hanging(k):
        if k == 4:
            hangs.set()
            may.wait(_SOON_S)
        return make(k)

    upstream, echo = start(way, 3)
    upstream.make = hanging
    told = []

    def wait():
        with pytest.raises(ValueError, match="closed"):
            list(echo)
        told.append(True)

    consumer = threading.Thread(target=wait)
    consumer.start()
    assert hangs.wait(_SOON_S)
    closer = threading.Thread(target=echo.close)
    closer.start()
    consumer.join(_SOON_S)
    assert told
    may.set()
    closer.join(_SOON_S)
    wait_until(lambda: set(threading.enumerate()) <= before)
    assert upstream.calls == 5


@pytest.mark.parametrize(("devices", "calls"), [(1, 3), (2, 6)])
def test_the_next_batches_are_read_while_one_is_sent(devices, calls):
    """One is used, one is ready and one in hand; a second thread has three more."""
    spec = ej.EchoSpec("3/2", 32, "spread", 8)
    options = {"prefetch": 1, "mesh": mesh_of(devices)}
    saved = None
    # Before a restore the first one was read to lay out the slots.
    for due in (calls, calls + 1):
        upstream = Upstream(9, make=eight_rows)
        with ej.device.echo_batches(upstream, spec, **options) as echo:
            if saved:
                echo.set_state(saved)
            else:
                next(echo)
                saved = echo.get_state()
            wait_until(lambda upstream=upstream, due=due: upstream.calls >= due)
            time.sleep(0.05)
            assert upstream.calls == due  # and no more
