"""Pytrees as jax knows them, without importing jax.

The library on the host handles items of any Python iterator, and must not load jax for
it. This module opens dicts, lists, tuples, NamedTuples, None and every other `Mapping`.
If the program has loaded jax, ``jax.tree_util`` opens every class that it registers,
one level at a time: flax structs and FrozenDicts, dataclasses, your own classes.
Anything else is a leaf.

Unlike ``jax.tree``, it keeps the keys of every dict in their own order.
"""

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Structure", "flatten", "tree_concatenate", "tree_map"]

# Types that are always leaves, so jax is not asked about them.
_LEAVES = {np.ndarray, int, float, bool, complex, str, bytes, *np.sctypeDict.values()}


class _Container(NamedTuple):
    """One container, opened; ``static`` is equal where only the children differ."""

    static: Any
    children: list[Any]
    build: Callable[[list[Any]], Any]
    names: Callable[[], list[str]]


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every leaf; builds new containers."""
    # The common kinds first: an item is mapped at every use.
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is dict:
        return {key: tree_map(function, part) for key, part in tree.items()}
    if kind is list:
        return [tree_map(function, part) for part in tree]
    if kind is tuple:
        return tuple([tree_map(function, part) for part in tree])
    container = _opened(tree)
    if container is None:
        return function(tree)
    return container.build([tree_map(function, part) for part in container.children])


def flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, in order."""
    container = _opened(tree)
    if container is None:
        return [(path, tree)]
    parts = zip(container.names(), container.children, strict=True)
    return [leaf for name, part in parts for leaf in flatten(part, path + name)]


class Structure:
    """How a tree is built, without its leaves, like jax's ``PyTreeDef``."""

    # Two dicts with equal keys have one structure, whatever the order of their keys.
    # Trees that are built have the order of the first one.

    def __init__(self, tree: Any):
        container = _opened(tree)
        self._keys = list(tree) if type(tree) is dict else None
        self._parts: list[Structure] = []
        self._static: Any = None
        self._build: Callable[[list[Any]], Any] | None = None
        if container is not None:
            self._static, self._build = container.static, container.build
            self._parts = [Structure(child) for child in container.children]

    def leaves(self, tree: Any) -> list[Any] | None:
        """Returns the leaves in this structure's order; None for another structure."""
        leaves: list[Any] = []
        return leaves if self._collect(tree, leaves) else None

    def _collect(self, tree: Any, leaves: list[Any]) -> bool:
        if self._build is None:
            leaves.append(tree)
            return _opened(tree) is None
        if self._keys is not None:
            if type(tree) is not dict or len(tree) != len(self._keys):
                return False
            try:
                children = [tree[key] for key in self._keys]
            except KeyError:
                return False
        else:
            container = _opened(tree)
            if container is None or container.static != self._static:
                return False
            children = container.children
        for part, child in zip(self._parts, children, strict=True):
            if not part._collect(child, leaves):
                return False
        return True

    def build(self, leaves: Iterable[Any]) -> Any:
        """Builds a tree of leaves in this structure's order."""
        return self._built(iter(leaves))

    def _built(self, leaves: Iterator[Any]) -> Any:
        if self._build is None:
            return next(leaves)
        parts = [part._built(leaves) for part in self._parts]
        if self._keys is not None:
            return dict(zip(self._keys, parts, strict=True))
        return self._build(parts)


def tree_concatenate(trees: list[Any]) -> Any:
    """Joins trees of arrays, leaf by leaf, along the first axis."""
    leaves = zip(*([leaf for _, leaf in flatten(tree)] for tree in trees), strict=True)
    joined = iter([np.concatenate(parts) for parts in leaves])
    return tree_map(lambda _: next(joined), trees[0])


def _opened(tree: Any) -> _Container | None:
    """Opens a container; returns None for a leaf."""
    kind: Any = type(tree)
    if kind in _LEAVES or isinstance(tree, np.generic):
        return None
    if kind is dict:
        return _mapping(tree, lambda pairs: dict(pairs))
    if kind is list or kind is tuple:
        return _Container((kind, len(tree)), list(tree), kind, lambda: _at(tree))
    if tree is None:
        return _Container(None, [], lambda _: None, list)
    if kind is OrderedDict:
        return _mapping(tree, OrderedDict)
    if kind is defaultdict:
        factory = tree.default_factory
        return _mapping(tree, lambda pairs: defaultdict(factory, pairs), factory)
    if isinstance(tree, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        # Not by its constructor, which may have a mind of its own.
        names = [f".{name}" for name in kind._fields]
        return _Container(kind, list(tree), kind._make, lambda: names)
    container = _opened_by_jax(tree)
    if isinstance(tree, Mapping) and not (container and _keeps_order(tree, container)):
        # A Mapping that jax knows may come back from it with its keys sorted.
        container = _opened_mapping(tree)
    return container


def _at(tree: Any) -> list[str]:
    return [f"[{i}]" for i in range(len(tree))]


def _mapping(
    tree: Mapping[Any, Any],
    make: Callable[[Iterable[tuple[Any, Any]]], Any],
    *static: Any,
) -> _Container:
    keys = list(tree)
    return _Container(
        (type(tree), keys, *static),
        [tree[key] for key in keys],
        lambda parts: make(zip(keys, parts, strict=True)),
        lambda: [f"[{key!r}]" for key in keys],
    )


def _opened_mapping(tree: Mapping[Any, Any]) -> _Container | None:
    """Opens a Mapping that its class can make of a dict; others are leaves."""
    kind: Any = type(tree)
    container = _mapping(tree, lambda pairs: kind(dict(pairs)))
    try:
        if not _keeps_order(tree, container):
            return None
    except Exception:  # Any error of a foreign constructor.
        return None
    return container


def _keeps_order(tree: Mapping[Any, Any], container: _Container) -> bool:
    """Returns whether a Mapping made of its own children is unchanged."""
    again = container.build(container.children)
    return (
        type(again) is type(tree)
        and list(again) == list(tree)
        and all(type(again[key]) is type(tree[key]) for key in tree)
        and getattr(again, "__dict__", {}).keys()
        == getattr(tree, "__dict__", {}).keys()
    )


def _opened_by_jax(tree: Any) -> _Container | None:
    """Opens a container that jax knows, if the program has loaded jax."""
    util = getattr(sys.modules.get("jax"), "tree_util", None)
    if util is None:
        return None

    def below(node: Any) -> bool:
        return node is not tree

    try:
        children, structure = util.tree_flatten(tree, is_leaf=below)
    except Exception:  # Keys of a Mapping that cannot be sorted, for one.
        if not isinstance(tree, Mapping):
            raise
        return None
    if len(children) == 1 and children[0] is tree:
        return None

    def names() -> list[str]:
        pairs, _ = util.tree_flatten_with_path(tree, is_leaf=below)
        return [util.keystr(path) for path, _ in pairs]

    return _Container(structure, children, structure.unflatten, names)
