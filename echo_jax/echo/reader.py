"""Reads an upstream: when asked or ahead in a thread, and knows how to go back.

Whatever an upstream does, nothing that it gave is lost or counted twice: what was read
waits here until an echo takes it, an error is told and no end is made of it, and a
read that was interrupted at a place that nobody can know is not gone on from.
"""

import copy
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat, starmap
from typing import Any

__all__ = ["Element", "Reader", "is_resumable"]

# How long a reader that is closed waits for its thread, which may be in a slow read.
_CLOSE_S = 5.0


# What was read: the value that `prepare` made of it, the first and the end of its rows
# that are meant, the number of its first row, and the upstream's state before it, or
# None if that need not be gone back to. A plain tuple: one is made for every item.
Element = tuple[Any, int, int, int, Any]

_NOTHING: Any = object()
_INTERRUPTED = InterruptedError("it was interrupted in the middle")


class _Source:
    """The upstream, and how far it is read; used by one thread at a time.

    Attributes:
      iterator: The upstream.
      started: Whether that before the first row is known.
      upcoming: The number of the next row, and the upstream's state before it, if it
        may be gone back to; else None. One pair, so that both change in one step.
      lost: Why nobody knows where the upstream stands; None where it is known. To be
        set to None once what was read is kept.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        prepare: Callable[[Any], tuple[Any, int]],
        next_anchor: Callable[[int], int] | None,
    ):
        self.iterator: Any = iterator
        self.upcoming: tuple[int, Any] = (0, None)
        self.started = False
        self.lost: BaseException | None = None
        # What ``next`` gives, by code that no signal can interrupt.
        self._elements = starmap(self.iterator.__next__, repeat(()))
        self._prepare = prepare
        self._next_anchor = next_anchor
        # The first row whose state may be needed later.
        self._unsaved: float = math.inf
        self._failed: BaseException | None = None  # by the upstream, in its last read

    def start(self) -> None:
        """Looks at the state before the first row."""
        self.upcoming = (0, self._state_at(0) if self._next_anchor else None)
        self.started = True

    def pull(self) -> Any:
        """Returns what the upstream gives next, `_NOTHING` at its end.

        Raises:
          Exception: What the upstream raised: it is asked again by the next call.
          RuntimeError: What comes next cannot be known any more.
        """
        if self.lost is not None:
            raise RuntimeError(
                "the last read of the upstream was interrupted, or its element was "
                "refused, so it is not known which item comes next; go to a saved "
                "state, or start anew"
            ) from self.lost
        self.lost, value = _INTERRUPTED, _NOTHING
        try:
            # Takes an element and keeps it, with no place for a signal in between.
            for value in self._elements:  # noqa: B007
                break
        except Exception as error:
            if value is _NOTHING:
                self._failed, self.lost = error, None
            raise
        if self._failed is not None:
            if value is _NOTHING:
                self.lost = self._failed
                raise RuntimeError(
                    "the upstream of this echo failed, and then ended: it does not go "
                    "on after an error; go to a saved state, or start anew"
                ) from self._failed
            self._failed = None
        return value

    def read(self) -> Element | None:
        """Returns the next element; None at the end.

        Raises:
          Exception: See `pull`. Or what is wrong with the element, which is final.
        """
        value = self.pull()
        if value is _NOTHING:
            return None
        try:
            prepared, rows = self._prepare(value)
        except BaseException as error:
            self.lost = error
            raise
        first, state = self.upcoming
        row = first + rows
        self.upcoming = (row, self._state_at(row) if row >= self._unsaved else None)
        return prepared, 0, rows, first, state

    def state(self) -> Any:
        """Returns the upstream's state now."""
        return copy.deepcopy(self.iterator.get_state())

    def _state_at(self, row: int) -> Any:
        """Returns the upstream's state now, before a row that may be gone back to."""
        assert self._next_anchor is not None
        state = self.state()
        self._unsaved = self._next_anchor(row + 1)
        return state

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.lost = _INTERRUPTED
        self.iterator.set_state(copy.deepcopy(state))
        self.upcoming = (row, copy.deepcopy(state))
        if self._next_anchor is not None:
            self._unsaved = self._next_anchor(row + 1)
        self.started = True
        self._failed = self.lost = None


