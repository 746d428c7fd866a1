"""Stores in host memory: slots that a plan writes and reads by number.

Neither store ever hands out memory that it writes to later, because
``jax.device_put`` on CPU may alias a NumPy array instead of copying it.
"""

import copy
import sys
from typing import Any, NoReturn

import numpy as np

from echo_jax.echo.tree import flatten, tree_map

__all__ = ["ItemStore", "RingStore", "Stack"]

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


class Stack:
    """Items that are stacked along the first axis of every leaf, to be used up.

    Attributes:
      tree: The stacked items.
      leaves: Its leaves and their paths.
      length: How many items.
      at: The first of them that is not used up.
    """

    def __init__(self, tree: Any):
        """Takes a stack of items.

        Raises:
          ValueError: If the leaves disagree on the number of items.
        """
        self.tree = tree
        self.leaves = [(path, np.asarray(leaf)) for path, leaf in flatten(tree)]
        lengths = {leaf.shape[:1] for _, leaf in self.leaves}
        if len(lengths) != 1 or lengths == {()}:
            raise ValueError(
                "unbatch=True needs batches whose leaves have one first axis in "
                f"common; this one has first axes {sorted(lengths)}"
            )
        self.length = lengths.pop()[0]
        self.at = 0
        # The ring of each leaf, once a store has accepted the stack.
        self.rings: list[tuple[np.ndarray, np.ndarray]] = []


class RingStore:
    """Keeps items of one shape in an array per leaf, and hands out batches."""

    def __init__(self, num_slots: int):
        """Makes a store whose arrays are laid out by the first item."""
        self._num_slots = num_slots
        self._example: Any = None
        self._rings: dict[str, np.ndarray] = {}
        # If items are dicts of arrays, which they mostly are: key and ring.
        self._flat: list[tuple[Any, np.ndarray]] = []

    def write(self, slot: int, item: Any) -> None:
        """Puts an item into a slot.

        Raises:
          ValueError: If it has other leaves, shapes or dtypes than the first item.
        """
        if not self._write_flat(slot, item):
            leaves = [(path, np.asarray(leaf)) for path, leaf in flatten(item)]
            for ring, leaf in self._accept(0, leaves, item):
                ring[slot] = leaf

    def write_stacked(self, slots: np.ndarray, stack: Stack) -> None:
        """Puts the next items of a stack into slots, as many as there are slots.

        Raises:
          ValueError: If they have other leaves, shapes or dtypes than the first.
        """
        if not stack.rings:
            stack.rings = self._accept(1, stack.leaves, stack.tree)
        rows = slice(stack.at, stack.at + slots.size)
        for ring, leaf in stack.rings:
            ring[slots] = leaf[rows]
        stack.at += slots.size

    def read(self, slots: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        if self._flat:
            return {key: ring.take(slots, axis=0) for key, ring in self._flat}
        batch = iter([ring.take(slots, axis=0) for ring in self._rings.values()])
        return tree_map(lambda _: next(batch), self._example)

    def _write_flat(self, slot: int, item: Any) -> bool:
        """The common item, at a quarter of the general time."""
        if type(item) is not dict or len(item) != len(self._flat):
            return False
        for key, ring in self._flat:
            leaf = item.get(key)
            if type(leaf) is not np.ndarray:
                return False
            if leaf.shape != ring.shape[1:] or leaf.dtype != ring.dtype:
                return False
            ring[slot] = leaf
        return True

    def _accept(
        self, lead: int, leaves: list[tuple[str, np.ndarray]], tree: Any
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs each leaf, which has ``lead`` axes before an item's, with its ring."""
        if self._example is None:
            self._lay_out(lead, leaves, tree)
        if len(leaves) != len(self._rings):
            self._refuse(lead, leaves)
        pairs = []
        for (path, leaf), (name, ring) in zip(leaves, self._rings.items(), strict=True):
            if (
                path != name
                or leaf.shape[lead:] != ring.shape[1:]
                or leaf.dtype != ring.dtype
            ):
                self._refuse(lead, leaves)
            pairs.append((ring, leaf))
        return pairs

    def _lay_out(self, lead: int, arrays: list[tuple[str, np.ndarray]], tree: Any):
        for path, array in arrays:
            if array.dtype == object:
                raise ValueError(
                    f"leaf item{path} is no array of numbers, so items cannot be "
                    "stacked into batches; use batch=False"
                )
            shape = (self._num_slots, *array.shape[lead:])
            self._rings[path] = np.empty(shape, array.dtype)
        self._example = tree_map(lambda _: 0, tree)
        if type(tree) is dict and list(self._rings) == [f"[{key!r}]" for key in tree]:
            self._flat = list(zip(tree, self._rings.values(), strict=True))

    def _refuse(self, lead: int, arrays: list[tuple[str, np.ndarray]]) -> NoReturn:
        """Names the first difference between an item and the first item."""
        paths = [path for path, _ in arrays]
        if paths != list(self._rings):
            raise ValueError(
                f"an item has the leaves {paths}, the first one had "
                f"{list(self._rings)}; batch=True needs items of one structure"
            )
        for path, array in arrays:
            shape, ring = list(array.shape[lead:]), self._rings[path]
            if shape != list(ring.shape[1:]) or array.dtype != ring.dtype:
                raise ValueError(
                    f"leaf item{path} is {array.dtype}{shape}, the first one was "
                    f"{ring.dtype}{list(ring.shape[1:])}; batch=True needs equal "
                    "shapes: pad or resize before the echo, or use batch=False"
                )
        raise AssertionError("an item was refused that differs in nothing")


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
