"""Iterators with a state, made from loaders that keep their state themselves.

This is PyTorch's convention: ``state_dict`` and ``load_state_dict`` belong to the
loader, and describe the iterator that it made last. An echo asks its upstream's
iterator.
"""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from echo_jax.echo.source import INTERRUPTED, Source, is_resumable


class _LoaderIterator(Iterator[Any]):
    """One pass over a loader, with ``get_state`` and ``set_state``."""

    def __init__(self, loader: Any):
        self._loader = loader
        # It is made when it is needed, because it may start workers: after a restore
        # only once.
        self._items: Iterator[Any] | None = None
        self._ended = False

    def _begun(self) -> Iterator[Any]:
        if self._items is None:
            self._items = iter(self._loader)
        return self._items

    def __next__(self) -> Any:
        try:
            return next(self._begun())
        except StopIteration:
            self._ended = True
            raise

    def get_state(self) -> dict[str, Any]:
        self._begun()
        return {"ended": int(self._ended), "loader": self._loader.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._items = None  # ends its workers before others start
        self._loader.load_state_dict(state["loader"])
        # A loader goes on from its end with another pass; an echo of one pass must not.
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


def iterator_of(iterable: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator, with a state if the iterable or its iterator has one."""
    methods = ("state_dict", "load_state_dict")
    if all(callable(getattr(iterable, name, None)) for name in methods):
        return _LoaderIterator(iterable)
    return iter(iterable)


class PeekedIterator(Iterator[Any]):
    """An iterator that can show its next element before it is taken."""

    def __init__(self, iterator: Iterator[Any]):
        self._iterator: Any = iterator
        self._source = Source(iterator)
        self._peeked: list[Any] = []
        if is_resumable(iterator):
            self.get_state = self._get_state
            self.set_state = self._set_state

    def peek(self) -> Any:
        """Returns the next element, which stays the next one."""
        if not self._peeked:
            source = self._source
            if is_resumable(self._iterator):
                if source.lost is INTERRUPTED:
                    source.restore(self._state, 0)
                self._state = source.state()
            self._peeked += source.pull(1)
            source.lost = None
        if not self._peeked:
            raise StopIteration
        return self._peeked[0]

    def __next__(self) -> Any:
        return self._peeked.pop() if self._peeked else next(self._iterator)

    def _get_state(self) -> Any:
        return self._state if self._peeked else self._iterator.get_state()

    def _set_state(self, state: Any) -> None:
        self._peeked.clear()
        self._source.restore(state, 0)
