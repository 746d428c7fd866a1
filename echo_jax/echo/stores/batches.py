"""The rows of a loader's batches, and what a loader may have given in their place."""

from collections import Counter
from typing import Any

import numpy as np

from echo_jax.echo.tree import flatten, lists_in

_SINGLE = "If the loader yields examples, use ej.echo(examples, spec, batch=True)."
_VALUES = (bool, int, float, complex, str, bytes, np.generic)


def check_lists(tree: Any, rows: int | None = None) -> None:
    """Raises ValueError for a list whose places are no leaves."""
    # ``rows`` is the batch size that a loader of batches states, or 0. None is for
    # single items, in which only lists of numbers are refused.
    for path, part in lists_in(tree):
        leaves = [leaf for _, leaf in flatten(part)]
        if leaves and all(isinstance(leaf, _VALUES) for leaf in leaves):
            raise ValueError(
                f"leaf item{path} is a list of numbers or texts, {part!r:.60}, whose "
                "places would be leaves. Give np.asarray of it. A dataset of Hugging "
                'Face gives arrays after dataset.with_format("numpy").'
            )
        if rows is not None and len(part) > 1 and _are_examples(part, rows):
            raise ValueError(
                f"item{path} is a list of {len(part)} arrays that are alike, and it is "
                "not known what they are. If each is an example, use ej.echo("
                "itertools.chain.from_iterable(loader), spec, batch=True), or let the "
                "loader stack them. If each is a leaf of the batch, have the loader "
                "give a tuple in place of the list."
            )


def _are_examples(part: list[Any], rows: int) -> bool:
    """Returns whether the elements of a list in a batch may be examples."""
    kinds, shapes = set(), []
    for element in part:
        leaves = flatten(element)
        kinds.add(
            str([(p, np.ndim(x), getattr(x, "dtype", type(x))) for p, x in leaves])
        )
        shapes.append([tuple(np.shape(leaf)) for _, leaf in leaves])
    if len(kinds) > 1 or not any(map(any, shapes)):
        return False
    lengths = {shape[:1] for each in shapes for shape in each}
    if rows and lengths == {(rows,)} and len(part) != rows:
        return False  # The loader itself says that these are rows.
    # Leaves of one batch have one first axis, and mostly other shapes.
    return len(lengths) > 1 or all(each == shapes[0] for each in shapes)


def common_rows(leaves: list[tuple[str, Any]]) -> int:
    """Returns the rows of a batch's arrays; raises ValueError if they differ."""
    axes = {path: tuple(leaf.shape[:1]) for path, leaf in leaves}
    lengths = Counter(axis[0] for axis in axes.values() if axis)
    if not lengths:
        raise ValueError(
            f"a batch needs arrays with an axis of examples, and its leaves, "
            f"{[f'item{path}' for path in axes]}, have none. {_SINGLE}"
        )
    ((rows, count),) = lengths.most_common(1)
    if count == len(axes):
        return rows
    like = next(path for path, axis in axes.items() if axis == (rows,))
    path, axis = next(each for each in axes.items() if each[1] != (rows,))
    if not axis:
        raise ValueError(
            f"leaf item{path} is one value for a batch, and item{like} has {rows} "
            "rows. Leave it out of the batch, or repeat it: "
            f"np.full({rows}, value). {_SINGLE}"
        )
    raise ValueError(
        f"leaf item{path} has {axis[0]} rows, and item{like} has {rows}, so no first "
        "axis is that of the examples. Leave out what belongs to all examples, such as "
        "class weights. If examples differ in size, as graphs do, repeat whole "
        f"batches: ej.echo(loader, spec). {_SINGLE}"
    )
