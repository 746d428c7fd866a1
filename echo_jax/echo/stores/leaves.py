"""Leaves in host memory: which ones can be kept unchanged, and private copies of them.

Arrays are copied as they are: dtype, order in memory, and the NumPy classes that have a
meaning. A class that describes the place of its memory, such as a memory-mapped array
or an array of Grain's workers, becomes a plain array, because its copy is elsewhere. A
leaf that would come out changed is refused with its path, the reason and the fix.
"""

import copy
import dataclasses
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

__all__ = [
    "_NUMBERS",
    "ReuseGuard",
    "as_array",
    "check_foreign",
    "frozen",
    "of_torch",
    "private",
    "read_only",
    "view",
]

_IMMUTABLE = (str, bytes, int, float, complex, bool, np.generic, type(None))
_SCALARS = frozenset(np.sctypeDict.values())
_NUMERIC = {kind for kind in _SCALARS if issubclass(kind, np.number | np.bool_)}
# Kinds of leaves that always become an array of the same values.
_NUMBERS = frozenset((int, float, bool, complex)) | _NUMERIC
# Kinds that can always be kept as they are. A record, of type void, is mutable.
_CONSTANTS = _NUMBERS | _SCALARS - {np.void, np.object_} | {str, bytes, type(None)}
# Classes of arrays whose operations or attributes differ from those of plain ones.
_CLASSES = (np.matrix, np.recarray)
# Arrays of other libraries, by the package of their class, and their conversion to
# NumPy.
_FOREIGN = {
    "torch": "convert it with .numpy()",
    "pandas": "convert it with .to_numpy()",
    "polars": "convert it with .to_numpy()",
    "scipy": "convert it with .toarray()",
    "cupy": "convert it with .get()",
}


def private(path: str, leaf: Any) -> Any:
    """Returns a copy that nobody can write into; raises ValueError if it cannot."""
    if type(leaf) in _CONSTANTS:
        return leaf
    check_foreign(path, leaf)
    if _is_array(leaf):
        leaf = np.array(leaf, subok=isinstance(leaf, _CLASSES))
        leaf.setflags(write=False)
        return leaf
    if _is_immutable(leaf):
        return leaf
    if not isinstance(leaf, np.ndarray) and _holds_arrays(leaf, set()):
        raise ValueError(
            f"item{path} is a {_name(leaf)}, a container of arrays that the echo "
            "cannot open; register it with jax.tree_util.register_dataclass or "
            "register_pytree_node and import jax, or give a dict"
        )
    try:
        return copy.deepcopy(leaf)
    except Exception as error:
        raise ValueError(
            f"item{path} is a {_name(leaf)}, which cannot be copied, and every use "
            f"of an item is a copy of its own ({error}); leave it out of the items"
        ) from error


frozen = partial(private, "")


def view(leaf: Any) -> Any:
    """Returns a use of a frozen leaf, without writable memory in common with others."""
    # A view of a read-only array cannot be made writable again.
    if _is_array(leaf):
        return leaf.view()
    return leaf if _is_immutable(leaf) else copy.deepcopy(leaf)


def check_foreign(path: str, leaf: Any) -> None:
    """Raises ValueError for masked arrays, and for arrays of other libraries."""
    if isinstance(leaf, np.ma.MaskedArray):
        raise ValueError(
            f"leaf item{path} is a masked array, whose mask would be lost; give "
            "leaf.filled(value), and the mask as a leaf of its own"
        )
    if isinstance(leaf, np.ndarray) or not hasattr(leaf, "shape"):
        return
    for kind in type(leaf).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _FOREIGN:
            raise ValueError(
                f"leaf item{path} is a {_name(leaf)}, which the echo cannot copy; "
                f"{_FOREIGN[package]} before the echo"
            )


def as_array(path: str, leaf: Any) -> np.ndarray:
    """Returns a leaf as an array that stacks; raises ValueError if that loses data."""
    kind = type(leaf)
    if kind is not np.ndarray and kind not in _NUMBERS:
        leaf = of_torch(path, leaf)
        check_foreign(path, leaf)
        if isinstance(leaf, _CLASSES):
            raise ValueError(
                f"leaf item{path} is a {_name(leaf)}, which stacks to a plain array; "
                "give np.asarray(leaf), or use batch=False"
            )
        if isinstance(leaf, str | bytes) and leaf[-1:] in ("\0", b"\0"):
            raise ValueError(
                f"leaf item{path} is text that ends with a NUL, which an array of "
                "text drops; give np.frombuffer(leaf, np.uint8), or use batch=False"
            )
        known = isinstance(leaf, np.ndarray | np.generic) or _is_jax_array(leaf)
        if not known and _holds_arrays(leaf, set()):
            private(path, leaf)  # Raises the error of such a container.
    try:
        array = np.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"leaf item{path} is a {_name(leaf)}, which does not become an array "
            f"({error}); convert it before the echo, or use batch=False"
        ) from error
    # NumPy's own variable-width text counts as objects, but it stacks.
    if array.dtype.hasobject and array.dtype.kind != "T":
        raise ValueError(
            f"leaf item{path} is no array of numbers, so items cannot be stacked "
            "into batches; use batch=False, or pad ragged rows to one length"
        )
    return array


