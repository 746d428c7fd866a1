"""What a training run is, at one moment, on the devices."""

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from echo_jax.training.processes import whole

__all__ = ["REPEAT_BUCKETS", "LossWindow", "TrainState", "params_sha256"]

REPEAT_BUCKETS = 8
"""Losses are kept apart for repeats 0 to 6; bucket 7 is repeat 7 and all later."""


class LossWindow(struct.PyTreeNode):
    """Losses since the last logged update, by repeat index.

    Attributes:
      loss: Summed losses of the examples per bucket, ``float32[REPEAT_BUCKETS]``.
      count: Examples per bucket, ``int32[REPEAT_BUCKETS]``.
    """

    loss: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls) -> "LossWindow":
        """Returns a window with nothing in it."""
        return cls(
            loss=jnp.zeros(REPEAT_BUCKETS, jnp.float32),
            count=jnp.zeros(REPEAT_BUCKETS, jnp.int32),
        )

    def add(self, losses: jax.Array, repeat: jax.Array) -> "LossWindow":
        """Returns the window with a batch added.

        Args:
          losses: The loss of every example, ``float32[B]``.
          repeat: The repeat index of every example, ``int32[B]``.
        """
        bucket = jnp.minimum(repeat, REPEAT_BUCKETS - 1)
        # A comparison and a sum, not a scatter: its order is the same on every
        # backend and in every run.
        mine = bucket[:, None] == jnp.arange(REPEAT_BUCKETS)[None, :]
        return LossWindow(
            loss=self.loss + jnp.where(mine, losses[:, None], 0.0).sum(axis=0),
            count=self.count + mine.sum(axis=0, dtype=jnp.int32),
        )


class TrainState(struct.PyTreeNode):
    """Everything that an update changes.

    Attributes:
      update: Updates done, ``int32[]``.
      params: The parameters.
      model_state: Flax collections other than the parameters (batch statistics).
      opt_state: The optimizer's state.
      window: Losses since the last logged update.
      first_bad_update: The first update whose loss was not finite, ``int32[]``,
        counted from 1; 0 while there is none.
    """

    update: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    window: LossWindow
    first_bad_update: jax.Array


def params_sha256(params: Any) -> str:
    """Hashes parameters: names, types, shapes and every bit.

    Args:
      params: A pytree of arrays, sharded in any way.

    Returns:
      64 hexadecimal digits; equal for equal parameters on any mesh.
    """
    digest = hashlib.sha256()
    for path, leaf in jax.tree.leaves_with_path(params):
        value = np.ascontiguousarray(whole(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {value.dtype} ".encode())
        digest.update(f"{value.shape}\n".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()
