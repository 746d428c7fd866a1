"""The reader: nothing is lost or doubled, errors stay errors, states are true."""

import gc
import threading
import time
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo import reader as reader_module
from echo_jax.echo.reader import Reader

DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])
BULK = pytest.mark.parametrize("bulk", [False, True])


ALIVE = weakref.WeakSet()


class Prepared:
    """Does to every value, by itself, what a function says: an `Intake`."""

    in_bulk = False

    def __init__(self, function):
        self._function = function

    def prepare(self, values):
        (value,) = values
        prepared, rows = self._function(value)
        return [(prepared, 0, rows)]


class State:
    """A place in an upstream, changed in place as a careless iterator may."""

    def __new__(cls, *_):
        made = super().__new__(cls)
        ALIVE.add(made)
        return made

    def __init__(self, place):
        self.place = place


class Upstream:
    """Counts up, and before some elements it raises first, so many times."""

    def __init__(self, total=100, failures=(), error=OSError):
        self.total = total
        self.failures = dict(failures)
        self.error = error
        self.state = State(0)
        self.calls = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.calls += 1
        place = self.state.place
        if self.failures.get(place, 0):
            self.failures[place] -= 1
            raise self.error(f"before element {place}")
        if place == self.total:
            raise StopIteration
        self.state.place += 1
        return place

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


class Negated:
    """Negates values, many at once: an `Intake`."""

    in_bulk = True

    def prepare(self, values):
        return [(-value, 0, 1) for value in values]


def rows_of(element):
    """Elements have one row, two, three, one, two, ..."""
    return 1 + element % 3


def first_row(element, bulk=False):
    return element if bulk else sum(map(rows_of, range(element)))


