"""Reads chunks ahead of their use, and remembers where a restore may start."""

import copy
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ChunkReader", "PeekedIterator"]

# A reader thread looks this often whether it is to stop while nobody takes.
_POLL_S = 0.05
_CLOSE_S = 5.0


class PeekedIterator(Iterator[Any]):
    """An iterator whose next element can be looked at before it is taken."""

    def __init__(self, iterator: Iterator[Any]):
        """Takes over an iterator, with its state if it has one."""
        self._iterator: Any = iterator
        self._peeked: list[Any] = []
        if is_resumable(iterator):
            self.get_state = self._get_state
            self.set_state = self._set_state

    def peek(self) -> Any:
        """Returns the next element, which stays the next one.

        Raises:
          StopIteration: There is none.
        """
        if not self._peeked:
            if is_resumable(self._iterator):
                self._state = copy.deepcopy(self._iterator.get_state())
            self._peeked.append(next(self._iterator))
        return self._peeked[0]

    def __next__(self) -> Any:
        """Returns the next element."""
        return self._peeked.pop() if self._peeked else next(self._iterator)

    def _get_state(self) -> Any:
        return self._state if self._peeked else self._iterator.get_state()

    def _set_state(self, state: Any) -> None:
        self._peeked.clear()
        self._iterator.set_state(state)


class ChunkReader:
    """Takes chunks from an iterator in a thread, up to so many ahead.

    The thread also sends them on their way, so that transfers overlap with steps.
    """

    def __init__(
        self, iterator: Iterator[Any], put: Callable[[Any], Any], *, depth: int
    ):
        """Reads nothing yet.

        Args:
          iterator: Yields host batches.
          put: Applied to each of them, in the thread.
          depth: Chunks ahead; 0 reads when asked.
        """
        self._iterator: Any = iterator
        self._put = put
        self._depth = depth
        self._resumable = is_resumable(iterator)
        # By chunk number: the state of the iterator before it.
        self._before: dict[int, Any] = {0: self._state()}
        self._next = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def is_ready(self) -> bool:
        """Whether `take` would not have to wait."""
        self._start()
        return self._ended or self._depth == 0 or not self._queue.empty()

    def take(self) -> Any:
        """Returns the next chunk, None if there are no more.

        Raises:
          Exception: What the iterator raised.
        """
        if self._ended:
            return None
        self._start()
        found = self._read() if self._depth == 0 else self._queue.get()
        if isinstance(found, BaseException):
            self._ended = True
            raise found
        if found is None:
            self._ended = True
            return None
        chunk, state = found
        self._next += 1
        self._before[self._next] = state
        return chunk

    def state_before(self, number: int) -> Any:
        """Returns the iterator's state before a chunk, and forgets older ones.

        Args:
          number: Of a chunk that is taken, or of the next one.

        Raises:
          TypeError: The iterator has no state.
        """
        if not self._resumable:
            raise TypeError(
                f"the upstream of this echo, a {type(self._iterator).__name__}, has "
                "no get_state and set_state, so the echo's state cannot be saved; "
                "give an iterator that has both, such as a Grain iterator"
            )
        self.forget(number)
        return copy.deepcopy(self._before[number])

    def forget(self, number: int) -> None:
        """Drops the states from before the chunks that come before this one."""
        for old in [key for key in self._before if key < number]:
            del self._before[old]

    def restore(self, state: Any, number: int) -> None:
        """Goes back to a state, the one before chunk ``number``."""
        self.close(wait_s=None)
        self._iterator.set_state(copy.deepcopy(state))
        self._before = {number: copy.deepcopy(state)}
        self._next, self._ended = number, False

    def close(self, wait_s: float | None = _CLOSE_S) -> None:
        """Ends the thread.

        Args:
          wait_s: How long to wait until the iterator lets it; None for ever. Later it
            ends by itself, or with the process.
        """
        if self._thread is not None:
            self._at_exit.detach()
            _end(self._thread, self._stop, wait_s)
            self._thread = None

    def _start(self) -> None:
        if self._depth and self._thread is None and not self._ended:
            self._queue: queue.Queue[Any] = queue.Queue(self._depth)
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._run, args=(self._queue, self._stop), daemon=True
            )
            self._thread.start()
            # A thread that sends data while the interpreter goes away would end the
            # process with a crash.
            self._at_exit = weakref.finalize(self, _end, self._thread, self._stop)

    def _run(self, chunks: queue.Queue[Any], stop: threading.Event) -> None:
        found: Any = ()
        while found is not None and not stop.is_set():
            try:
                found = self._read()
            except BaseException as error:
                _offer(chunks, error, stop)
                return
            _offer(chunks, found, stop)

    def _read(self) -> tuple[Any, Any] | None:
        """The next chunk, on its way, and the iterator's state after it."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        return self._put(batch), self._state()

    def _state(self) -> Any:
        return copy.deepcopy(self._iterator.get_state()) if self._resumable else None


def is_resumable(iterator: Any) -> bool:
    """Whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )


def _end(
    thread: threading.Thread, stop: threading.Event, wait_s: float | None = _CLOSE_S
) -> None:
    stop.set()
    thread.join(wait_s)


def _offer(chunks: queue.Queue[Any], found: Any, stop: threading.Event) -> None:
    """Puts something into a queue, unless it is to stop first."""
    while not stop.is_set():
        try:
            return chunks.put(found, timeout=_POLL_S)
        except queue.Full:
            continue
