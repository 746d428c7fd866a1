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
    ReuseGuard,
    as_array,
    frozen,
    private,
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
        """Returns a copy of an item; raises ValueError if it cannot be kept."""
        (item,) = values
        if not self._copies:
            return [(tree_map(read_only, item), 0, 1)]
        try:
            return [(tree_map(frozen, item), 0, 1)]
        except ValueError:
            for path, leaf in flatten(item):
                private(path, leaf)  # Raises the error with the path.
            raise

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


# Many leaves of at most so many bytes are joined and then written at once. That copies
# them twice, but costs no Python for each leaf.
_SMALL = 4096


class _Leaf(NamedTuple):
    """The path of a leaf, and its slots, which have the required shape and dtype."""

    path: str
    slots: np.ndarray
    is_small: bool


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
        self._leaves: list[_Leaf] = []

    @property
    def in_bulk(self) -> bool:
        """Whether several items may be read before they are prepared."""
        # An upstream that reuses its arrays has changed the first item when it makes
        # the next. So items are read one by one while the guard checks them.
        return not self._stacked and not self._guard.left

    def prepare(self, values: list[Any]) -> list[Element]:
        """Checks items, or a stack of items, and returns their leaves in columns."""
        # A `write` of accepted items fails only for lack of memory. Each step checks
        # all items together, which takes a tenth of the time.
        if self._structure is None:
            self._lay_out(values[0])
        assert self._structure is not None
        columns = self._structure.columns(values)
        if columns is None:
            self._refuse_structure(values)
        lead, accepted = (), []
        for (path, slots, _), column in zip(self._leaves, columns, strict=True):
            if {*map(type, column)} != _ARRAYS:
                column = [as_array(path, x) for x in column]
            if self._stacked:
                lead = lead or column[0].shape[:1]
            shapes, dtypes = list(map(_shape, column)), list(map(_dtype, column))
            alike = shapes.count(lead + slots.shape[1:]), dtypes.count(slots.dtype)
            is_scalar = self._stacked and not lead
            if is_scalar or alike != (len(column), len(column)):
                self._refuse_leaf(path, slots, column, columns)
            accepted.append(column[0] if self._stacked else column)
        (rows,) = lead or (len(values),)
        return [(self._guard.watch(accepted), 0, rows)]

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

    def _put(self, rows: np.ndarray, columns: list[Any]) -> None:
        for (_, slots, is_small), column in zip(self._leaves, columns, strict=True):
            if type(column) is not list:
                slots[rows] = column
            elif is_small and column:
                joined = np.concatenate(column)
                slots[rows] = joined.reshape(len(column), *slots.shape[1:])
            else:
                for row, leaf in zip(rows.tolist(), column, strict=True):
                    slots[row] = leaf

    def clear(self) -> None:
        """Keeps the memory of the slots."""

    def read(self, rows: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        assert self._structure is not None
        return self._structure.build(
            slots.take(rows, 0) for _, slots, _ in self._leaves
        )

    @property
    def seems_stacked(self) -> int:
        """The rows that all leaves of an item share; 0 if it is not a batch."""
        # Items whose leaves all have one axis are mostly sequences.
        shapes = [leaf.slots.shape[1:] for leaf in self._leaves]
        rows = {shape[:1] for shape in shapes}
        if len(rows) != 1 or rows == {()} or max(map(len, shapes)) < 2:
            return 0
        (first,) = rows.pop()
        return first if first > 1 else 0

    def _lay_out(self, tree: Any) -> None:
        leaves = [(path, as_array(path, leaf)) for path, leaf in flatten(tree)]
        if self._stacked:
            (self.rows_of_first,) = _first_axis([array for _, array in leaves])
        self._leaves = []
        for path, array in leaves:
            shape, dtype = array.shape[self._stacked :], array.dtype
            is_small = bool(shape) and math.prod(shape) * dtype.itemsize <= _SMALL
            slots = np.empty((self._num_slots, *shape), dtype)
            self._leaves.append(_Leaf(path, slots, is_small))
        # This comes last: after a failure before it, the next item lays them out.
        self._structure = Structure(tree)

    def _refuse_structure(self, values: list[Any]) -> NoReturn:
        assert self._structure is not None
        bad = next(x for x in values if self._structure.columns([x]) is None)
        paths = [path for path, _ in flatten(bad)]
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

    def _refuse_leaf(
        self, path: str, slots: np.ndarray, column: list[Any], columns: list[Any]
    ) -> None:
        pairs = zip(self._leaves, columns, strict=True)
        arrays = [as_array(leaf.path, x) for leaf, xs in pairs for x in xs]
        if self._stacked:
            _first_axis(arrays)
        for array in column:
            shape = array.shape[self._stacked :]
            if shape != slots.shape[1:] or array.dtype != slots.dtype:
                raise ValueError(
                    f"leaf item{path} is {array.dtype}{list(shape)}, the first one was "
                    f"{slots.dtype}{list(slots.shape[1:])}; batch=True needs equal "
                    "shapes and dtypes: pad or resize before the echo, or use "
                    "batch=False"
                )


_ARRAYS = {np.ndarray}
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _first_axis(leaves: list[np.ndarray]) -> tuple[int, ...]:
    """Returns the first axis of a batch's leaves."""
    axes = {leaf.shape[:1] for leaf in leaves}
    if len(axes) != 1 or axes == {()}:
        raise ValueError(
            "the leaves of a batch must have one first axis in common, got the "
            f"first axes {sorted(axes)}. Use ej.echo(items, spec, batch=True) "
            "if the loader yields single examples."
        )
    return axes.pop()


def _picked(column: Any, rows: np.ndarray) -> Any:
    if type(column) is list:
        return [column[row] for row in rows.tolist()]
    return column[rows]
