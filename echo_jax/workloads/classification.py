"""The tasks of images that several workloads share."""

from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from echo_jax.workloads.base import Batch, ModelTask, Sums, Variables

_TOP = 5

Channels = tuple[float, float, float]
"""A number for each of red, green and blue, of 0 to 255."""


def normalised(images: ArrayLike, mean: Channels, scale: Channels) -> jax.Array:
    """Returns ``(images - mean) / scale`` by channel, float32[B, H, W, 3]."""
    mean_of, scale_of = (
        jnp.array(x, jnp.float32).reshape(1, 1, 1, 3) for x in (mean, scale)
    )
    return (jnp.asarray(images).astype(jnp.float32) - mean_of) / scale_of


@dataclass(frozen=True)
class ImageTask(ModelTask):
    """A task of square images, whose model maps ``float32[B, S, S, 3]`` and ``train``.

    A batch holds ``"image"``, ``uint8[B, S, S, 3]``. Pixels are transferred as bytes
    and become floats on the device.
    """

    image_size: int

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (batch_size, self.image_size, self.image_size, 3)
        return {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}


@dataclass(frozen=True)
class ImageClassifier(ImageTask):
    """Predicts the class of an image: ``"label"`` in a batch, ``int32[B]``.

    Attributes:
      pixel_mean, pixel_scale: The normalisation of each channel, from 0 to 255.
      label_smoothing: Training target spread over all classes (Szegedy et al. 2016).
      has_top_5: Whether ``"top_5"`` accuracy is evaluated.
    """

    pixel_mean: Channels
    pixel_scale: Channels
    label_smoothing: float = 0.0
    has_top_5: bool = False

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns every image's cross-entropy, new batch statistics, and accuracy."""
        del key  # Nothing in the model is random.
        # A model without statistics has no such collection.
        collections = [name for name in variables if name != "params"]
        logits, updated = self.model.apply(
            variables, self._pixels(batch), train=True, mutable=collections
        )
        losses = _cross_entropy(logits, batch["label"])
        right = (logits.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
        if self.label_smoothing:
            # The cross-entropy with the uniform distribution.
            even = -jax.nn.log_softmax(logits).mean(axis=-1)
            losses += self.label_smoothing * (even - losses)
        return losses, dict(updated), {"accuracy": (right.sum(), right.size)}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns sums and counts of accuracy, unsmoothed loss and ``"top_5"``."""
        logits = self._logits(variables, batch)
        labels, mask = jnp.asarray(batch["label"]), batch["mask"]
        values = {
            "accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32),
            "loss": _cross_entropy(logits, labels),
        }
        if self.has_top_5:
            _, best = jax.lax.top_k(logits, min(_TOP, logits.shape[-1]))
            is_among = (best == labels[:, None]).any(axis=-1)
            values["top_5"] = is_among.astype(jnp.float32)
        count = mask.sum()
        return {name: ((value * mask).sum(), count) for name, value in values.items()}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns the probability of each class, ``"probabilities"``, float32[B, K]."""
        return {"probabilities": jax.nn.softmax(self._logits(variables, batch))}

    def _logits(self, variables: Variables, batch: Batch) -> jax.Array:
        logits = self.model.apply(variables, self._pixels(batch), train=False)
        return cast(jax.Array, logits)

    def _pixels(self, batch: Batch) -> jax.Array:
        return normalised(batch["image"], self.pixel_mean, self.pixel_scale)


def _cross_entropy(logits: jax.Array, labels: ArrayLike) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))
