"""The upstream of an echo: reads it on request or ahead, knows its place, goes back.

Nothing that the upstream gave is lost or counted twice. An error is raised, and never
becomes an end. After a read that was interrupted at an unknown place, the source
refuses to go on. The read rows wait in a `Reader` until an echo takes them.
"""

import contextlib
import copy
import math
import os
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, repeat, starmap
from time import perf_counter
from typing import Any, Protocol

from echo_jax.echo.stores.leaves import copied

# The result of `prepare` for one or more values, and the first and the end of its rows.
# It is a plain tuple because one is made for every item.
Element = tuple[Any, int, int]


class Intake(Protocol):
    """Prepares values when they are read; ``in_bulk`` allows several at once."""

    in_bulk: bool

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Returns some values prepared, and their rows; called where they are read."""
        # An error here is final.
        ...


INTERRUPTED = InterruptedError("it was interrupted in the middle")


class _NoState(TypeError):
    """An upstream refuses to give its state."""


class Source:
    """The upstream and its position; used by one thread at a time."""

    def __init__(
        self,
        iterator: Iterator[Any],
        intake: Intake | None = None,
        next_anchor: Callable[[int], int] | None = None,
    ):
        # Without an intake every value is one row, as it is.
        self.iterator: Any = iterator
        self.row = 0  # the next one
        self.read_s, self.num_read = 0.0, 0  # by `read`, and its values
        # The first rows of later passes, and the states before them.
        self.starts: deque[tuple[int, Any]] = deque()
        self._begins = False
        self._is_exhausted = False
        # Why the position is unknown. The caller resets it when it has kept the values.
        self.lost: BaseException | None = None
        # Calls ``next`` in code that no signal can interrupt.
        self._values = starmap(self.iterator.__next__, repeat(()))
        if not any(getattr(part, "copies", False) for part in (iterator, intake)):
            # The upstream may write into what it has given away.
            self._values = map(copied, self._values)
        self._intake = intake
        self.next_anchor = next_anchor
        # The first row whose state may be needed later.
        self._unsaved: float = math.inf
        self.refusal: BaseException | None = None  # by the upstream, to give its state
        self._failed: Exception | None = None  # by the upstream, in its last read
        self._untold: Exception | None = None

    def pull(self, count: int) -> list[Any]:
        """Returns the next ``count`` values, or fewer before an end or an error."""
        # If the upstream fails after some values, these are returned, and the next call
        # raises. An error is raised once; the call after it asks the upstream again.
        if self.lost is not None:
            raise self.unknown_place() from self.lost
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        failed, values = self._failed, []
        self.lost = INTERRUPTED
        try:
            # Takes values and keeps them; no signal can come in between.
            values.extend(islice(self._values, count))
        except Exception as error:
            self._failed = error
            if not values:
                self.lost = None
                raise
            self._untold = error
            return values
        if failed is not None:
            if not values:
                self.lost = failed
                raise RuntimeError(
                    "the upstream of this echo failed, and then ended: it does not go "
                    "on after an error; go to a saved state, or start again"
                ) from failed
            self._failed = None
        self._is_exhausted = len(values) < count
        return values

    @property
    def ended(self) -> bool:
        """Whether the upstream has ended, and all of its values are kept."""
        return self._is_exhausted and self.lost is None

    def unknown_place(self) -> RuntimeError:
        """Returns the error of a read that was interrupted or refused."""
        return RuntimeError(
            "the last read of the upstream was interrupted, or its element was "
            "refused, so it is not known which item comes next; go to a saved state, "
            "or start again"
        )

    def read(self, count: int) -> list[tuple[Any, int, int, Any]]:
        """Returns at most ``count`` next values, or nothing at the end.

        They are one element with its first row, its end, and the state of the upstream
        after it, or None if no restore needs this state.
        """
        intake, first, began = self._intake, self.row, perf_counter()
        if self._begins:
            # Only an iterator that has begun knows the order of its pass.
            self.starts.append((first, self.state_at(first)))
            self._begins = False
        if intake is None or not intake.in_bulk:
            count = 1
        elif first + count > self._unsaved:
            # The state before a row is saved between two reads.
            count = max(int(self._unsaved) - first, 1)
        values = self.pull(count)
        if not values:
            return values
        self.read_s += perf_counter() - began
        self.num_read += len(values)
        try:
            value, rows = intake.prepare(values) if intake else (values[0], 1)
        except BaseException as error:
            self.lost = error
            raise
        self.row = end = first + rows
        state = self.state_at(end) if end >= self._unsaved else None
        return [(value, first, end, state)]

    def state(self) -> Any:
        """Returns a copy of the upstream's state; None if it refuses to give one."""
        try:
            return copy.deepcopy(self.iterator.get_state())
        except Exception as error:
            # It goes on without a state, and only those who ask for one are refused.
            self.refusal = error.__cause__ if isinstance(error, _NoState) else error
            self.next_anchor, self._unsaved = None, math.inf
            return None

    def state_at(self, row: int) -> Any:
        """Returns the upstream's state before a row that a restore may go back to."""
        state = self.state()
        if self.next_anchor is not None:
            self._unsaved = self.next_anchor(row + 1)
        return state

    def restart(self) -> None:
        """Starts another pass over an upstream that has ended."""
        self.iterator.restart()
        self._is_exhausted, self._begins = False, self.next_anchor is not None

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.lost = INTERRUPTED
        self.iterator.set_state(copy.deepcopy(state))
        self.row = row
        if self.next_anchor is not None:
            self._unsaved = self.next_anchor(row + 1)
        self._is_exhausted = self._begins = False
        self.starts.clear()
        self._failed = self._untold = self.lost = None


