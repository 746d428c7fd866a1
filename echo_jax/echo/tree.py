"""Pytrees of dicts, lists and tuples, without jax.

The library on the host handles items of any Python iterator, and must not load
jax for it. Leaves are whatever is no dict, list, tuple or None.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["flatten", "tree_concatenate", "tree_map", "tree_rows"]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every leaf; containers are built anew.

    Example:
      >>> tree_map(abs, {"a": -1, "b": (2, -3)})
      {'a': 1, 'b': (2, 3)}
    """
    if isinstance(tree, dict):
        return {key: tree_map(function, tree[key]) for key in tree}
    if isinstance(tree, tuple):
        parts = [tree_map(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [tree_map(function, part) for part in tree]
    return None if tree is None else function(tree)


def flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, in order.

    Example:
      >>> flatten({"a": 1, "b": (2, 3)})
      [("['a']", 1), ("['b'][0]", 2), ("['b'][1]", 3)]
    """
    if isinstance(tree, dict):
        parts = [(f"{path}[{key!r}]", tree[key]) for key in tree]
    elif isinstance(tree, list | tuple):
        parts = [(f"{path}[{i}]", part) for i, part in enumerate(tree)]
    else:
        return [] if tree is None else [(path, tree)]
    return [leaf for name, part in parts for leaf in flatten(part, name)]


def tree_concatenate(trees: list[Any]) -> Any:
    """Joins trees of arrays, leaf by leaf, along the first axis."""
    leaves = zip(*([leaf for _, leaf in flatten(tree)] for tree in trees), strict=True)
    joined = iter([np.concatenate(parts) for parts in leaves])
    return tree_map(lambda _: next(joined), trees[0])


def tree_rows(tree: Any, where: int | slice) -> Any:
    """Returns some rows of every array of a tree."""
    return tree_map(lambda leaf: leaf[where], tree)
