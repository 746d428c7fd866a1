"""Leaves in host memory: which ones can be kept unchanged, and private copies of them.

Arrays are copied as they are: dtype, order in memory, and the NumPy classes that have a
meaning. A class that describes the place of its memory, such as a memory-mapped array
or an array of Grain's workers, becomes a plain array, because its copy is elsewhere. A
leaf that would come out changed is refused with its path, the reason and the fix.

| leaf | alone | in a batch |
| --- | --- | --- |
| array without objects | read-only views of one copy | stacked |
| number, text, array of jax | itself | stacked |
| any other object | a deep copy for each use | stacked as its array of numbers |
| masked array | refused | refused |
"""

import copy
import sys
from typing import Any

import numpy as np

from echo_jax.echo.tree import tree_map

# Their kinds always become an array of the same values.
_NUMBERS = (int, float, complex, np.number, np.bool_)
# Beside a record, of type void.
_IMMUTABLE = (*_NUMBERS, str, bytes, np.generic, type(None))
# Classes of arrays whose operations or attributes differ from plain arrays.
_CLASSES = (np.matrix, np.recarray)


def copied(tree: Any) -> Any:
    """Returns a tree with copies of its arrays and tensors; other leaves stay."""
    return tree_map(_copied, tree)


def _copied(leaf: Any) -> Any:
    if type(leaf) is np.ndarray:  # The common kind first.
        return leaf.copy()
    if _is_immutable(leaf):
        return leaf
    clone = getattr(leaf, "copy", None) or getattr(leaf, "clone", None)
    try:
        return clone() if clone else leaf
    except Exception:  # Whoever stores the leaf says why it cannot be.
        return leaf


def private(leaf: Any, path: str = "") -> Any:
    """Returns a copy that nobody can write into; raises ValueError if it cannot."""
    if not isinstance(leaf, np.ndarray) and _is_immutable(leaf):
        return leaf
    _check_mask(path, leaf)
    if _is_array(leaf):
        leaf = np.array(leaf, subok=isinstance(leaf, _CLASSES))
        leaf.setflags(write=False)
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        why = "which cannot be copied, and every use of an item is a copy of its own"
        raise _refusal(path, leaf, f"{why} ({error}); leave it out of items") from error


def view(leaf: Any) -> Any:
    """Returns a use of a frozen leaf, without writable memory in common with others."""
    # A view of a read-only array cannot be made writable again.
    if _is_array(leaf):
        return leaf.view()
    if not _is_immutable(leaf):
        return copy.deepcopy(leaf)
    if getattr(leaf, "is_deleted", bool)():
        raise ValueError(
            f"an array {leaf.aval} of an item was donated or deleted, and the item is "
            "used again. Leave the batch out of donate_argnums, or give the step copies"
        )
    return leaf


def _check_mask(path: str, leaf: Any) -> None:
    """Raises ValueError for an array that would lose its mask."""
    if isinstance(leaf, np.ma.MaskedArray):
        why = "a masked array, whose mask would be lost; give leaf.filled(value), and"
        raise _refusal(path, leaf, f"{why} the mask as a leaf of its own")


def _check_columns(path: str, leaf: Any) -> None:
    """Raises ValueError for a table, or a column with missing values."""
    # An array of it would have one dtype, and no names.
    names = getattr(leaf, "column_names", getattr(leaf, "columns", None))
    if names is not None and not callable(names):
        why = "a table. Give a dict of its columns, such as {name: "
        why += f"table[name].to_numpy() for name in {[*names]!r:.60}}}"
        raise ValueError(f"leaf item{path} is {why}")
    missing = getattr(leaf, "null_count", 0)  # of Arrow, or polars
    if hasattr(leaf, "isna") and not isinstance(leaf.dtype, np.dtype):  # of pandas
        missing = leaf.isna().sum()
    if missing := missing() if callable(missing) else missing:
        why = f"has {missing} missing values, which would make its integers floats."
        raise ValueError(f"leaf item{path} {why} Fill them before the echo.")


def as_array(path: str, leaf: Any) -> np.ndarray:
    """Returns a leaf as an array that stacks; raises ValueError if that loses data."""
    if type(leaf) is not np.ndarray and not isinstance(leaf, _NUMBERS):
        _check_mask(path, leaf)
        if isinstance(leaf, _CLASSES):
            why = "which stacks to a plain array; give np.asarray(leaf), or batch=False"
            raise _refusal(path, leaf, why)
        if isinstance(leaf, str | bytes) and leaf[-1:] in ("\0", b"\0"):
            why = "text that ends with a NUL, which an array of text drops; give"
            why += " np.frombuffer(leaf, np.uint8), or use batch=False"
            raise ValueError(f"leaf item{path} is {why}")
        _check_columns(path, leaf)
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError) as error:  # The last one by torch.
        why = f"which does not become an array ({error}); convert it before the echo,"
        why += " a tensor with .detach().cpu().float(), or use ej.echo with batch=False"
        raise _refusal(path, leaf, why) from error
    # NumPy's own variable-width text counts as objects, but it stacks.
    if array.dtype.hasobject and array.dtype.kind != "T":
        why = "which is no array of numbers, so it does not stack; pad ragged rows"
        why += " to one length, register the class of a container of arrays with"
        why += " jax.tree_util.register_dataclass, or use ej.echo with batch=False"
        raise _refusal(path, leaf, why)
    return array


def read_only(leaf: Any) -> Any:
    """Returns a leaf protected from writes by mistake, without a copy of its memory."""
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    _check_mask("", leaf)
    # A class that describes the place of its memory would treat the view as its owner.
    leaf = leaf.view() if isinstance(leaf, _CLASSES) else leaf.view(np.ndarray)
    leaf.setflags(write=False)
    return leaf


def _is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of any class, without objects in it."""
    return isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject


def _is_immutable(leaf: Any) -> bool:
    if isinstance(leaf, _IMMUTABLE):
        return not isinstance(leaf, np.void)
    return isinstance(leaf, getattr(sys.modules.get("jax"), "Array", ()))


def _refusal(path: str, leaf: Any, why: str) -> ValueError:
    kind = type(leaf)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return ValueError(f"leaf item{path} is a {package}{kind.__qualname__}, {why}")
