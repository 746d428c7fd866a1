"""Reads checkpoints: a restore returns the saved state, or refuses a damaged one.

A restore compares checksums of all arrays, because Orbax does not notice a changed bit
on the disk: of 24 flips in saved arrays, it restored all in silence. A checksum is two
sums over 32-bit words, modulo 2^32. A bijection mixes each word with its place first.
So the checksum is the same on every mesh, and one changed word always changes it. Other
damage is missed once in 2^64.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from echo_jax.files.folders import is_in_bucket
from echo_jax.terminal.failures import forget, quiet_libraries
from echo_jax.training.arrays import fetch_global

State = TypeVar("State")

# How long the reads in progress take to end after another read failed.
_READS_END_S = 0.2
# Odd numbers, so that their multiples differ at all places.
_STRIDES = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be read, or differs from the saved state."""


class CheckpointReader:
    """Reads the whole checkpoints of a folder, also during a run; changes nothing."""

    def __init__(
        self, directory: epath.Path, options: ocp.CheckpointManagerOptions | None = None
    ):
        self._directory = directory
        # Orbax takes absolute paths alone.
        path = directory if is_in_bucket(directory) else os.path.abspath(directory)
        self._manager = ocp.CheckpointManager(
            path, options=options or ocp.CheckpointManagerOptions(create=False)
        )

    def latest(self) -> int | None:
        """Returns the newest update, counting a save in progress; None without one."""
        return self._manager.latest_step()

    def updates(self) -> list[int]:
        """Returns the updates of all whole checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    # The devices need not be those that saved it. With `is_part` the nodes of
    # `abstract_state` may lack saved fields, which are not read.
    def restore(
        self, update: int, abstract_state: State, *, is_part: bool = False
    ) -> tuple[State, dict[str, Any]]:
        """Reads the state and the host's part of a checkpoint."""
        where = self._name(update)
        wanted: Any = ocp.args.StandardRestore(abstract_state)
        if is_part:
            wanted = ocp.args.PyTreeRestore(
                item=abstract_state,
                restore_args=ocp.checkpoint_utils.construct_restore_args(
                    abstract_state
                ),
                partial_restore=True,
            )
        with _one_sentence(where):
            item = self._manager.restore(
                update,
                args=ocp.args.Composite(state=wanted, host=ocp.args.JsonRestore()),
            )
        state, content = item["state"], item["host"]
        if not isinstance(content, dict) or content.pop("sha256", "") != sha256_of(
            content
        ):
            raise DamagedCheckpointError(
                f"{where} is damaged: its host part is not what was saved"
            )
        saved, found = content["sums"], checksums(state)
        differing = [path for path in found if saved.get(path) != found[path]]
        is_all = is_part or len(saved) == len(found)
        if differing or not is_all:
            raise DamagedCheckpointError(
                f"{where} is damaged: {len(differing)} of {len(found)} arrays are not "
                f"what was saved, such as {(differing or [*saved])[0]}"
            )
        return state, content["host"]

    def shapes(self, update: int) -> dict[str, Any]:
        """Returns a state as nested dicts of objects with ``shape`` and ``dtype``."""
        where = self._name(update)
        with _one_sentence(where):
            handler = ocp.PyTreeCheckpointHandler()
            found = handler.metadata(self._manager.directory / str(update) / "state")
        return found.tree

    def close(self) -> None:
        self._manager.close()

    def _name(self, update: int) -> str:
        return f"the checkpoint of update {update} in {self._directory}"


@contextlib.contextmanager
def _one_sentence(where: str) -> Iterator[None]:
    """Raises one sentence for any error of Orbax or TensorStore."""
    # After a failed read, other reads go on. Their threads' errors would be printed as
    # unraisable exceptions, by asyncio's logger, and as warnings. They are dropped if
    # a read fails, and shown otherwise.
    hook, kept = sys.unraisablehook, []
    sys.unraisablehook = kept.append
    try:
        yield
    except Exception as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        reason = f"{type(first).__name__}: {first}".partition("\n")[0]
        with quiet_libraries(), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            time.sleep(_READS_END_S)
            forget(error)
        kept.clear()
        raise DamagedCheckpointError(
            f"{where} cannot be read ({reason:.300})"
        ) from None
    finally:
        sys.unraisablehook = hook
        for each in kept:
            hook(each)


def sha256_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
