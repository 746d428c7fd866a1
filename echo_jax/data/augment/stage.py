"""The protocol of an augmentation stage, and chains of stages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

Batch = dict[str, Any]
"""A batch of images as `echo_jax.data.augment` describes it."""


class Stage(Protocol):
    """One augmentation: a frozen, hashable value that is called like a function."""

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns a new batch; `keys` has a random key for every example."""
        ...


@dataclass(frozen=True)
class Augment:
    """Runs stages in order, each with its own randomness.

    Stage i gets ``fold_in(key, i)`` of every key. So stages are independent, even two
    of one kind. An Augment is itself a Stage.

    Attributes:
      stages: The stages, in this order.

    Example:
      >>> from echo_jax.data.augment import Flip, PadCrop
      >>> augment = Augment((PadCrop(padding=4), Flip()))
      >>> batch = {"image": jnp.zeros((2, 32, 32, 3), jnp.uint8)}
      >>> keys = jax.random.split(jax.random.key(0), 2)
      >>> jax.jit(augment)(batch, keys)["image"].shape
      (2, 32, 32, 3)
    """

    stages: tuple[Stage, ...]

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Augments a batch.

        Args:
          batch: With ``"image"``; entries that no stage knows pass through.
          keys: A typed key array, ``key[B]``: one key for every use of an example.

        Returns:
          A new dict.

        Raises:
          ValueError: Images are not ``[B, H, W, C]``, or keys are not ``key[B]``.
        """
        shape = batch["image"].shape
        if len(shape) != 4:
            raise ValueError(
                f"batch['image'] has the shape {shape}; give [batch, height, width, "
                "channels]."
            )
        is_key = jnp.issubdtype(keys.dtype, jax.dtypes.prng_key)
        if not is_key or keys.shape != shape[:1]:
            raise ValueError(
                f"keys is {keys.dtype}{list(keys.shape)}; give one typed key per "
                f"example, key[{shape[0]}], as jax.random.wrap_key_data makes them."
            )
        batch = dict(batch)
        for number, stage in enumerate(self.stages):
            batch = stage(batch, jax.vmap(jax.random.fold_in, (0, None))(keys, number))
        return batch


@dataclass(frozen=True)
class ToFloat:
    """Casts images to float32, still from 0 to 255, so that later stages do not round.

    Stages return images of the type that they get, and round bytes.

    Example:
      >>> keys = jax.random.split(jax.random.key(0), 1)
      >>> batch = ToFloat()({"image": jnp.full((1, 2, 2, 3), 7, jnp.uint8)}, keys)
      >>> batch["image"].max()
      Array(7., dtype=float32)
    """

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns the batch with float images; does not use `keys`."""
        del keys
        return {**batch, "image": batch["image"].astype(jnp.float32)}


def uniforms(keys: jax.Array, count: int) -> jax.Array:
    """Returns `count` numbers in [0, 1) for each of the keys, float32[B, count]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)


def cast_pixels(values: jax.Array, dtype: Any) -> jax.Array:
    """Returns pixels as `dtype`; bytes are rounded (ties to even) and clipped."""
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.clip(jnp.round(values), 0, 255)
    return values.astype(dtype)