def is_resumable(iterator: Any) -> bool:
    """Returns whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )


class _LoaderIterator(Iterator[Any]):
    """Passes over a loader, with a state if the loader or its iterator has one."""

    def __init__(self, loader: Any):
        self.wrapped = self._loader = loader
        self._ended = False
        names = ("state_dict", "load_state_dict")
        self._keeps_state = all(callable(getattr(loader, name, None)) for name in names)
        # An iterator is made when it is needed, by the thread that reads, because that
        # may start workers: after a restore only once.
        self._items: Any = None if self._keeps_state else iter(loader)
        if self._keeps_state or is_resumable(self._items):
            self.get_state, self.set_state = self._get_state, self._set_state
        if not isinstance(loader, Iterator):
            self.restart = self._restart

    def _begun(self) -> Any:
        if self._items is None:
            self._items = iter(self._loader)
        return self._items

    def __next__(self) -> Any:
        try:
            return next(self._begun())
        except StopIteration:
            self._ended = True
            raise

    def _restart(self) -> None:
        self._items, self._ended = None, False

    def _get_state(self) -> Any:
        items = self._begun()
        if not self._keeps_state:
            return items.get_state()
        return {"ended": int(self._ended), "loader": self._loader.state_dict()}

    def _set_state(self, state: Any) -> None:
        if not self._keeps_state:
            return self._begun().set_state(state)
        self._items = None  # ends its workers before others start
        self._loader.load_state_dict(state["loader"])
        # A loader goes on from its end with another pass, which `restart` is for.
        self._ended = bool(state["ended"])
        if self._ended:
            self._items = iter(())


def length_of(iterable: Any) -> int | None:
    """Returns the length of an iterable; None if it has none or is endless."""
    try:
        length = len(iterable)
    except (TypeError, NotImplementedError, OverflowError):
        return None
    return None if length == sys.maxsize else length


def batch_size_of(loader: Any) -> int:
    """Returns the batch size that a loader such as torch's states; 0 if none."""
    size = getattr(loader, "batch_size", 0)
    return size if type(size) is int else 0


