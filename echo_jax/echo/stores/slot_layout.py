"""The leaves that a device can hold, and their layout in slots.

Items are flat, so that a slot is contiguous whatever its shape. A TPU stores arrays in
tiles of 8 x 128. A program that reads or writes a few slots first copies all slots to
another layout, unless slots are whole tiles. The rules that avoid this copy were found
by compiling for a TPU v5e and counting the bytes that the program moves: "Compiled for
accelerators" in docs/benchmarks.md.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.echo.stores.leaves import check_leaf, of_torch

_TILE_WIDTH = 128
# In elements. The compiler chooses the layout of smaller leaves, such as labels.
_LEAST_TILED = 32
# With fewer rows, words of 32 bits need no padding to whole tiles.
_LEAST_ROWS = 32
# The compiler splits larger slots by copying all slots to two arrays of half the width.
_MOST_BYTES = 192 * 1024
# With more bytes of a batch at once, the compiler for a v5e runs out of memory when it
# changes the layout of images.
_MOST_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class SlotLayout:
    """The layout of a leaf: a slot is ``parts`` places of a shape."""

    item: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    parts: int = 1

    @classmethod
    def of(cls, item: jax.ShapeDtypeStruct, *, tiled: bool) -> "SlotLayout":
        """Returns the layout of a leaf; slots are whole tiles if ``tiled``."""
        size, itemsize = math.prod(item.shape), item.dtype.itemsize
        if not tiled or size < _LEAST_TILED:
            return cls(item, (size,) if item.shape else ())
        parts = math.ceil(size * itemsize / _MOST_BYTES)
        rows = math.ceil(size / parts / _TILE_WIDTH)
        if itemsize >= 4 and rows < _LEAST_ROWS:
            return cls(item, (rows * _TILE_WIDTH,), parts)
        if rows > 1:
            rows = 4 if rows <= 4 else 8 * math.ceil(rows / 8)
        return cls(item, (rows, _TILE_WIDTH), parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot."""
        return self.parts * math.prod(self.shape) * self.item.dtype.itemsize

    def zeros(self, num_lanes: int, num_slots: int) -> jax.Array:
        """Returns empty slots, ``[G, num_slots * parts, *shape]``."""
        places = (num_lanes, num_slots * self.parts)
        return jnp.zeros(places + self.shape, self.item.dtype)

    def write(self, array: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
        """Puts ``[n, *item.shape]`` into a lane's slots, ``int32[n]``; to be traced."""
        # Each slot occurs once; slots out of range are dropped.
        size, count = math.prod(self.item.shape), slots.size
        flat = rows.reshape(count, size)
        if missing := self.parts * math.prod(self.shape) - size:
            flat = jnp.pad(flat, ((0, 0), (0, missing)))
        rows = flat.reshape(count * self.parts, *self.shape)
        places = array.at[self._places(slots)]
        return places.set(rows, mode="drop", unique_indices=True)

    def read(self, array: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the leaves in a lane's slots, ``[n, *item.shape]``; to be traced."""
        # All slots must be in range.
        count = math.ceil(slots.size * self.num_bytes / _MOST_AT_ONCE)
        if count == 1 or len(self.shape) < 2:
            return self._read(array, slots)
        while slots.size % count:
            count += 1
        parts = jax.lax.map(
            lambda some: self._read(array, some), slots.reshape(count, -1)
        )
        return parts.reshape(slots.size, *self.item.shape)

    def _read(self, array: jax.Array, slots: jax.Array) -> jax.Array:
        rows = array.at[self._places(slots)].get(mode="promise_in_bounds")
        flat = rows.reshape(slots.size, self.parts * math.prod(self.shape))
        size = math.prod(self.item.shape)
        return flat[:, :size].reshape(slots.size, *self.item.shape)

    def _places(self, slots: jax.Array) -> jax.Array:
        if self.parts == 1:
            return slots
        parts = jnp.arange(self.parts, dtype=slots.dtype)
        return (slots[:, None] * self.parts + parts[None]).reshape(-1)


def layout_of(batch: Any) -> tuple[Any, Any, int, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a batch of arrays, its ``PyTreeDef``, rows, and shapes of a row."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(batch)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
    # A torch tensor becomes an array in the same memory.
    leaves = [of_torch(path, leaf) for path, leaf in named]
    items = tuple(_item_of(path, x) for (path, _), x in zip(named, leaves, strict=True))
    rows = {leaf.shape[0] for leaf in leaves}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(
            "a device echo needs batches whose leaves have one number of rows, at "
            f"least 1; this one has {sorted(rows)}"
        )
    return structure.unflatten(leaves), structure, rows.pop(), items


def _item_of(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype, on a device, of a row of an array."""
    check_leaf(path, leaf)
    if not isinstance(leaf, np.ndarray | jax.Array) or leaf.ndim == 0:
        raise ValueError(
            "a device echo needs batches of arrays of numbers with a leading axis; "
            f"item{path} is {leaf!r:.80}: give an array, or a container that jax knows"
        )
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"leaf item{path} has random keys, which a buffer does not hold; give "
            "jax.random.key_data(keys)"
        )
    if not _is_on_devices(np.dtype(dtype)):
        raise ValueError(
            f"leaf item{path} has dtype {dtype}, which devices do not have; give "
            "numbers in the machine's byte order, such as labels instead of names"
        )
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)


@functools.lru_cache(maxsize=64)
def _is_on_devices(dtype: np.dtype[Any]) -> bool:
    try:
        jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)))
    except TypeError:
        return False
    return dtype.isnative


def check_integers(batch: Any) -> None:
    """Raises ValueError if integers would wrap around without jax's 64 bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if dtype == leaf.dtype or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < np.iinfo(dtype).min or most > np.iinfo(dtype).max:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"leaf item{name} has the integers {least} to {most}, which do not "
                f"fit {dtype}; set jax_enable_x64, or give them as two leaves of 32 "
                "bits"
            )
