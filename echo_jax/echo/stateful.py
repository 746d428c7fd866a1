"""Loaders that keep their state themselves, as iterators whose state an echo can keep.

PyTorch's convention: ``state_dict`` and ``load_state_dict`` belong to the loader, and
hold for the iterator that it made last. An echo asks its upstream's iterator.
"""

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["iterator_of"]


class _LoaderIterator(Iterator[Any]):
    """One pass over a loader, with ``get_state`` and ``set_state``."""

    def __init__(self, loader: Any):
        self._loader = loader
        # Made when it is asked, since it may start workers: after a restore only once.
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


def iterator_of(iterable: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator, with a state wherever the iterable offers one.

    Args:
      iterable: Anything to iterate over. Where it has ``state_dict`` and
        ``load_state_dict``, the iterator has ``get_state`` and ``set_state``.

    Example:
      >>> class Loader:
      ...     at = 0
      ...     def __iter__(self):
      ...         while self.at < 3:
      ...             self.at += 1
      ...             yield self.at
      ...     def state_dict(self):
      ...         return {"at": self.at}
      ...     def load_state_dict(self, state):
      ...         self.at = state["at"]
      >>> items = iterator_of(Loader())
      >>> next(items), items.get_state()
      (1, {'ended': 0, 'loader': {'at': 1}})
      >>> again = iterator_of(Loader())
      >>> again.set_state(items.get_state())
      >>> list(again)
      [2, 3]
    """
    methods = ("state_dict", "load_state_dict")
    if all(callable(getattr(iterable, name, None)) for name in methods):
        return _LoaderIterator(iterable)
    return iter(iterable)
