"""Reads an upstream on request or ahead in a thread, and can go back in it.

The read rows wait here until an echo takes them.
"""

import copy
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from echo_jax.echo.source import AsItIs, Element, Intake, Source, is_resumable

__all__ = ["ReadAhead", "Reader"]

# How long a reader that is closed waits for its thread, which may be in a slow read.
_CLOSE_S = 5.0


class _Queue:
    """The rows that were read and not taken, shared with the reading thread."""

    def __init__(self, depth: int):
        # The lock is held directly: a signal between the Python lines of a condition
        # could leave it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.elements: deque[Element] = deque()
        self.rows = 0
        self.states: deque[tuple[int, Any]] = deque()
        self.depth = depth
        self.upcoming: tuple[int, Any] = (0, None)
        self.ended = False
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None

    def fill(self, source: Source) -> None:
        """Reads an element and adds it, or notes the end."""
        elements = source.read(1)
        with self.lock:
            self.add(elements, source)
            self.changed.notify_all()

    def add(self, elements: list[Element], source: Source) -> None:
        if elements:
            if self.upcoming[1] is not None:
                self.states.append(self.upcoming)
            self.elements.extend(elements)
            self.rows += source.upcoming[0] - self.upcoming[0]
        self.ended, self.upcoming = source.ended, source.upcoming
        source.lost = None


def _read_ahead(source: Source, queue: _Queue) -> None:
    """Fills a queue in a thread, which has no reference to a reader or an echo."""
    me = threading.current_thread()
    try:
        while not queue.ended:
            with queue.lock:
                while queue.rows >= queue.depth and queue.thread is me:
                    queue.changed.wait()
                if queue.thread is not me:
                    return
            queue.fill(source)
    except BaseException as error:
        with queue.lock:
            queue.failure = error
            queue.changed.notify_all()


