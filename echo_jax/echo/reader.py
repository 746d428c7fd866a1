"""Reads an upstream on request or ahead in a thread, and can go back in it.

The read rows wait here until an echo takes them.
"""

import contextlib
import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, repeat, starmap
from typing import Any

from echo_jax.echo.source import Element, Intake, Source, is_resumable

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
        # What `Source.read` returned, until its last row is taken.
        self._waiting: deque[tuple[Any, int, int, Any]] = deque()
        # Numbers of rows, up to the next one, and the upstream's states before them.
        self._saved: deque[tuple[int, Any]] = deque()
        self._thread: _Thread | None = None
        self._closed = False

    @property
    def rows(self) -> int:
        """Rows that are read and not taken."""
        return self._waiting[-1][2] - self.row if self._waiting else 0

    def ensure(self, rows: int) -> None:
        """Reads until ``rows`` rows can be taken, or the upstream ends."""
        # An error of the upstream loses nothing: the next call asks it again.
        if not self._depth:
            self._begin()
            source = self._source
            while self.rows < rows and not source.ended:
                self._waiting.extend(source.read(rows - self.rows))
                source.lost = None
            return
        self._wanted = rows
        while not self.is_ready(rows):
            try:
                self._collect(self._reading(), wait=True)
            except queue.Empty:
                raise TimeoutError(
                    f"the loader gave no fresh batch for {self._timeout_s:.0f} s. See "
                    "what it waits for, or use a larger timeout_s"
                ) from None

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
            thread.read_to(max(first + self._depth, self.row + self._wanted))

    def _keep(self, row: int, state: Any, anchor: int) -> None:
        saved = self._saved
        saved.append((row, state))
        while len(saved) > 1 and saved[1][0] <= anchor:
            saved.popleft()

    def check_resumable(self) -> None:
        """Raises TypeError if the upstream cannot go back to a state."""
        if not self._resumable:
            raise TypeError(
                f"the upstream of this echo, a {type(self._source.iterator).__name__}, "
                "has no get_state and set_state, so the echo's state cannot be saved; "
                "give an iterator that has both, such as a Grain iterator, or a loader "
                "with state_dict and load_state_dict, such as a StatefulDataLoader"
            )

    def state_before(self, row: int) -> tuple[Any, int]:
        """Returns the last saved upstream state before a row, and the rows between."""
        self.check_resumable()
        source = self._source
        if self._thread is None and not self._waiting:
            self._begin()
            if row == source.row and source.lost is None:
                return source.state(), 0
        for first, state in reversed(self._saved):
            if first <= row:
                return copy.deepcopy(state), row - first
        raise source.unknown_place() from source.lost

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.leave()
        self._end_thread()
        self._begun = True
        self._waiting.clear()
        self._saved.clear()
        self.row, self._wanted = row, 0
        self._source.restore(state, row)
        if self._source.next_anchor is not None:
            self._saved.append((row, copy.deepcopy(state)))

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
            self._saved.append((0, self._source.state_at(0)))
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


class ReadAhead(Iterator[Any]):
    """Passes on the values of an iterator, and reads the next value meanwhile."""

    # So sending one value to a device does not delay the reading of the next. It has
    # ``get_state`` and ``set_state`` if the iterator has both.

    def __init__(
        self, iterator: Iterator[Any], depth: int = 2, timeout_s: float | None = None
    ):
        # One value waits while the next is read.
        self._reader = Reader(
            iterator, next_anchor=lambda row: row, depth=depth, timeout_s=timeout_s
        )
        self.leave = self._reader.leave
        if is_resumable(iterator):
            self.get_state = self._get_state
            self.set_state = self._set_state

    def __next__(self) -> Any:
        """Returns the next value; a call after an error asks the iterator again."""
        reader = self._reader
        reader.ensure(1)
        if not reader.rows:
            raise StopIteration
        ((value, _, _),) = reader.take(1)
        reader.read_on()
        return value

    def _get_state(self) -> Any:
        state, _ = self._reader.state_before(self._reader.row)
        return state

    def _set_state(self, state: Any) -> None:
        self._reader.restore(state, self._reader.row)

    def close(self) -> None:
        """Ends the thread; the iterator stays open."""
        self._reader.close()
