"""Pixels as bytes become the floats that a network sees, where it runs."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = ["Channels", "normalised"]

Channels = tuple[float, float, float]
"""A number for each of red, green and blue, of 0 to 255."""


def normalised(images: ArrayLike, mean: Channels, scale: Channels) -> jax.Array:
    """Returns ``(images - mean) / scale``, channel by channel, in float32.

    Args:
      images: ``uint8[B, H, W, 3]``.
      mean: Subtracted.
      scale: What is divided by then.

    Example:
      >>> normalised(np.full((1, 1, 1, 3), 9, np.uint8), (3, 3, 3), (2, 2, 2)).max()
      Array(3., dtype=float32)
    """
    shape = (1, 1, 1, 3)
    mean_of, scale_of = (
        jnp.array(x, jnp.float32).reshape(shape) for x in (mean, scale)
    )
    return (jnp.asarray(images).astype(jnp.float32) - mean_of) / scale_of
