"""Stores in host memory: slots that a plan writes and reads by number.

Neither store ever hands out memory that it writes to later, because
``jax.device_put`` on CPU may alias a NumPy array instead of copying it. And neither
keeps memory of the upstream's: an item is copied when it is read, or, where batches go
out, when it is written. An upstream that uses its arrays again before that is found
out: see `echo_jax.echo.stores.leaves.ReuseGuard`.
"""

import math
from operator import attrgetter
from typing import Any, NamedTuple, NoReturn

import numpy as np

from echo_jax.echo.source import Element
from echo_jax.echo.stores.leaves import (
    NUMBERS,
    ReuseGuard,
    as_array,
    check_leaf,
    frozen,
    is_plain,
    view,
)
from echo_jax.echo.tree import Structure, flatten, tree_map

__all__ = ["ItemStore", "RingStore"]

# Enough to spare Python for each row, and few beside a buffer, which is there already.
_REWRITTEN_ROWS = 128


class ItemStore:
    """Keeps items as they are and hands them out one at a time.

    An item is copied once, when it is read, and every use of it is a read-only
    view of that copy. A leaf that is neither an array nor immutable, such as an
    object of one's own without arrays in it, is deep-copied at every use.
    """

    rewritten_rows = _REWRITTEN_ROWS

    def __init__(self, num_slots: int):
        """Makes a store of empty slots."""
        self._items: list[Any] = [None] * num_slots

    # An item is copied before the next one is read, which may use its arrays again.
    in_bulk = False

    def prepare(self, values: list[Any]) -> list[Element]:
        """Copies items that were read, if they can be kept.

        Raises:
          ValueError: A leaf cannot be handed out as it came: see `check_leaf`.
        """
        for item in values:
            if not is_plain(item):
                for path, leaf in flatten(item):
                    check_leaf(path, leaf)
        return [(tree_map(frozen, item), 0, 1) for item in values]

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`."""
        items = self._items
        for slot, element in zip(slots[0].tolist(), taken, strict=True):
            items[slot] = element[0]

    def rewrite(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`."""
        kept = slots[0] < len(self._items)
        items = [each for each, keep in zip(taken, kept, strict=True) if keep]
        self.write(slots[:, kept], items)

    def read_one(self, slot: int) -> Any:
        """Returns a use of the item in a slot."""
        return tree_map(view, self._items[slot])

    def clear_one(self, slot: int) -> None:
        """Lets the item in a slot go."""
        self._items[slot] = None

    def clear(self) -> None:
        """See `echo_jax.echo.driver.Store`."""
        self._items = [None] * len(self._items)


class _Leaf(NamedTuple):
    """What a leaf of an item must be; ``key`` is its own in a flat dict."""

    path: str
    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def is_small(self) -> bool:
        """Whether many such leaves are joined and written at once, and not one by one.

        That copies them twice, but costs no Python for each of them.
        """
        size = math.prod(self.shape) * self.dtype.itemsize
        return bool(self.shape) and size <= _SMALL


_SMALL = 4096  # bytes


class RingStore:
    """Keeps items of one shape in an array per leaf, and hands out batches.

    Items are copied into the arrays when they are written, and out of them when they
    are read. Leaves come out as plain arrays of their dtype, stacked.
    """

    rewritten_rows = _REWRITTEN_ROWS

    def __init__(self, num_slots: int, *, stacked: bool = False):
        """Makes a store whose arrays are laid out by the first item.

        Args:
          num_slots: How many slots.
          stacked: Whether items come stacked, many in one element.
        """
        self._num_slots = num_slots
        self._stacked = stacked
        self.rows_of_first = 0  # of stacked items, once they are known
        self._guard = ReuseGuard()
        self._structure: Structure | None = None
        # One for each leaf, and the array that its slots are in.
        self._leaves: list[_Leaf] = []
        self._arrays: list[np.ndarray] = []
        self._are_small: list[bool] = []
        # Whether items are dicts of arrays, which they mostly are.
        self._flat = False

    @property
    def in_bulk(self) -> bool:
        """Whether items may be read together: one by one as long as they are looked at.

        An upstream that uses its arrays again has changed the first item by the time
        that it has made the next.
        """
        return not self._stacked and not self._guard.left

    def prepare(self, values: list[Any]) -> list[Element]:
        """Looks at items, or a stack of them, before they are taken.

        The first one lays out the arrays. A `write` of what was accepted fails for
        want of memory only.

        Returns:
          What `write` takes: a column for each of the store's arrays, which holds the
          leaf of every item, as a list or stacked.

        Raises:
          ValueError: It has other containers, leaves, shapes or dtypes than the
            first one, or leaves that do not stack: see `as_array`.
        """
        if self._stacked:
            (stack,) = values
            columns, rows = self._accept_stack(stack)
        else:
            columns, rows = self._accept_items(values), len(values)
        return [(self._guard.watch(columns), 0, rows)]

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`."""
        at = 0
        for columns, first, end in taken:
            self._guard.check(columns)
            rows = slots[0, at : at + end - first]
            self._put(rows, [column[first:end] for column in columns])
            at += len(rows)

    def rewrite(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`."""
        at = 0
        for columns, first, end in taken:
            self._guard.check(columns)
            rows = slots[0, at : at + end - first]
            (kept,) = np.nonzero(rows < self._num_slots)
            picked = [_picked(column, first + kept) for column in columns]
            self._put(rows[kept], picked)
            at += len(rows)

    def _put(self, slots: np.ndarray, columns: list[Any]) -> None:
        for is_small, array, column in zip(
            self._are_small, self._arrays, columns, strict=True
        ):
            if type(column) is not list:
                array[slots] = column
            elif is_small and column:
                joined = np.concatenate(column)
                array[slots] = joined.reshape(len(column), *array.shape[1:])
            else:
                for slot, leaf in zip(slots.tolist(), column, strict=True):
                    array[slot] = leaf

    def clear(self) -> None:
        """See `echo_jax.echo.driver.Store`; slots keep their memory."""

    def read(self, slots: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        if self._flat:
            pairs = zip(self._leaves, self._arrays)  # noqa: B905
            return {leaf.key: array.take(slots, axis=0) for leaf, array in pairs}
        assert self._structure is not None
        return self._structure.build(
            array.take(slots, axis=0) for array in self._arrays
        )

    def _accept_items(self, items: list[Any]) -> list[list[np.ndarray]]:
        """Returns a list for each leaf, with that of every item."""
        columns = self._flat_columns(items)
        if columns is None:
            rows = [self._accept(0, item) for item in items]
            columns = [list(column) for column in zip(*rows, strict=True)]
        return columns

    def _flat_columns(
        self, items: list[Any], lead: tuple[int, ...] = ()
    ) -> list[list[np.ndarray]] | None:
        """Returns what `_accept_items` does for items of the common kind, or None.

        All items are looked at in each step, which takes a tenth of the time. They
        have ``lead`` before their shapes.
        """
        num_items, num_leaves = len(items), len(self._leaves)
        if not self._flat or list(map(type, items)).count(dict) != num_items:
            return None
        if list(map(len, items)).count(num_leaves) != num_items:
            return None
        columns = []
        for _, key, shape, dtype in self._leaves:
            column = [item.get(key) for item in items]
            kinds = set(map(type, column))
            if kinds != _ARRAYS:
                if not kinds <= _ARRAYS | NUMBERS:
                    return None
                column = list(map(np.asarray, column))
            if list(map(_shape, column)).count(lead + shape) != num_items:
                return None
            if list(map(_dtype, column)).count(dtype) != num_items:
                return None
            columns.append(column)
        return columns

    def _accept_stack(self, tree: Any) -> tuple[list[np.ndarray], int]:
        """Returns the leaves of stacked items, and how many they are."""
        if self._leaves and type(tree) is dict:
            first = tree.get(self._leaves[0].key)
            if type(first) is np.ndarray and first.shape:
                columns = self._flat_columns([tree], first.shape[:1])
                if columns is not None:
                    return [column[0] for column in columns], len(first)
        lengths = {as_array(path, leaf).shape[:1] for path, leaf in flatten(tree)}
        if len(lengths) != 1 or lengths == {()}:
            raise ValueError(
                "the leaves of a batch must have one first axis in common, got the "
                f"first axes {sorted(lengths)}. Use ej.echo(items, spec, batch=True) "
                "if the loader yields single examples."
            )
        rows = lengths.pop()[0]
        columns = self._accept(1, tree)
        self.rows_of_first = self.rows_of_first or rows
        return columns, rows

    @property
    def seems_stacked(self) -> int:
        """The rows that all leaves of an item have in common; 0 if it is no batch.

        Items whose leaves all have one axis are mostly sequences, and no batches.
        """
        shapes = [leaf.shape for leaf in self._leaves]
        rows = {shape[:1] for shape in shapes}
        if len(rows) != 1 or rows == {()} or max(map(len, shapes)) < 2:
            return 0
        (first,) = rows.pop()
        return first if first > 1 else 0

    def _accept(self, lead: int, tree: Any) -> list[np.ndarray]:
        """Returns the leaves of a tree, which have ``lead`` axes before an item's."""
        if self._structure is None:
            leaves = [(path, as_array(path, leaf)) for path, leaf in flatten(tree)]
            self._lay_out(lead, leaves, tree)
        assert self._structure is not None
        parts = self._structure.leaves(tree)
        if parts is None:
            self._refuse_structure(tree)
        accepted = []
        for first, part in zip(self._leaves, parts, strict=True):
            array = as_array(first.path, part)
            if array.shape[lead:] != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"leaf item{first.path} is {array.dtype}"
                    f"{list(array.shape[lead:])}, the first one was {first.dtype}"
                    f"{list(first.shape)}; batch=True needs equal shapes and dtypes: "
                    "pad or resize before the echo, or use batch=False"
                )
            accepted.append(array)
        return accepted

    def _lay_out(
        self, lead: int, leaves: list[tuple[str, np.ndarray]], tree: Any
    ) -> None:
        keys = list(tree) if type(tree) is dict else []
        flat = len(keys) == len(leaves) and all(
            path == f"[{key!r}]" for key, (path, _) in zip(keys, leaves, strict=True)
        )
        specs, arrays = [], []
        for i, (path, array) in enumerate(leaves):
            shape, dtype = array.shape[lead:], array.dtype
            specs.append(_Leaf(path, keys[i] if flat else None, shape, dtype))
            arrays.append(np.empty((self._num_slots, *shape), dtype))
        self._leaves, self._arrays = specs, arrays
        self._are_small = [leaf.is_small for leaf in specs]
        self._structure = Structure(tree)
        # Last, as it lets later items by: whatever comes before it lays out anew.
        self._flat = flat

    def _refuse_structure(self, tree: Any) -> NoReturn:
        paths = [path for path, _ in flatten(tree)]
        first = [leaf.path for leaf in self._leaves]
        if sorted(paths) != sorted(first):
            raise ValueError(
                f"an item has the leaves {paths}, the first one had {first}; "
                "batch=True needs items of one structure: pad ragged lists to arrays "
                "of one shape, or use batch=False"
            )
        raise ValueError(
            f"an item has the leaves of the first one, {paths}, in other containers, "
            "or in containers of other static fields; batch=True needs items of one "
            "structure"
        )


_ARRAYS = frozenset((np.ndarray,))
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _picked(column: Any, rows: np.ndarray) -> Any:
    if type(column) is list:
        return [column[row] for row in rows.tolist()]
    return column[rows]