class Cut:
    """A reader over elements of several rows, and what was taken from it."""

    def __init__(self, upstream, depth, *, kept=0, every=1, bulk=False):
        self.upstream, self.kept = upstream, kept
        one_by_one = Prepared(lambda value: (-value, rows_of(value)))
        self.row = 0
        self.errors = 0
        cell = self.anchor = [0]
        self.reader = Reader(
            upstream,
            anchor=lambda: cell[0],
            next_anchor=lambda row: -(-row // every) * every,
            intake=Negated() if bulk else one_by_one,
            depth=depth,
        )

    def ensure(self, rows):
        """Asks again after every error; whether so many rows are there."""
        while True:
            try:
                self.reader.ensure(rows)
            except OSError:
                self.errors += 1
            else:
                return self.reader.rows >= rows

    def take(self, rows):
        """Takes so many rows, or what there is: pairs of element and its row."""
        self.ensure(rows)
        rows = min(rows, self.reader.rows)
        taken = self.reader.take(rows)
        self.row += rows
        self.anchor[0] = max(self.anchor[0], self.row - self.kept)
        return [(-value, at) for value, low, end in taken for at in range(low, end)]

    def rest(self):
        found = []
        while taken := self.take(2):
            found += taken
        return found


def all_rows(total, bulk=False):
    if bulk:
        return [(element, 0) for element in range(total)]
    return [
        (element, row) for element in range(total) for row in range(rows_of(element))
    ]


@BULK
@DEPTHS
@settings(max_examples=40)
@given(
    total=st.integers(0, 12),
    failures=st.dictionaries(st.integers(0, 11), st.integers(1, 3), max_size=5),
    takes=st.lists(st.integers(1, 7), max_size=12),
)
def test_nothing_is_lost_or_doubled_however_often_the_upstream_fails(
    depth, bulk, total, failures, takes
):
    failures = {place: n for place, n in failures.items() if place < total}
    cut = Cut(Upstream(total, failures), depth, bulk=bulk)
    found = []
    for rows in takes:
        found += cut.take(rows)
    found += cut.rest()
    assert found == all_rows(total, bulk)
    assert cut.errors == sum(failures.values())
    # Each element was asked for once, each failure was told, and one end was seen.
    assert cut.upstream.calls == total + cut.errors + 1
    assert cut.reader.ended and cut.reader.is_ready(1)
    cut.reader.close()


@BULK
@DEPTHS
@settings(max_examples=30)
@given(
    takes=st.lists(st.integers(1, 7), min_size=1, max_size=10),
    kept=st.integers(0, 9),
    every=st.integers(1, 5),
    data=st.data(),
)
def test_a_state_leads_to_its_row_and_goes_on_from_there(
    depth, bulk, takes, kept, every, data
):
    """Of every row that may become the anchor, from the anchor on, and the next."""
    upstream = Upstream(20, {3: 1, 8: 2})
    cut = Cut(upstream, depth, kept=kept, every=every, bulk=bulk)
    for rows in takes:
        cut.take(rows)
        anchor = -(-cut.anchor[0] // every) * every
        for row in {*range(anchor, cut.row, every), cut.row}:
            state, skip = cut.reader.state_before(row)
            assert first_row(state.place, bulk) + skip == row
            if every == 1:
                assert skip < (1 if bulk else rows_of(state.place))
    whole = all_rows(20, bulk)
    row = data.draw(st.sampled_from([*range(anchor, cut.row, every), cut.row]))
    state, skip = cut.reader.state_before(row)
    at = cut.row
    assert cut.rest() == whole[at:]
    other = Cut(Upstream(20), depth, bulk=bulk)
    for again in (cut, other):
        again.reader.restore(state, row - skip)
        again.row = again.anchor[0] = row - skip
        assert again.rest() == whole[row - skip :]
        again.reader.close()


@DEPTHS
def test_states_of_rows_that_are_not_gone_back_to_are_forgotten(depth):
    gc.collect()
    before = len(ALIVE)
    cut = Cut(Upstream(2000), depth, kept=8)
    for _ in range(1000):
        assert len(cut.take(3)) == 3
        assert len(ALIVE) - before <= 8 + depth + 8
    state, skip = cut.reader.state_before(cut.row - 8)
    assert first_row(state.place) + skip == cut.row - 8
    cut.reader.close()


@DEPTHS
def test_a_restore_leaves_the_given_state_alone_and_is_left_alone(depth):
    cut = Cut(Upstream(), depth)
    state = State(7)
    cut.reader.restore(state, first_row(7))
    assert cut.take(2) == [(7, 0), (7, 1)]
    assert state.place == 7
    state.place = 50
    before, skip = cut.reader.state_before(first_row(7))
    assert (before.place, skip) == (7, 0)
    before.place = 60
    assert cut.take(3) == [(8, 0), (8, 1), (8, 2)]
    found, skip = cut.reader.state_before(first_row(9))
    assert (found.place, skip) == (9, 0)
    cut.reader.close()


@DEPTHS
def test_elements_of_several_rows_are_partly_taken(depth):
    reader = Reader(
        iter("abc"),
        anchor=lambda: 0,
        next_anchor=None,
        intake=Prepared(lambda value: (value, 3)),
        depth=depth,
    )
    reader.ensure(2)
    assert reader.take(2) == [("a", 0, 2)]
    reader.ensure(4)
    assert reader.take(0) == []
    assert reader.take(3) == [("a", 2, 3), ("b", 0, 2)]
    reader.ensure(9)
    assert (reader.rows, reader.ended) == (4, True)
    assert reader.take(4) == [("b", 2, 3), ("c", 0, 3)]
    assert reader.rows == 0
    reader.close()


@DEPTHS
def test_no_more_is_read_than_was_asked_for_or_is_read_ahead(depth):
    upstream = Upstream()
    reader = Reader(upstream, anchor=lambda: 0, next_anchor=None, depth=depth)
    assert upstream.calls == 0
    for taken in range(0, 40, 2):
        reader.ensure(2)
        assert upstream.calls <= taken + max(2, depth)
        assert [value for value, _, _ in reader.take(2)] == [taken, taken + 1]
    reader.close()


@DEPTHS
def test_the_end_is_an_end_and_is_asked_for_once(depth):
    upstream = Upstream(2)
    reader = Reader(upstream, anchor=lambda: 0, next_anchor=None, depth=depth)
    for _ in range(3):
        reader.ensure(5)
        assert (reader.rows, reader.ended, reader.is_ready(9)) == (2, True, True)
    assert upstream.calls == 3
    assert [value for value, _, _ in reader.take(2)] == [0, 1]
    reader.ensure(1)
    assert (reader.rows, upstream.calls) == (0, 3)
    reader.close()


@DEPTHS
def test_a_generator_that_an_error_has_ended_is_an_error_for_ever(depth):
    def upstream():
        yield 0
        raise OSError("the disk is gone")

    reader = Reader(upstream(), anchor=lambda: 0, next_anchor=None, depth=depth)
    reader.ensure(1)
    assert reader.take(1) == [(0, 0, 1)]
    with pytest.raises(OSError, match="the disk is gone"):
        reader.ensure(1)
    with pytest.raises(RuntimeError, match="failed, and then ended") as caught:
        reader.ensure(1)
    assert isinstance(caught.value.__cause__, OSError)
    for ask in (reader.ensure, reader.ensure, eventually_ready(reader)):
        with pytest.raises(RuntimeError, match="go to a saved state, or start anew"):
            ask(1)
        assert not reader.ended
    reader.close()


def eventually_ready(reader):
    """Asks whether rows are ready until they are, or an error is told."""

    def ask(rows):
        wait_until(lambda: reader.is_ready(rows))

    return ask


def wait_until(condition, bound_s=300.0):
    end = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


@DEPTHS
def test_what_is_read_before_an_error_can_still_be_taken(depth):
    reader = Reader(
        Upstream(9, {2: 1}), anchor=lambda: 0, next_anchor=None, depth=depth
    )
    with pytest.raises(OSError, match="before element 2"):
        reader.ensure(3)
    assert reader.rows == 2
    reader.ensure(2)
    assert [value for value, _, _ in reader.take(2)] == [0, 1]
    eventually_ready(reader)(1)
    assert [value for value, _, _ in reader.take(1)] == [2]
    reader.close()


def refuse_two(value):
    if value == 2:
        raise ValueError("2 is not a batch")
    return value, 1


@DEPTHS
def test_a_failure_in_prepare_is_final(depth):
    """The element is gone, so no later one may come in its place."""
    upstream = Upstream()
    reader = Reader(
        upstream,
        anchor=lambda: 0,
        next_anchor=lambda row: row,
        intake=Prepared(refuse_two),
        depth=depth,
    )
    reader.ensure(2)
    reader.take(2)
    with pytest.raises(ValueError, match="2 is not a batch"):
        reader.ensure(1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="its element was refused") as caught:
            reader.ensure(1)
        assert isinstance(caught.value.__cause__, ValueError)
    assert upstream.calls == 3
    assert (reader.rows, reader.ended) == (0, False)
    # A state is a way out.
    reader.restore(State(3), 3)
    reader.ensure(1)
    assert reader.take(1) == [(3, 0, 1)]
    reader.close()


@DEPTHS
def test_after_an_interrupted_read_nobody_knows_what_comes_next(depth):
    """It may have taken an element with it."""
    upstream = Upstream(9, {1: 1}, KeyboardInterrupt)
    reader = Reader(
        upstream, anchor=lambda: 0, next_anchor=lambda row: row, depth=depth
    )
    with pytest.raises(KeyboardInterrupt):
        reader.ensure(2)
    assert [value for value, _, _ in reader.take(1)] == [0]
    for _ in range(3):
        with pytest.raises(RuntimeError, match="was interrupted"):
            reader.ensure(1)
    assert upstream.calls == 2
    reader.restore(State(1), 1)
    reader.ensure(1)
    assert reader.take(1) == [(1, 0, 1)]
    reader.close()


def test_an_iterator_without_a_state_is_named():
    reader = Reader(iter([1, 2]), anchor=lambda: 0, next_anchor=lambda row: row)
    reader.ensure(3)
    assert [value for value, _, _ in reader.take(2)] == [1, 2]
    with pytest.raises(TypeError, match="a list_iterator, has no get_state"):
        reader.state_before(0)


def test_an_iterator_needs_a_next_alone():
    """As a ``for`` loop needs no more of what an ``__iter__`` returns."""

    class Bare:
        def __init__(self):
            self._rest = iter([5, 6])

        def __next__(self):
            return next(self._rest)

    reader = Reader(Bare(), anchor=lambda: 0, next_anchor=None)
    reader.ensure(3)
    assert [value for value, _, _ in reader.take(2)] == [5, 6]
    assert reader.ended


@pytest.fixture
def own_threads():
    """Returns the threads that a test has started and that still run."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


@DEPTHS
def test_close_is_final_and_leaves_no_thread(depth, own_threads):
    upstream = Upstream()
    reader = Reader(upstream, anchor=lambda: 0, next_anchor=None, depth=depth)
    reader.ensure(1)
    assert len(own_threads()) == (depth > 0)
    for _ in range(2):
        reader.close()
        assert not own_threads()
    calls = upstream.calls
    reader.ensure(1)
    assert (reader.rows, reader.ended, reader.is_ready(1)) == (0, True, True)
    assert upstream.calls == calls
    assert not own_threads()


def test_a_reader_that_never_read_can_be_closed(own_threads):
    reader = Reader(Upstream(), anchor=lambda: 0, next_anchor=None, depth=2)
    reader.close()
    assert not own_threads()


class Slow:
    """Waits for a gate before every element."""

    def __init__(self):
        self.gate = threading.Event()
        self.calls = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.calls += 1
        self.gate.wait(300.0)
        return self.calls


def test_a_read_that_outlives_its_close_is_the_last(own_threads, monkeypatch):
    monkeypatch.setattr(reader_module, "_CLOSE_S", 0.01)
    upstream = Slow()
    reader = Reader(upstream, anchor=lambda: 0, next_anchor=None, depth=5)
    wait_until(lambda: not reader.is_ready(1) and upstream.calls == 1)
    reader.close()
    assert len(own_threads()) == 1
    upstream.gate.set()
    wait_until(lambda: not own_threads())
    assert upstream.calls == 1
    reader.close()


def test_a_dropped_reader_leaves_no_thread(own_threads):
    upstream = Upstream()
    reader = Reader(upstream, anchor=lambda: 0, next_anchor=None, depth=2)
    reader.ensure(1)
    assert len(own_threads()) == 1
    del reader
    gc.collect()
    wait_until(lambda: not own_threads())
    assert upstream.calls <= 3


def test_a_thread_ends_with_its_stream(own_threads):
    reader = Reader(Upstream(3), anchor=lambda: 0, next_anchor=None, depth=9)
    reader.ensure(4)
    wait_until(lambda: not own_threads())
    assert [value for value, _, _ in reader.take(3)] == [0, 1, 2]
    assert reader.is_ready(1)
    assert not own_threads()
    reader.close()
