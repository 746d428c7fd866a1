"""Augmentation that changes colours."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.data.augment.stage import Batch, cast_pixels, uniforms


class ColourFactors(NamedTuple):
    """The colour changes of a batch, each ``float32[B]``.

    Attributes:
      brightness: Added to each pixel, in grey levels of 255.
      contrast: Factor of the distance to the image's mean, channel by channel.
      saturation: Factor of the saturation.
      hue: Added to the hue, in turns.
    """

    brightness: jax.Array
    contrast: jax.Array
    saturation: jax.Array
    hue: jax.Array


@dataclass(frozen=True)
class ColourDistortion:
    """Changes brightness, contrast, saturation and hue, in this order.

    The default strengths and the arithmetic come from Inception's preprocessing
    (Howard 2013; TensorFlow's ``distort_color``). Brightness is added. Contrast is
    about the mean of each channel. Saturation and hue are as in HSV. Unlike there,
    the order is fixed, and pixels are clipped to 0..255 before saturation, so that
    saturation is defined.

    Attributes:
      brightness: Largest shift, as a fraction of white.
      contrast: The factor is uniform in 1 - contrast to 1 + contrast.
      saturation: The factor is uniform in 1 - saturation to 1 + saturation.
      hue: Largest shift, in turns.
    """

    brightness: float = 32 / 255
    contrast: float = 0.5
    saturation: float = 0.5
    hue: float = 0.2

    def factors(self, keys: jax.Array) -> ColourFactors:
        """Returns the random changes for `keys`, ``key[B]``."""
        brightness, contrast, saturation, hue = (2 * uniforms(keys, 4) - 1).T
        return ColourFactors(
            brightness=255 * self.brightness * brightness,
            contrast=1 + self.contrast * contrast,
            saturation=1 + self.saturation * saturation,
            hue=self.hue * hue,
        )

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns the batch with other colours, of the same shape and type.

        Raises:
          ValueError: The images do not have 3 channels.
        """
        image = batch["image"]
        if image.shape[-1] != 3:
            raise ValueError(
                f"images of {image.shape[-1]} channels have no hue; give red, green "
                "and blue."
            )
        factors = ColourFactors(*(x[:, None, None] for x in self.factors(keys)))
        # Sums of bytes are exact, so the mean does not depend on the order of addition.
        exact = jnp.int32 if image.dtype == jnp.uint8 else jnp.float32
        total = image.sum(axis=(1, 2), keepdims=True, dtype=exact).astype(jnp.float32)
        means = total / (image.shape[1] * image.shape[2])
        # Compute channel by channel, in whole planes. On the CPU this is five times as
        # fast as arithmetic along an axis of three.
        planes = []
        for channel in range(3):
            mean = means[..., channel]
            contrast = (jnp.float32(image[..., channel]) - mean) * factors.contrast
            planes.append(jnp.clip(contrast + mean + factors.brightness, 0, 255))
        planes = _change_hsv(planes, factors.saturation, factors.hue)
        planes = [cast_pixels(plane, image.dtype) for plane in planes]
        return {**batch, "image": jnp.stack(planes, axis=-1)}


# The textbook conversion to HSV and back (Smith 1978), without branches.
def _change_hsv(
    planes: list[jax.Array], factor: jax.Array, turn: jax.Array
) -> list[jax.Array]:
    """Multiplies the saturation (at most to 1), and turns the hue."""
    red, green, blue = planes
    value = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = value - jnp.minimum(jnp.minimum(red, green), blue)
    scale = 1 / jnp.where(chroma == 0, 1, chroma)  # grey has any hue
    # Do not test equality with the value: compilers may round a sum that is used twice
    # in two ways. Near a tie, both sides of these comparisons give the same hue.
    sextant = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) * scale,
        jnp.where(green >= blue, 2 + (blue - red) * scale, 4 + (red - green) * scale),
    )
    sextant += 6 * turn
    chroma = jnp.minimum(factor * chroma, value)

    def channel(start: int) -> jax.Array:
        """Returns a channel; it falls below the value by a trapezium of the hue."""
        phase = sextant + start
        phase -= 6 * jnp.floor(phase / 6)
        return value - chroma * jnp.clip(jnp.minimum(phase, 4 - phase), 0, 1)

    return [channel(5), channel(3), channel(1)]
