"""Converts pixels from bytes to the floats of a network, on the device."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

__all__ = ["Channels", "normalised"]

Channels = tuple[float, float, float]
"""A number for each of red, green and blue, of 0 to 255."""


def normalised(images: ArrayLike, mean: Channels, scale: Channels) -> jax.Array:
    """Returns ``(images - mean) / scale`` by channel, float32[B, H, W, 3]."""
    shape = (1, 1, 1, 3)
    mean_of, scale_of = (
        jnp.array(x, jnp.float32).reshape(shape) for x in (mean, scale)
    )
    return (jnp.asarray(images).astype(jnp.float32) - mean_of) / scale_of
