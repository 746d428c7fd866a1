"""Hashes of plain data and of arrays.

The checksum of an array is two sums over its 32-bit words, modulo 2^32. A bijection
mixes each word with its place first. So the checksum is the same on every mesh, and one
changed word always changes it. Other damage is missed once in 2^64.
"""

import functools
import hashlib
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.training.arrays import fetch_global
from echo_jax.training.processes.distributed import all_gather

# Odd numbers, so that their multiples differ at all places.
_STRIDES = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


def sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def params_sha256(params: Any) -> str:
    """Hashes parameters on any mesh, in 64 hex digits; all processes call it."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = np.ascontiguousarray(fetch_global(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} ".encode())
        digest.update(f"{value.shape}\n".encode())
        digest.update(value.tobytes())
    of_each = all_gather(digest.hexdigest())
    if len({*of_each}) > 1:
        raise RuntimeError(
            f"the processes ended with different parameters: {', '.join(of_each)}; "
            "nothing of this run is to be trusted"
        )
    return of_each[0]


def checksums(tree: Any) -> dict[str, str]:
    """Returns 16 hex digits for every array, by its path; all processes call it."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
    sums = fetch_global(_all_sums(jax.tree.leaves(tree)))
    return {
        path: "".join(f"{int(word):08x}" for word in row)
        for path, row in zip(paths, sums, strict=True)
    }


@jax.jit
def _all_sums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_sums(leaf) for leaf in leaves])


def _sums(array: jax.Array) -> jax.Array:
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        place += along * np.uint32(stride % 2**32)
        stride *= words.shape[axis]
    first = _mixed(words ^ (place * _STRIDES[0]))
    # The second continues from the first, which is mixed well. Its place separates
    # words that the first mixes to the same value.
    second = first + place * _STRIDES[1]
    second = (second ^ (second >> 15)) * np.uint32(0xC2B2AE35)
    second ^= second >> 16
    # Both in one pass: on a CPU, XLA takes ten times as long for two.
    zero = np.uint32(0)
    axes = tuple(range(words.ndim))
    added = functools.partial(jax.tree.map, jnp.add)
    return jnp.stack(jax.lax.reduce([first, second], [zero, zero], added, axes))


def _words(array: jax.Array) -> jax.Array:
    """Returns the bits of an array in words, as uint32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    bits = min(array.dtype.itemsize, 4) * 8
    # Words of 64 bits become two, along a new last axis.
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{bits}"))
    return words.astype(jnp.uint32)


def _mixed(words: jax.Array) -> jax.Array:
    """Returns the words after MurmurHash3's finalizer, a bijection."""
    words = (words ^ (words >> 16)) * np.uint32(0x85EBCA6B)
    words = (words ^ (words >> 13)) * np.uint32(0xC2B2AE35)
    return words ^ (words >> 16)