class Reader:
    """Takes rows from an upstream, with up to ``depth`` rows read ahead in a thread."""

    # The thread has no reference to the reader, so dropping the reader ends it.

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
        self.resumable = is_resumable(iterator)
        keeps = next_anchor if self.resumable else None
        self._source = Source(iterator, intake or AsItIs(), keeps)
        self._source.started = keeps is None
        self._depth, self._timeout_s = depth, timeout_s
        # Ends a wait for other processes.
        self.leave: Callable[[], None] = getattr(iterator, "leave", lambda: None)
        self._queue = _Queue(depth)
        self._used = 0  # rows of the first element that are taken
        self.row = 0
        # Numbers of rows that are taken, and the upstream's states before them.
        self._saved: deque[tuple[int, Any]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> int:
        """Rows that are read and not taken."""
        return self._queue.rows - self._used

    @property
    def ended(self) -> bool:
        return self._queue.ended

    def ensure(self, rows: int) -> None:
        """Reads until ``rows`` rows can be taken, or the upstream ends."""
        # An error of the upstream loses nothing: the next call asks it again.
        queue = self._queue
        if not self._depth:
            self._begin()
            source, rows = self._source, rows + self._used
            while queue.rows < rows and not queue.ended:
                queue.add(source.read(rows - queue.rows), source)
            return
        with queue.lock:
            queue.depth = max(self._depth, rows + self._used)
            queue.changed.notify_all()
        while self.rows < rows and not queue.ended:
            self._start()
            with queue.lock:
                while self.rows < rows and not queue.ended and queue.failure is None:
                    if not queue.changed.wait(self._timeout_s):
                        raise TimeoutError(
                            f"the loader gave no fresh batch for {self._timeout_s:.0f} "
                            "s. See what it waits for, or use a larger timeout_s"
                        )
            if self.rows < rows and queue.failure is not None:
                self._raise_failure(queue)

    def is_ready(self, rows: int) -> bool:
        """Returns whether `ensure` would not wait; starts to read ahead."""
        if not self._depth:
            self.ensure(rows)
            return True
        self._start()
        queue = self._queue
        if self.rows < rows and queue.failure is not None:
            self._raise_failure(queue)
        return self.rows >= rows or queue.ended

    def take(self, rows: int, anchor: Callable[[], int] | None = None) -> list[Element]:
        """Takes at most `rows` rows; returns values with start and end rows."""
        # ``anchor`` returns the oldest row that a restore has to read again, by default
        # the next one to be taken.
        queue = self._queue
        elements = queue.elements
        if self._used or len(elements) < queue.rows:
            taken, done = self._take_parts(rows)
        else:  # Every element is a row.
            taken, done = [elements.popleft() for _ in range(rows)], rows
        if self._depth:
            with queue.lock:
                queue.rows -= done
                queue.changed.notify_all()
        else:
            queue.rows -= done
        self.row += rows
        states = queue.states
        while states and states[0][0] < self.row:
            self._keep(states.popleft(), self.row if anchor is None else anchor())
        return taken

    def _take_parts(self, rows: int) -> tuple[list[Element], int]:
        """Takes from elements of several rows; also returns the rows used up."""
        taken: list[Element] = []
        elements, done = self._queue.elements, 0
        while rows:
            value, _, size = element = elements[0]
            first = self._used
            if first or size > rows:
                end = min(first + rows, size)
                element = (value, first, end)
                self._used = end
                rows -= end - first
            else:
                end = size
                rows -= size
            taken.append(element)
            if end == size:
                elements.popleft()
                self._used = 0
                done += size
        return taken, done

    def _keep(self, saved: tuple[int, Any], anchor: int) -> None:
        while len(self._saved) > 1 and self._saved[1][0] <= anchor:
            self._saved.popleft()
        self._saved.append(saved)

    def check_resumable(self) -> None:
        """Raises TypeError if the upstream cannot go back to a state."""
        if not self.resumable:
            raise TypeError(
                f"the upstream of this echo, a {type(self._source.iterator).__name__}, "
                "has no get_state and set_state, so the echo's state cannot be saved; "
                "give an iterator that has both, such as a Grain iterator, or a loader "
                "with state_dict and load_state_dict, such as a StatefulDataLoader"
            )

    def state_before(self, row: int) -> tuple[Any, int]:
        """Returns the last saved upstream state before a row, and the rows between."""
        self.check_resumable()
        if self._thread is None and not self._queue.elements:
            self._begin()
            if row == self._source.upcoming[0] and self._source.lost is None:
                return self._source.state(), 0
        with self._queue.lock:
            known = [*self._saved, *self._queue.states, self._queue.upcoming]
        for first, state in reversed(known):
            if first <= row and state is not None:
                return copy.deepcopy(state), row - first
        raise RuntimeError(
            "the last read of the upstream was interrupted, or its element was "
            "refused, so it is not known where it stands; go to a saved state, or "
            "start anew"
        )

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.leave()
        self._end_thread(None)
        self._queue = _Queue(self._depth)
        self._saved.clear()
        self._used, self.row = 0, row
        self._source.restore(state, row)
        self._queue.upcoming = self._source.upcoming

    def close(self) -> None:
        """Ends the thread, which may finish a read in progress; final."""
        # Another thread that waits for the upstream gets an error.
        self.leave()
        _refuse(self._queue)
        self._end_thread(_CLOSE_S)
        self._queue = _Queue(0)
        self._queue.ended = True

    def _begin(self) -> None:
        """Saves the state before the first row."""
        if not self._source.started:
            self._source.start()
            self._queue.upcoming = self._source.upcoming

    def _start(self) -> None:
        """Starts the thread, unless it runs or the upstream has ended or failed."""
        if self._thread is not None and not self._thread.is_alive():
            self._end_thread(None)
        queue = self._queue
        if self._thread is not None or queue.ended or queue.failure is not None:
            return
        self._begin()
        thread = threading.Thread(
            target=_read_ahead, args=(self._source, queue), daemon=True
        )
        # A thread that sends data while the interpreter exits would crash the process.
        self._at_exit = weakref.finalize(self, _abandon, thread, queue)
        # It is recorded before it runs: an interruption here leaves no second thread
        # that reads.
        queue.thread = self._thread = thread
        thread.start()

    def _raise_failure(self, queue: _Queue) -> None:
        failure, queue.failure = queue.failure, None
        if queue.thread is not None:  # else a close ends it, maybe after a slow read
            self._end_thread(_CLOSE_S)
        assert failure is not None
        raise failure

    def _end_thread(self, wait_s: float | None) -> None:
        if self._thread is not None:
            self._at_exit.detach()
            _end(self._thread, self._queue, wait_s)
            self._thread = None


def _refuse(queue: _Queue) -> None:
    """Gives an error to every thread that waits for a queue."""
    with queue.lock:
        queue.thread = None
        queue.failure = ValueError("this echo was closed while it waited")
        queue.changed.notify_all()


def _abandon(thread: threading.Thread, queue: _Queue) -> None:
    """Ends the thread of a reader that is gone."""
    _refuse(queue)
    _end(thread, queue, _CLOSE_S)


def _end(thread: threading.Thread, queue: _Queue, wait_s: float | None) -> None:
    with queue.lock:
        if queue.thread is thread:
            queue.thread = None
        queue.changed.notify_all()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(wait_s)


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
        return value

    def _get_state(self) -> Any:
        state, _ = self._reader.state_before(self._reader.row)
        return state

    def _set_state(self, state: Any) -> None:
        self._reader.restore(state, self._reader.row)

    def close(self) -> None:
        """Ends the thread; the iterator stays open."""
        self._reader.close()
