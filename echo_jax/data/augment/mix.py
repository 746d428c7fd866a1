"""Augmentations that hide a part of an image, or mix two images."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import betaincinv

from echo_jax.data.augment.stage import Batch, cast_pixels, uniforms

_QUANTILES = 4096


@dataclass(frozen=True)
class Cutout:
    """Hides a square of each image (DeVries and Taylor 2017).

    Its centre may be any pixel, so a part of the square may be outside. Boxes do not
    change.

    Attributes:
      size: Height and width of the square, in pixels.
      fill: The grey level of the square. The paper uses 0 after normalisation, which
        is a medium grey before it.
    """

    size: int
    fill: int = 128

    def corners(self, keys: jax.Array, height: int, width: int) -> jax.Array:
        """Returns top and left of the squares, ``int32[B, 2]``, negative if outside.

        Args:
          keys: ``key[B]``.
          height: Height of the images, in pixels.
          width: Width of the images, in pixels.
        """
        center = jnp.floor(uniforms(keys, 2) * jnp.float32([[height, width]]))
        return center.astype(jnp.int32) - self.size // 2

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns the batch with hidden squares, of the same shape and type."""
        image = batch["image"]
        count, height, width, channels = image.shape
        top, left = jnp.split(self.corners(keys, height, width), 2, axis=1)
        row = jnp.arange(height)[None]
        # Put the channels of a row's pixels side by side, because that vectorises.
        column = jnp.arange(width * channels)[None] // channels
        is_row = (row >= top) & (row < top + self.size)
        is_column = (column >= left) & (column < left + self.size)
        fill = jnp.asarray(self.fill, image.dtype)
        hidden = jnp.where(
            is_row[:, :, None] & is_column[:, None, :],
            fill,
            image.reshape(count, height, width * channels),
        )
        return {**batch, "image": hidden.reshape(image.shape)}


@dataclass(frozen=True)
class Mixup:
    """Mixes each image and its label with its neighbour in the batch.

    Zhang et al. 2018: ``x = c x_i + (1 - c) x_j``, c from Beta(alpha, alpha), and the
    same for one-hot labels. Examples 2k and 2k + 1 are partners, and each draws its own
    coefficient. Batches are shuffled, so this pairing is a random one. It stays on one
    device if devices hold even numbers of examples. Mixup is the only stage in which an
    example depends on another one.

    Attributes:
      num_classes: Number of labels.
      alpha: Above 0; the paper used 0.2 for ImageNet, 1 for CIFAR-10.
    """

    num_classes: int
    alpha: float = 0.2

    def coefficients(self, keys: jax.Array) -> jax.Array:
        """Returns each example's own share of the mixture, ``float32[B]``.

        The shares come from a table of quantiles, whose distribution function is
        accurate within 1 / 4096. `jax.random.beta` rejects in a loop that ends for the
        whole batch at once, so all devices would wait for each other.
        """
        levels = np.linspace(0, 1, _QUANTILES + 1)
        table = jnp.asarray(betaincinv(self.alpha, self.alpha, levels), jnp.float32)
        place = uniforms(keys, 1)[:, 0] * _QUANTILES
        below = jnp.floor(place).astype(jnp.int32)
        return table[below] + (place - jnp.float32(below)) * jnp.diff(table)[below]

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns the batch with mixed images, of the same shape and type.

        ``"label"`` becomes ``float32[B, num_classes]``.

        Raises:
          ValueError: The batch has an odd size, or boxes.
        """
        image = batch["image"]
        if image.shape[0] % 2:
            raise ValueError(
                f"a batch of {image.shape[0]} has an example without a partner; "
                "mix batches of even size, and leave a last, odd one out "
                "(drop_remainder=True)."
            )
        if "boxes" in batch:
            raise ValueError("boxes cannot be mixed; leave Mixup out for detection.")
        share = self.coefficients(keys)
        labels = jax.nn.one_hot(batch["label"], self.num_classes, dtype=jnp.float32)
        mixed = _mixed(image.astype(jnp.float32), share[:, None, None, None])
        return {
            **batch,
            "image": cast_pixels(mixed, image.dtype),
            "label": _mixed(labels, share[:, None]),
        }


def _mixed(values: jax.Array, share: jax.Array) -> jax.Array:
    pairs = values.reshape(-1, 2, *values.shape[1:])
    partner = pairs[:, ::-1].reshape(values.shape)
    return share * values + (1 - share) * partner