def iterator_of(iterable: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator that can start again, and go to a state, if possible."""
    if isinstance(iterable, Iterator) and not hasattr(iterable, "state_dict"):
        return iter(iterable)
    return _LoaderIterator(iterable)


# How long a reader that is closed waits for its thread, which may be in a slow read.
_CLOSE_S = 5.0
_CLOSED = "this echo was closed while it waited"


class _Thread(threading.Thread):
    """Reads ahead, up to a row; it has no reference to a reader or an echo."""

    # Its lock and its queue are the only ones here, and are written in C: a signal
    # between the Python lines of a condition could leave it held.

    def __init__(self, source: Source):
        super().__init__(daemon=True)
        self.found: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self._source, self._limit, self._over = source, 0, False
        self.process = os.getpid()
        self._changed = threading.Lock()

    def run(self) -> None:
        source = self._source
        try:
            while not (source.ended or self._over):
                if source.row < self._limit:
                    self.found.put(source.read(1))
                    source.lost = None
                else:
                    self._changed.acquire()
        except BaseException as error:
            self.failure = error
        self.found.put([])

    def read_to(self, row: int) -> None:
        self._limit = row
        if self._source.row < row:
            self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # It has not seen the last change yet.
            self._changed.release()

    def end(self, wait_s: float | None) -> None:
        """Ends after the current read."""
        self._over = True
        self._wake()
        with contextlib.suppress(RuntimeError):  # It is this thread, or not started.
            self.join(wait_s)

    def close(self) -> None:
        """Gives an error to a caller that waits for this thread, and ends it."""
        self.failure = ValueError(_CLOSED)
        self.found.put([])
        self.end(_CLOSE_S)


class Reader:
    """Takes rows from an upstream, with up to ``depth`` rows read ahead in a thread."""

    def __init__(
        self,
        iterator: Iterator[Any],
        *,
        next_anchor: Callable[[int], int] | None,
        intake: Intake | None = None,
        depth: int = 0,
        timeout_s: float | None = None,
    ):
        # ``next_anchor`` is a pure function from a row to the first one from there on
        # that a restore may have to begin with; None if no row ever does.
        self._resumable = is_resumable(iterator)
        keeps = next_anchor if self._resumable else None
        self._source, self._begun = Source(iterator, intake, keeps), keeps is None
        self._depth, self._timeout_s = depth, timeout_s
        # Ends a wait for other processes.
        self.leave: Callable[[], None] = getattr(iterator, "leave", lambda: None)
        self.row = self._wanted = 0
        self.waited_s = 0.0  # by the caller
        # What `Source.read` returned, until its last row is taken.
        self._waiting: deque[tuple[Any, int, int, Any]] = deque()
        # Numbers of rows, up to the next one, and the upstream's states before them,
        # each with the pass over the upstream that it is of.
        self._saved: deque[tuple[int, Any, int]] = deque()
        self.epoch = 0
        self._thread: _Thread | None = None
        self._closed = False

    def check_process(self) -> None:
        """Raises RuntimeError in a forked process, which does not have the thread."""
        if self._thread is not None and self._thread.process != os.getpid():
            raise RuntimeError(
                "this echo reads ahead in a thread, which a forked process does not "
                "have. Make the echo in the child process, or start the process with "
                'multiprocessing.get_context("spawn").'
            )

    @property
    def can_restart(self) -> bool:
        return hasattr(self._source.iterator, "restart")

    @property
    def reading_s(self) -> tuple[float, int]:
        """The seconds that the first reader of the upstream took, and its values."""
        source = self._source
        own = source.read_s, source.num_read
        return getattr(source.iterator, "reading_s", own)

    @property
    def rows_ahead(self) -> int:
        """Rows that are read and not taken, also those that a thread still holds."""
        return self._source.row - self.row

    @property
    def rows(self) -> int:
        """Rows that are read and not taken."""
        return self._waiting[-1][2] - self.row if self._waiting else 0

    @property
    def next_value(self) -> Any:
        """The next value to be taken."""
        return self._waiting[0][0]

    def recover(self) -> None:
        """Goes back to before an interrupted read, if that is possible."""
        if self._source.lost is INTERRUPTED and self._resumable and not self._depth:
            state, row, epoch, _ = self.state_before(self.row)
            self.restore(state, row, epoch)

    def ensure(self, rows: int) -> None:
        """Reads until ``rows`` rows can be taken, or the upstream ends."""
        # An error of the upstream loses nothing: the next call asks it again.
        if not self._depth:
            self._begin()
            source, before_s = self._source, self._source.read_s
            while self.rows < rows and not source.ended:
                self._waiting.extend(source.read(rows - self.rows))
                source.lost = None
            self.waited_s += source.read_s - before_s
            return
        self._wanted = rows
        while self.rows < rows and not self.is_ready(rows):
            began = perf_counter()
            try:
                self._collect(self._reading(), wait=True)
            except queue.Empty:
                raise TimeoutError(
                    f"the loader gave no fresh batch for {self._timeout_s:.0f} s. See "
                    "what it waits for, or use a larger timeout_s"
                ) from None
            finally:
                self.waited_s += perf_counter() - began

    def is_ready(self, rows: int) -> bool:
        """Returns whether `ensure` would not wait; starts to read ahead."""
        if not self._depth:
            self.ensure(rows)
            return True
        thread = self._reading()
        # These are known before the last elements are collected.
        failure, ended = thread.failure, self._source.ended
        self._collect(thread)
        if self.rows < rows and failure is not None:
            if not self._closed:  # A close ends the thread, maybe after a slow read.
                self._end_thread()
            raise failure
        return self.rows >= rows or ended

    def take(self, rows: int, anchor: Callable[[], int] | None = None) -> list[Element]:
        """Takes at most `rows` rows; returns values with start and end rows."""
        # ``anchor`` returns the oldest row that a restore has to read again, by default
        # the next one to be taken.
        taken: list[Element] = []
        row, waiting = self.row, self._waiting
        self._keep_start()
        self.row = stop = row + rows
        while row < stop:
            value, first, end, state = waiting[0]
            taken.append((value, row - first, min(end, stop) - first))
            row = end
            if end <= stop:
                waiting.popleft()
                if state is not None:
                    self._keep(end, state, stop if anchor is None else anchor())
        return taken

    def read_on(self) -> None:
        """Wakes the thread after a `take`, once the taken rows are used."""
        # Before that it would compete with the caller for the interpreter.
        if (thread := self._thread) is not None:
            first = self._waiting[0][1] if self._waiting else self.row
            # It keeps ``depth`` rows, and the next element is in its hands.
            thread.read_to(max(first + self._depth + 1, self.row + self._wanted))

    def _keep_start(self) -> None:
        """Keeps the state at the start of a pass, if it has begun."""
        # Before its first row is taken the thread may have read no further.
        starts = self._source.starts
        while starts:
            row, state = starts.popleft()
            self._saved.append((row, state, self.epoch))

    def _keep(self, row: int, state: Any, anchor: int) -> None:
        saved = self._saved
        saved.append((row, state, self.epoch))
        while len(saved) > 1 and saved[1][0] <= anchor:
            saved.popleft()

    def check_resumable(self) -> None:
        """Raises TypeError if the upstream cannot go back to a state."""
        refusal, name = self._source.refusal, name_of(self._source.iterator)
        if refusal is not None:
            raise _NoState(
                f"the upstream of this echo, a {name}, does not give its state, so the "
                f"echo's state cannot be saved: {type(refusal).__name__}: {refusal}"
            ) from refusal
        if not self._resumable:
            raise TypeError(
                f"the upstream of this echo, a {name}, has no get_state and set_state, "
                "so the echo's state cannot be saved; give an iterator that has both, "
                "such as a Grain iterator, or a loader with state_dict and "
                "load_state_dict, such as a StatefulDataLoader"
            )

    def state_before(self, row: int) -> tuple[Any, int, int, list[tuple[int, Any]]]:
        """Returns the last saved upstream state before a row, its row and its pass."""
        # Also the states at the starts of later passes, each after its number.
        self.check_resumable()
        source, saved = self._source, self._saved
        if self._thread is None and not self._waiting:
            self._begin()
            if row == source.row and source.lost is None:
                state = source.state()
                self.check_resumable()
                return state, row, self.epoch, []
        self._keep_start()
        at = sum(first <= row for first, _, _ in saved) - 1
        if at < 0:
            raise source.unknown_place() from source.lost
        first, state, epoch = saved[at]
        later = {n: each for _, each, n in reversed(saved) if n > epoch}
        return *copy.deepcopy((state, first, epoch)), copy.deepcopy([*later.items()])

    def begin_epoch(self, row: int | None = None, state: Any = None) -> None:
        """Starts another pass over the upstream, maybe from a state, at some row."""
        self._end_thread()
        source, row = self._source, self.row if row is None else row
        if source.next_anchor is not None:
            if row != self.row:
                self._saved.clear()
            # A restore may go back to the end of the pass before.
            self._saved.append((row, source.state_at(row), self.epoch))
        source.restart()
        self.row, source.row, self._wanted = row, row, 0
        self.epoch += 1
        if state is not None:
            source.restore(state, row)
            self._saved.append((row, copy.deepcopy(state), self.epoch))

    def restore(self, state: Any, row: int, epoch: int = 0) -> None:
        """Goes back to a state, the one before a row, in a pass over the upstream."""
        self.leave()
        self._end_thread()
        self._begun = True
        self._waiting.clear()
        self._saved.clear()
        self.row, self._wanted, self.epoch = row, 0, epoch
        self._source.restore(state, row)
        if self._source.next_anchor is not None:
            self._saved.append((row, copy.deepcopy(state), epoch))

    def close(self) -> None:
        """Ends the thread, which may finish a read in progress; final."""
        self._closed = True
        # Another thread that waits for the upstream gets an error.
        self.leave()
        if self._thread is not None:
            self._thread.close()
            self._at_exit.detach()
        self._thread, self._waiting = None, deque()

    def _begin(self) -> None:
        """Saves the state before the first row."""
        if not self._begun:
            self._saved.append((0, self._source.state_at(0), 0))
            self._begun = True

    def _reading(self) -> _Thread:
        """Returns the thread that reads, or that has read to an end or an error."""
        if self._closed:
            raise ValueError(_CLOSED)
        thread, source = self._thread, self._source
        if thread is None or not (
            thread.is_alive() or thread.failure is not None or source.ended
        ):
            self._end_thread()
            self._begin()
            thread = _Thread(source)
            # A thread that sends data while the interpreter exits would crash it.
            self._at_exit = weakref.finalize(self, thread.close)
            # It is recorded before it runs: an interruption here leaves no second
            # thread that reads.
            self._thread = thread
            thread.start()
        self.read_on()
        return thread

    def _collect(self, thread: _Thread, *, wait: bool = False) -> None:
        """Moves what a thread has read to the waiting rows, in one step."""
        calls = repeat((True, self._timeout_s), thread.found.qsize() or wait)
        self._waiting.extend(chain.from_iterable(starmap(thread.found.get, calls)))

    def _end_thread(self) -> None:
        if self._thread is not None:
            self._thread.end(None)
            self._at_exit.detach()
            self._thread = None


def name_of(iterator: Any) -> str:
    """Returns the name of a class of the user, not of one that we put around it."""
    while isinstance(iterator, _LoaderIterator | ReadAhead):
        iterator = iterator.wrapped
    return type(iterator).__name__


class ReadAhead(Iterator[Any]):
    """Passes on the values of an iterator, and can show the next one before.

    A thread reads up to ``depth`` values meanwhile, so that sending a value to a device
    does not delay the reading of the next. It has a state if the iterator has one.
    """

    copies = True

    def __init__(
        self, iterator: Iterator[Any], depth: int = 2, timeout_s: float | None = None
    ):
        # One value waits while the next is read.
        self._reader = Reader(
            iterator, next_anchor=lambda row: row, depth=depth, timeout_s=timeout_s
        )
        self.wrapped = iterator
        if is_resumable(iterator):
            self.get_state = self._get_state
            self.set_state = self._set_state
        if hasattr(iterator, "restart"):
            self.restart = self._restart

    def peek(self) -> Any:
        """Returns the next value, which stays the next one."""
        reader = self._reader
        reader.recover()
        reader.ensure(1)
        if not reader.rows:
            raise StopIteration
        return reader.next_value

    def __next__(self) -> Any:
        """Returns the next value; a call after an error asks the iterator again."""
        value, reader = ReadAhead.peek(self), self._reader
        reader.take(1)
        reader.read_on()
        return value

    @property
    def reading_s(self) -> tuple[float, int]:
        return self._reader.reading_s

    def _get_state(self) -> Any:
        return self._reader.state_before(self._reader.row)[0]

    def _set_state(self, state: Any) -> None:
        self._reader.restore(state, self._reader.row, self._reader.epoch)

    def _restart(self) -> None:
        self._reader.begin_epoch()

    def leave(self) -> None:
        """Ends a wait for other processes."""
        self._reader.leave()

    def close(self) -> None:
        """Ends the thread; the iterator stays open."""
        self._reader.close()