class _Queue:
    """What was read and not taken, shared with the thread that reads ahead.

    Attributes:
      lock: Held to change anything here.
      changed: Tells whoever waits with it.
      elements: In their order.
      rows: Of all of them.
      depth: As many rows are read ahead.
      upcoming: The number of the row after them, and the state before it or None.
      ended: Whether the upstream has no more.
      failure: What the thread ended with.
      thread: The only one that may read; another one ends.
    """

    def __init__(self, depth: int):
        # Held by itself: between Python's lines of a condition a signal may come, and
        # leave it held.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.elements: deque[Element] = deque()
        self.rows = 0
        self.depth = depth
        self.upcoming: tuple[int, Any] = (0, None)
        self.ended = False
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None

    def fill(self, source: _Source) -> None:
        """Reads an element, and adds it; or notes the end."""
        element = source.read()
        with self.lock:
            self.add(element, source)
            self.changed.notify_all()

    def add(self, element: Element | None, source: _Source) -> None:
        """Adds what was read."""
        if element is None:
            self.ended = True
        else:
            self.elements.append(element)
            self.rows += element[2]
        self.upcoming = source.upcoming
        source.lost = None


def _read_ahead(source: _Source, queue: _Queue) -> None:
    """Fills a queue: what the thread does, which knows of no reader and no echo."""
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
    """Takes rows from an upstream, up to so many ahead in a thread.

    The thread knows nothing of the reader: one that is dropped ends its thread.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        *,
        anchor: Callable[[], int],
        next_anchor: Callable[[int], int] | None,
        prepare: Callable[[Any], tuple[Any, int]] = lambda value: (value, 1),
        depth: int = 0,
    ):
        """Reads nothing yet.

        Args:
          iterator: The upstream. With ``get_state`` and ``set_state`` it can be gone
            back in.
          anchor: Returns the oldest row that a restore has to read again.
          next_anchor: From a row to the first one from there on that may become the
            anchor, a pure function; None if none ever does.
          prepare: From what the upstream gave to what is kept of it, and how many rows
            it has; called in the thread. What it raises is final.
          depth: Rows that are read ahead by a thread; 0 reads when asked.
        """
        self.resumable = is_resumable(iterator)
        keeps = next_anchor if self.resumable else None
        self._source = _Source(iterator, prepare, keeps)
        self._source.started = keeps is None
        self._anchor = anchor
        self._depth = depth
        self._queue = _Queue(depth)
        self._used = 0  # rows of the first element that are taken
        # Numbers of rows, and the states of the upstream before them.
        self._saved: deque[tuple[int, Any]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def rows(self) -> int:
        """Rows that are read and not taken."""
        return self._queue.rows - self._used

    @property
    def ended(self) -> bool:
        """Whether the upstream is known to have no more."""
        return self._queue.ended

    def ensure(self, rows: int) -> None:
        """Reads until so many rows can be taken, or the upstream ends.

        Raises:
          Exception: What the upstream raised. Nothing is lost by it, and it is asked
            again by the next call.
        """
        queue = self._queue
        if not self._depth:
            self._begin()
            source, rows = self._source, rows + self._used
            read, add = source.read, queue.add
            while queue.rows < rows and not queue.ended:
                add(read(), source)
            return
        with queue.lock:
            queue.depth = max(self._depth, rows + self._used)
            queue.changed.notify_all()
        while self.rows < rows and not queue.ended:
            self._start()
            with queue.lock:
                while self.rows < rows and not queue.ended and queue.failure is None:
                    queue.changed.wait()
            if self.rows < rows and queue.failure is not None:
                self._raise_failure(queue)

    def is_ready(self, rows: int) -> bool:
        """Whether `ensure` would not have to wait; starts to read ahead.

        Raises:
          Exception: What the upstream raised.
        """
        if not self._depth:
            self.ensure(rows)
            return True
        self._start()
        queue = self._queue
        if self.rows < rows and queue.failure is not None:
            self._raise_failure(queue)
        return self.rows >= rows or queue.ended

    def pass_on(self) -> list[Any]:
        """Reads and takes an element of one row as it is; `settle` must follow.

        Returns:
          What the upstream gave, alone in a list; nothing at its end.
        """
        source = self._source
        value = source.pull()
        if value is _NOTHING:
            return []
        source.upcoming = (source.upcoming[0] + 1, None)
        return [value]

    def settle(self) -> None:
        """Says that what was passed on is counted."""
        self._source.lost = None

    def take(self, rows: int) -> list[Element]:
        """Takes rows that are there.

        Args:
          rows: At most as many as `rows` says.

        Returns:
          Elements: of a value that is not taken as a whole, the first and the end of
          its rows that are.
        """
        taken: list[Element] = []
        queue, done = self._queue, 0
        elements = queue.elements
        while rows:
            element = elements[0]
            value, _, size, number, state = element
            first = self._used
            if first or size > rows:
                end = min(first + rows, size)
                element = (value, first, end, number, state)
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
            if state is not None and not first:
                self._keep(number, state)
        with queue.lock:
            queue.rows -= done
            if self._depth:
                queue.changed.notify_all()
        return taken

    def _keep(self, row: int, state: Any) -> None:
        anchor = self._anchor()
        while len(self._saved) > 1 and self._saved[1][0] <= anchor:
            self._saved.popleft()
        self._saved.append((row, state))

    def check_resumable(self) -> None:
        """Refuses an upstream that cannot be gone back in.

        Raises:
          TypeError: The upstream has no state.
        """
        if not self.resumable:
            raise TypeError(
                f"the upstream of this echo, a {type(self._source.iterator).__name__}, "
                "has no get_state and set_state, so the echo's state cannot be saved; "
                "give an iterator that has both, such as a Grain iterator"
            )

    def state_before(self, row: int) -> tuple[Any, int]:
        """Returns the last saved state from before a row, and the rows between.

        Args:
          row: One that can become the anchor, or the next to be taken.

        Raises:
          TypeError: The upstream has no state.
        """
        self.check_resumable()
        if self._thread is None and not self._queue.elements:
            self._begin()
            if row == self._source.upcoming[0] and self._source.lost is None:
                return self._source.state(), 0
        with self._queue.lock:
            waiting = [(first, state) for *_, first, state in self._queue.elements]
            known = [*self._saved, *waiting, self._queue.upcoming]
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
        self._end_thread(None)
        self._queue = _Queue(self._depth)
        self._saved.clear()
        self._used = 0
        self._source.restore(state, row)
        self._queue.upcoming = self._source.upcoming

    def close(self) -> None:
        """Ends the thread, which may finish a read that goes on; final.

        Another thread that waits for the upstream is told so.
        """
        queue = self._queue
        with queue.lock:
            queue.failure = ValueError("this echo was closed while it waited")
            queue.changed.notify_all()
        self._end_thread(_CLOSE_S)
        self._queue = _Queue(0)
        self._queue.ended = True

    def _begin(self) -> None:
        """Looks at the state before the first row."""
        if not self._source.started:
            self._source.start()
            self._queue.upcoming = self._source.upcoming

    def _start(self) -> None:
        """Starts the thread, unless it runs or there is nothing to read."""
        if self._thread is not None and not self._thread.is_alive():
            self._end_thread(None)
        queue = self._queue
        if self._thread is not None or queue.ended or queue.failure is not None:
            return
        self._begin()
        thread = threading.Thread(
            target=_read_ahead, args=(self._source, queue), daemon=True
        )
        # A thread that sends data while the interpreter goes away would end the
        # process with a crash.
        self._at_exit = weakref.finalize(self, _end, thread, queue, _CLOSE_S)
        # Known before it runs: an interruption here leaves no second one that reads.
        queue.thread = self._thread = thread
        thread.start()

    def _raise_failure(self, queue: _Queue) -> None:
        failure, queue.failure = queue.failure, None
        self._end_thread(None)
        assert failure is not None
        raise failure

    def _end_thread(self, wait_s: float | None) -> None:
        if self._thread is not None:
            self._at_exit.detach()
            _end(self._thread, self._queue, wait_s)
            self._thread = None


def is_resumable(iterator: Any) -> bool:
    """Whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )


def _end(thread: threading.Thread, queue: _Queue, wait_s: float | None) -> None:
    with queue.lock:
        if queue.thread is thread:
            queue.thread = None
        queue.changed.notify_all()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(wait_s)
