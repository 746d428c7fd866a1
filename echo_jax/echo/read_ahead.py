"""Reads an iterator ahead in a thread."""

from collections.abc import Iterator
from typing import Any

from echo_jax.echo.reader import Reader
from echo_jax.echo.source import is_resumable

__all__ = ["ReadAhead"]


class ReadAhead(Iterator[Any]):
    """Passes on the values of an iterator, and reads the next value meanwhile."""

    # So work on one value, such as sending it to a device, does not delay the reading
    # of the next. It has ``get_state`` and ``set_state`` if the iterator has both, with
    # states of the iterator.

    def __init__(self, iterator: Iterator[Any]):
        # One value waits while the next is read.
        self._reader = Reader(iterator, next_anchor=lambda row: row, depth=2)
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
