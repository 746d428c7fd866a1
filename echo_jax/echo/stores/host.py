"""Stores in host memory: slots that a plan writes and reads by number.

Neither store hands out memory that it writes to later, because ``jax.device_put`` on
CPU may alias a NumPy array instead of copying it. Neither keeps memory of the upstream:
an item is copied when it is read, because the upstream may refill its arrays for the
next one. A restore gives one more slot, the last one, to items that it leaves out.
"""

import warnings
from typing import Any, NoReturn

import numpy as np

from echo_jax.echo.stores.batches import check_lists, common_rows
from echo_jax.echo.stores.leaves import as_array, private, read_only, view
from echo_jax.echo.tree import Structure, flatten, tree_map
from echo_jax.echo.upstream import Element

# Enough to avoid a Python step for each row, and few compared with the buffer.
_REWRITTEN_ROWS = 128


class ItemStore:
    """Keeps copies of items as they are, and hands out read-only views of one."""

    rewritten_rows = _REWRITTEN_ROWS
    eager = in_bulk = False
    copies = True

    def __init__(self, num_slots: int, *, copies: bool = True):
        # Without copies an item goes through once, before the next one is read.
        self._items: list[Any] = [None] * (num_slots + 1)
        self._copies = copies

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Returns a copy of an item; raises ValueError if it cannot be kept."""
        (item,) = values
        try:
            return tree_map(private if self._copies else read_only, item), 1
        except ValueError:
            for path, leaf in flatten(item):
                private(leaf, path)  # Raises the error with the path.
            raise

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        for slot, (item, _, _) in zip(slots[0].tolist(), taken, strict=True):
            self._items[slot] = item

    def read_one(self, slot: int) -> Any:
        item = self._items[slot]
        return tree_map(view, item) if self._copies else item

    def clear_one(self, slot: int) -> None:
        self._items[slot] = None

    def clear(self) -> None:
        self._items = [None] * len(self._items)


class RingStore:
    """Keeps items of one shape in an array per leaf, and hands out batches."""

    # The first item lays out the arrays. A stacked element has many items.

    rewritten_rows = _REWRITTEN_ROWS

    def __init__(
        self,
        num_slots: int,
        *,
        stacked: bool = False,
        loader_rows: int = 0,
        chose_size: bool = False,
    ):
        # ``loader_rows`` is for `check_lists`; the first element may have chosen the
        # size of the outputs.
        self._num_slots, self._chose_size = num_slots, chose_size
        self._stacked = self.eager = stacked
        self._loader_rows = loader_rows if stacked else None
        self.in_bulk = not stacked  # whether `prepare` takes several items
        self.rows_of_first = 0  # of stacked items, once they are known
        self._structure: Any = None
        # The path of each leaf, and its slots, which have the required shape and dtype.
        self._leaves: list[tuple[str, np.ndarray]] = []

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Checks items, or a stack of items, and returns their leaves in columns."""
        # A `write` of accepted items fails only for lack of memory. Each step checks
        # all items together, which takes a tenth of the time.
        structure = self._structure or self._lay_out(values[0])
        columns = structure.columns(values)
        if columns is None:
            self._refuse_structure(values)
        columns = [
            xs if {*map(type, xs)} == {np.ndarray} else [as_array(path, x) for x in xs]
            for (path, _), xs in zip(self._leaves, columns, strict=True)
        ]
        lead, rows = (), len(values)
        if self._stacked:
            rows = self._rows_of([column[0] for column in columns])
            lead = (rows,)
        for (path, slots), column in zip(self._leaves, columns, strict=True):
            due = lead + slots.shape[1:], slots.dtype
            found = [(x.shape, x.dtype) for x in column]
            if found.count(due) != len(found):
                bad = next(x for x in column if (x.shape, x.dtype) != due)
                self._refuse_leaf(path, slots, bad)
        if self._stacked:
            columns = [column[0] for column in columns]
        return columns, rows

    def _rows_of(self, arrays: list[np.ndarray]) -> int:
        paths = [path for path, _ in self._leaves]
        rows = common_rows([*zip(paths, arrays, strict=True)])
        first, self.rows_of_first = self.rows_of_first, self.rows_of_first or rows
        if first and self._chose_size:
            self._chose_size = False
            if rows > first:
                raise ValueError(
                    f"the loader's first batch has {first} rows, which chose the batch "
                    f"size, and its second one has {rows}. Give the batch size: "
                    f"ej.AdaptiveSpec(batch_size={rows})."
                )
        return rows

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        at = 0
        for columns, first, end in taken:
            rows = slots[0, at : at + end - first]
            at += len(rows)
            for (_, kept), column in zip(self._leaves, columns, strict=True):
                if self._stacked:
                    kept[rows] = column[first:end]
                    continue
                for row, leaf in zip(rows.tolist(), column[first:end], strict=True):
                    kept[row] = leaf

    def clear(self) -> None:
        """Keeps the memory of the slots."""

    def read(self, rows: np.ndarray) -> Any:
        """Returns the items in some slots, stacked along a new first axis."""
        leaves = [slots.take(rows, 0) for _, slots in self._leaves]
        return self._structure.build(iter(leaves))

    def _lay_out(self, tree: Any) -> Structure:
        check_lists(tree, self._loader_rows)
        leaves = [(path, as_array(path, leaf)) for path, leaf in flatten(tree)]
        rows = {leaf.shape[:1] for _, leaf in leaves}
        if self._stacked:
            common_rows(leaves)
        # Items whose leaves all have one axis are mostly sequences.
        elif len(rows) == 1 and min(rows) > (1,) and max(x.ndim for _, x in leaves) > 1:
            warnings.warn(
                "each item that ej.echo(..., batch=True) stacks has the first axis "
                f"{rows.pop()[0]} in common in all of its leaves. If the items are "
                "batches, use ej.echo_batches(loader, spec).",
                stacklevel=2,
            )
        places = self._num_slots + 1
        self._leaves = [
            (path, np.empty((places, *array.shape[self._stacked :]), array.dtype))
            for path, array in leaves
        ]
        # This comes last: after a failure before it, the next item lays them out.
        self._structure = Structure(tree)
        return self._structure

    def _refuse_structure(self, values: list[Any]) -> NoReturn:
        bad = next(x for x in values if self._structure.columns([x]) is None)
        paths = [path for path, _ in flatten(bad)]
        first = [path for path, _ in self._leaves]
        had = f"an item has the leaves {paths}, the first one had {first}"
        if sorted(paths) == sorted(first):
            had += ", in other containers, or in containers of other static fields"
        raise ValueError(
            f"{had}; batch=True needs items of one structure: pad ragged lists to "
            "arrays of one shape, or use batch=False"
        )

    def _refuse_leaf(self, path: str, slots: np.ndarray, leaf: Any) -> NoReturn:
        array = as_array(path, leaf)
        raise ValueError(
            f"leaf item{path} is {array.dtype}{[*array.shape[self._stacked :]]}, the "
            f"first one was {slots.dtype}{[*slots.shape[1:]]}; batch=True needs equal "
            "shapes and dtypes: pad or resize before the echo, or use batch=False"
        )
