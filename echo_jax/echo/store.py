"""Stores in host memory: slots that a plan writes and reads by number.

Neither store ever hands out memory that it writes to later, because
``jax.device_put`` on CPU may alias a NumPy array instead of copying it.
"""

import copy
import sys
from typing import Any

import numpy as np

from echo_jax.echo.tree import flatten, tree_map

__all__ = ["ItemStore", "RingStore"]

_IMMUTABLE = (str, bytes, int, float, complex, bool, np.generic, type(None))


class ItemStore:
    """Keeps items as they are and hands them out one at a time.

    An item is copied once, when it is written, and every use of it is a read-only
    view of that copy.
    """

    def __init__(self, num_slots: int):
        """Makes a store of empty slots."""
        self._items: list[Any] = [None] * num_slots

    def write(self, slot: int, item: Any) -> None:
        """Puts an item into a slot."""
        self._items[slot] = tree_map(_frozen, item)

    def read(self, slot: int) -> Any:
        """Returns a use of the item in a slot."""
        return tree_map(_view, self._items[slot])

    def clear(self, slot: int) -> None:
        """Lets the item in a slot go."""
        self._items[slot] = None


class RingStore:
    """Keeps items of one shape in an array per leaf, and hands out batches."""

    def __init__(self, num_slots: int):
        """Makes a store whose arrays are laid out by the first item."""
        self._num_slots = num_slots
        self._example: Any = None
        self._rings: dict[str, np.ndarray] = {}
        self._flat_dict: list[tuple[Any, np.ndarray, tuple[int, ...], np.dtype]] = []

    def write(self, slot: int, item: Any) -> None:
        """Puts an item into a slot.

        Raises:
          ValueError: If it has other leaves, shapes or dtypes than the first item.
        """
        if not self._write_flat_dict(slot, item):
            self._write_rows(slot, flatten(item))
        if self._example is None:
            self._example = tree_map(lambda _: 0, item)
            if type(item) is dict and len(item) == len(self._rings):
                self._flat_dict = [
                    (key, ring, ring.shape[1:], ring.dtype)
                    for key, ring in zip(item, self._rings.values(), strict=True)
                ]

    def write_stacked(self, slots: np.ndarray, items: Any) -> None:
        """Puts items, stacked along their first axis, into slots.

        Raises:
          ValueError: If they have other leaves, shapes or dtypes than the first.
        """
        self._write_rows(slots, flatten(items))
        if self._example is None:
            self._example = tree_map(lambda _: 0, items)

    def read(self, slots: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        batch = iter([ring.take(slots, axis=0) for ring in self._rings.values()])
        return tree_map(lambda _: next(batch), self._example)

    def _write_flat_dict(self, slot: int, item: Any) -> bool:
        """The common item, a dict of arrays, at a quarter of the general time."""
        if not self._flat_dict or type(item) is not dict:
            return False
        if len(item) != len(self._flat_dict):
            return False
        for key, ring, shape, dtype in self._flat_dict:
            leaf = item.get(key)
            if type(leaf) is not np.ndarray:
                return False
            if leaf.shape != shape or leaf.dtype != dtype:
                return False
            ring[slot] = leaf
        return True

    def _write_rows(self, where: Any, leaves: list[tuple[str, Any]]) -> None:
        arrays = {path: np.asarray(leaf) for path, leaf in leaves}
        first = 0 if isinstance(where, int) else 1
        if not self._rings:
            self._lay_out({path: a[0] if first else a for path, a in arrays.items()})
        if list(arrays) != list(self._rings):
            raise ValueError(
                f"an item has the leaves {list(arrays)}, the first one had "
                f"{list(self._rings)}; batch=True needs items of one structure"
            )
        for path, array in arrays.items():
            ring = self._rings[path]
            if array.shape[first:] != ring.shape[1:] or array.dtype != ring.dtype:
                raise ValueError(
                    f"leaf item{path} is {array.dtype}{list(array.shape[first:])}, the "
                    f"first one was {ring.dtype}{list(ring.shape[1:])}; batch=True "
                    "needs equal shapes: pad or resize before the echo, or use "
                    "batch=False"
                )
            ring[where] = array

    def _lay_out(self, example: dict[str, np.ndarray]) -> None:
        for path, leaf in example.items():
            if leaf.dtype == object:
                raise ValueError(
                    f"leaf item{path} is no array of numbers, so items cannot be "
                    "stacked into batches; use batch=False"
                )
            self._rings[path] = np.empty((self._num_slots, *leaf.shape), leaf.dtype)


def _frozen(leaf: Any) -> Any:
    """A private copy of a leaf that nobody can write into."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        leaf = np.array(leaf)
        leaf.flags.writeable = False
        return leaf
    return leaf if _is_immutable(leaf) else copy.deepcopy(leaf)


def _view(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        # A view of a read-only array cannot be made writable again.
        return leaf.view()
    return leaf if _is_immutable(leaf) else copy.deepcopy(leaf)


def _is_immutable(leaf: Any) -> bool:
    jax = sys.modules.get("jax")
    return isinstance(leaf, _IMMUTABLE) or (
        jax is not None and isinstance(leaf, jax.Array)
    )
