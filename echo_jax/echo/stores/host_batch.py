"""Host batches that a device can hold: their layout, and checks of their leaves."""

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.echo.stores.leaves import check_foreign, of_torch

__all__ = ["as_host_batch", "check_integers", "layout_of"]


def as_host_batch(batch: Any) -> Any:
    """Returns a batch whose torch tensors are arrays in the same memory."""
    if "torch" not in sys.modules:
        return batch
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: of_torch(jax.tree_util.keystr(path), leaf), batch
    )


def layout_of(batch: Any) -> tuple[Any, int, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a batch's ``PyTreeDef``, rows, and shapes and dtypes of a row."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(batch)
    items = tuple(_item_of(jax.tree_util.keystr(path), leaf) for path, leaf in leaves)
    rows = {leaf.shape[0] for _, leaf in leaves}
    if len(rows) != 1 or rows == {0}:
        raise ValueError(
            "a device echo needs batches whose leaves have one number of rows, at "
            f"least 1; this one has {sorted(rows)}"
        )
    return structure, rows.pop(), items


def _item_of(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype, on a device, of a row of an array."""
    check_foreign(path, leaf)
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
