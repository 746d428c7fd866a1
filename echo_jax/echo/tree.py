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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

# Types that are always leaves, so jax is not asked about them.
_LEAVES = {np.ndarray, int, float, bool, complex, str, bytes, *np.sctypeDict.values()}


class _Container(NamedTuple):
    """One container, opened; ``static`` is equal where only the children differ."""

    static: Any
    children: list[Any]
    build: Callable[[list[Any]], Any]
    names: Iterable[str]  # Made when they are asked for, once.


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """Applies a function to every leaf; builds new containers."""
    # The common kinds first: an item is mapped at every use.
    kind = type(tree)
    if kind in _LEAVES:
        return function(tree)
    if kind is dict:
        return {key: tree_map(function, part) for key, part in tree.items()}
    if kind is list or kind is tuple:
        return kind([tree_map(function, part) for part in tree])
    container = _opened(tree)
    if container is None:
        return function(tree)
    return container.build([tree_map(function, part) for part in container.children])


def flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves with their paths, in order."""
    container = _opened(tree)
    if container is None:
        return [(path, tree)]
    parts = zip(container.names, container.children, strict=True)
    return [leaf for name, part in parts for leaf in flatten(part, path + name)]


def lists_in(tree: Any, path: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Yields every list of a tree with its path, before the lists in it."""
    if type(tree) is list:
        yield path, tree
    if (container := _opened(tree)) is not None:
        for name, part in zip(container.names, container.children, strict=True):
            yield from lists_in(part, path + name)


class Structure:
    """How a tree is built, without its leaves, like jax's ``PyTreeDef``."""

    # Dicts with equal keys in any order have one structure; it builds the first order.

    def __init__(self, tree: Any):
        container = _opened(tree)
        static, children, build, _ = container or (None, [], None, None)
        self._static, self._build = static, build
        self._parts = [Structure(child) for child in children]
        self._keys = list(tree) if type(tree) is dict else None

    def columns(self, trees: list[Any]) -> list[list[Any]] | None:
        """Returns each leaf of all trees; None if a tree has another structure."""
        if self._build is None:
            common = _LEAVES.issuperset(map(type, trees))
            return [trees] if common or not any(map(_opened, trees)) else None
        if self._keys is not None:
            if {*map(type, trees)} != {dict} or {*map(len, trees)} != {len(self._keys)}:
                return None
            try:
                children = [[tree[key] for tree in trees] for key in self._keys]
            except KeyError:
                return None
        else:
            opened = [_opened(tree) for tree in trees]
            if any(x is None or x.static != self._static for x in opened):
                return None
            children = map(list, zip(*(x.children for x in opened if x), strict=True))
        found: list[list[Any]] = []
        for part, column in zip(self._parts, children, strict=True):
            columns = part.columns(column)
            if columns is None:
                return None
            found += columns
        return found

    def build(self, leaves: Iterator[Any]) -> Any:
        """Builds a tree of leaves in this structure's order."""
        if self._build is None:
            return next(leaves)
        return self._build([part.build(leaves) for part in self._parts])


def _opened(tree: Any) -> _Container | None:
    """Opens a container; returns None for a leaf."""
    kind: Any = type(tree)
    if kind in _LEAVES or isinstance(tree, np.generic):
        return None
    if kind is dict or kind is OrderedDict:
        return _mapping(tree, kind)
    if kind is list or kind is tuple:
        return _by_key(tree, range(len(tree)), kind)
    if tree is None:
        return _Container(None, [], lambda _: None, [])
    if kind is defaultdict:
        return _mapping(tree, partial(kind, tree.default_factory), tree.default_factory)
    if isinstance(tree, tuple) and hasattr(kind, "_fields") and hasattr(kind, "_make"):
        # Not by its constructor, which may have a mind of its own.
        return _Container(kind, list(tree), kind._make, (f".{x}" for x in kind._fields))
    if not isinstance(tree, Mapping):
        return _opened_by_jax(tree)
    # A Mapping that jax knows may come back from it with its keys sorted. Those that
    # their class cannot make of a dict are leaves.
    for opened in (
        _opened_by_jax,
        lambda tree: _mapping(tree, lambda pairs: kind(dict(pairs))),
    ):
        try:
            container = opened(tree)
            if container and _is_kept(tree, container):
                return container
        except Exception:  # Any error of a foreign class.
            continue
    return None


def _mapping(
    tree: Any, make: Callable[[Iterable[Any]], Any], *static: Any
) -> _Container:
    keys = list(tree)
    return _by_key(tree, keys, lambda x: make(zip(keys, x, strict=True)), *static)


def _by_key(
    tree: Any, keys: Sequence[Any], build: Callable[[list[Any]], Any], *static: Any
) -> _Container:
    children, names = [tree[key] for key in keys], (f"[{key!r}]" for key in keys)
    return _Container((type(tree), keys, *static), children, build, names)


def _is_kept(tree: Mapping[Any, Any], container: _Container) -> bool:
    """Returns whether a Mapping made of its own children is unchanged."""
    again = container.build(container.children)
    return (
        type(again) is type(tree)
        and list(again) == list(tree)
        and all(type(again[key]) is type(tree[key]) for key in tree)
        and {*getattr(again, "__dict__", ())} == {*getattr(tree, "__dict__", ())}
    )


def _opened_by_jax(tree: Any) -> _Container | None:
    """Opens a container that jax knows, if the program has loaded jax."""
    util = getattr(sys.modules.get("jax"), "tree_util", None)
    if util is None:
        return None
    pairs, structure = util.tree_flatten_with_path(tree, lambda node: node is not tree)
    children = [child for _, child in pairs]
    if len(children) == 1 and children[0] is tree:
        return None
    names = (util.keystr(path) for path, _ in pairs)
    return _Container(structure, children, structure.unflatten, names)