def of_torch(path: str, leaf: Any) -> Any:
    """Returns a torch tensor as an array in the same memory; keeps other leaves."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    if tensor is None or not isinstance(leaf, tensor):
        return leaf
    try:
        return leaf.numpy()
    except (TypeError, RuntimeError) as error:
        raise ValueError(
            f"leaf item{path} is a {leaf.dtype} tensor of layout {leaf.layout} on "
            f"{leaf.device}, which does not become a NumPy array "
            f"({str(error).partition(chr(10))[0]}); convert it before the echo, with "
            ".detach(), .cpu(), .to_dense() or .float()"
        ) from error


def read_only(leaf: Any) -> Any:
    """Returns a leaf protected from writes by mistake, without a copy of its memory."""
    if not isinstance(leaf, np.ndarray) or not leaf.flags.writeable:
        return leaf
    # A class that describes the place of its memory would treat the view as its owner.
    leaf = leaf.view() if isinstance(leaf, _CLASSES) else leaf.view(np.ndarray)
    leaf.setflags(write=False)
    return leaf


def _is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array of any class, without objects in it."""
    return isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject


def _is_immutable(leaf: Any) -> bool:
    # A record is a mutable scalar, and so is an array in it.
    if type(leaf) in _CONSTANTS:
        return True
    is_scalar = isinstance(leaf, _IMMUTABLE) and not isinstance(leaf, np.void)
    return is_scalar or _is_jax_array(leaf)


def _is_jax_array(leaf: Any) -> bool:
    kind = getattr(sys.modules.get("jax"), "Array", None)
    return kind is not None and isinstance(leaf, kind)


def _holds_arrays(thing: Any, seen: set[int]) -> bool:
    """Returns whether a thing is an array, or an object that holds one somewhere."""
    if isinstance(thing, np.ndarray) or _is_jax_array(thing):
        return True
    if isinstance(thing, _IMMUTABLE) or id(thing) in seen:
        return False
    seen.add(id(thing))
    return any(_holds_arrays(part, seen) for part in _parts(thing))


def _parts(thing: Any) -> Iterable[Any]:
    if isinstance(thing, Mapping):
        return [thing[key] for key in thing]
    if isinstance(thing, list | tuple | set | frozenset | deque):
        return thing
    if dataclasses.is_dataclass(thing):
        names = [field.name for field in dataclasses.fields(thing)]
        return [getattr(thing, name, None) for name in names]
    return list(getattr(thing, "__dict__", {}).values())


def _name(thing: Any) -> str:
    kind = type(thing)
    package = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return f"{package}{kind.__qualname__}"


class Watched(list[Any]):
    """Leaves, with a checksum of their content when they were read."""

    mark: int


class ReuseGuard:
    """Detects an upstream that writes into arrays that it has already given away."""

    # The first elements are checked twice, when they are read and when they are used: a
    # part of every leaf must be unchanged. An upstream that reuses its memory does so
    # from the start, and elements wait for less than a batch, or for the rows read
    # ahead.

    _LOOKS, _PART = 16, 256

    def __init__(self):
        self.left = self._LOOKS

    def watch(self, leaves: list[Any]) -> list[Any]:
        """Returns leaves, or lists of them, the first ones with a checksum."""
        if not self.left:
            return leaves
        self.left -= 1
        watched = Watched(leaves)
        watched.mark = self._sum(leaves)
        return watched

    def check(self, leaves: list[Any]) -> None:
        """Raises ValueError if leaves have changed since they were read."""
        if type(leaves) is Watched and self._sum(leaves) != leaves.mark:
            raise ValueError(
                "the upstream has written into an element that it had already given "
                "away and that was not used yet; have it yield copies, or new arrays"
            )

    def _sum(self, leaves: Iterable[Any]) -> int:
        found = 0
        parts = (leaf if type(leaf) is list else (leaf,) for leaf in leaves)
        for leaf in chain.from_iterable(parts):
            if _is_array(leaf) and leaf.size:
                first = leaf.flat[: self._PART]
                last = leaf.flat[-min(leaf.size, self._PART) :]
                found = zlib.crc32(last.tobytes(), zlib.crc32(first.tobytes(), found))
        return found
