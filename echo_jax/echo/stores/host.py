"""Stores in host memory: slots that a plan writes and reads by number.

Neither store hands out memory that it writes to later, because ``jax.device_put`` on
CPU may alias a NumPy array instead of copying it. Neither store keeps memory of the
upstream: an item is copied when it is read, or, if batches go out, when it is written.
`echo_jax.echo.stores.leaves.ReuseGuard` detects an upstream that reuses its arrays
before that.
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
    read_only,
    view,
)
from echo_jax.echo.tree import Structure, flatten, tree_map

__all__ = ["ItemStore", "RingStore"]

# Enough to avoid a Python step for each row, and few compared with the buffer.
_REWRITTEN_ROWS = 128


class ItemStore:
    """Keeps items as they are and hands them out one at a time."""

    # An item is copied once, when it is read, and every use of it is a read-only view
    # of that copy. A leaf that is neither an array nor immutable is deep-copied at
    # every use.

    rewritten_rows = _REWRITTEN_ROWS
    eager = False

    def __init__(self, num_slots: int, *, copies: bool = True):
        # Without copies an item goes through once, before the next one is read.
        self._items: list[Any] = [None] * num_slots
        self._copies = copies

    # An item is copied before the next one is read, because that one may reuse its
    # arrays.
    in_bulk = False

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns copies of items; raises ValueError if an item cannot be kept."""
        if not self._copies:
            return [(tree_map(read_only, item), 0, 1) for item in values]
        for item in values:
            if not is_plain(item):
                for path, leaf in flatten(item):
                    check_leaf(path, leaf)
        return [(tree_map(frozen, item), 0, 1) for item in values]

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        items = self._items
        for slot, element in zip(slots[0].tolist(), taken, strict=True):
            items[slot] = element[0]

    def rewrite(self, slots: np.ndarray, taken: list[Element]) -> None:
        kept = slots[0] < len(self._items)
        items = [each for each, keep in zip(taken, kept, strict=True) if keep]
        self.write(slots[:, kept], items)

    def read_one(self, slot: int) -> Any:
        item = self._items[slot]
        return tree_map(view, item) if self._copies else item

    def clear_one(self, slot: int) -> None:
        self._items[slot] = None

    def clear(self) -> None:
        self._items = [None] * len(self._items)


class _Leaf(NamedTuple):
    """The required shape and dtype of a leaf; ``key`` is its key in a flat dict."""

    path: str
    key: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def is_small(self) -> bool:
        """Whether many such leaves are joined and then written at once."""
        # Joining copies them twice, but costs no Python for each leaf.
        size = math.prod(self.shape) * self.dtype.itemsize
        return bool(self.shape) and size <= _SMALL


_SMALL = 4096  # bytes


class RingStore:
    """Keeps items of one shape in an array per leaf, and hands out batches."""

    # Items are copied when they are written and when they are read. The first item lays
    # out the arrays. A stacked element has many items.

    rewritten_rows = _REWRITTEN_ROWS

    def __init__(self, num_slots: int, *, stacked: bool = False):
        self._num_slots = num_slots
        self._stacked = self.eager = stacked
        self.rows_of_first = 0  # of stacked items, once they are known
        self._guard = ReuseGuard()
        self._structure: Structure | None = None
        # The description of each leaf, and the array of its slots.
        self._leaves: list[_Leaf] = []
        self._arrays: list[np.ndarray] = []
        self._are_small: list[bool] = []
        # Whether items are dicts of arrays, the most common kind.
        self._flat = False

    @property
    def in_bulk(self) -> bool:
        """Whether several items may be read before they are prepared."""
        # An upstream that reuses its arrays has changed the first item when it makes
        # the next. So items are read one by one while the guard checks them.
        return not self._stacked and not self._guard.left

    def prepare(self, values: list[Any]) -> list[Element]:
        """Checks items, or a stack of items, and returns their leaves in columns."""
        # A `write` of accepted items fails only for lack of memory.
        if self._stacked:
            (stack,) = values
            columns, rows = self._accept_stack(stack)
        else:
            columns, rows = self._flat_columns(values), len(values)
            if columns is None:
                leaves = [self._accept(0, item) for item in values]
                columns = [list(column) for column in zip(*leaves, strict=True)]
        return [(self._guard.watch(columns), 0, rows)]

    def write(
        self, slots: np.ndarray, taken: list[Element], *, again: bool = False
    ) -> None:
        at = 0
        for columns, first, end in taken:
            self._guard.check(columns)
            rows = slots[0, at : at + end - first]
            at += len(rows)
            if again:
                (kept,) = np.nonzero(rows < self._num_slots)
                rows, parts = rows[kept], [_picked(x, first + kept) for x in columns]
            else:
                parts = [column[first:end] for column in columns]
            self._put(rows, parts)

    def rewrite(self, slots: np.ndarray, taken: list[Element]) -> None:
        self.write(slots, taken, again=True)

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
        """Keeps the memory of the slots."""

    def read(self, slots: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        if self._flat:
            pairs = zip(self._leaves, self._arrays)  # noqa: B905
            return {leaf.key: array.take(slots, axis=0) for leaf, array in pairs}
        assert self._structure is not None
        return self._structure.build(
            array.take(slots, axis=0) for array in self._arrays
        )

    def _flat_columns(
        self, items: list[Any], lead: tuple[int, ...] = ()
    ) -> list[list[np.ndarray]] | None:
        """Returns the columns of dicts of arrays, or None for other items."""
        # Each step checks all items together, which takes a tenth of the time. The
        # shapes start with ``lead``.
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
        """Returns the leaves of stacked items, and the number of items."""
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
        """The rows that all leaves of an item share; 0 if it is not a batch."""
        # Items whose leaves all have one axis are mostly sequences.
        shapes = [leaf.shape for leaf in self._leaves]
        rows = {shape[:1] for shape in shapes}
        if len(rows) != 1 or rows == {()} or max(map(len, shapes)) < 2:
            return 0
        (first,) = rows.pop()
        return first if first > 1 else 0

    def _accept(self, lead: int, tree: Any) -> list[np.ndarray]:
        """Returns the leaves of a tree, with ``lead`` axes before those of an item."""
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
        # This comes last: it turns on the fast path. After a failure before it, the
        # next item lays out the arrays again.
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
