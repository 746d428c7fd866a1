"""The task that the image classification workloads share."""

from dataclasses import dataclass
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from echo_jax.workloads.base import Batch, Sums, Task, Variables
from echo_jax.workloads.module_table import module_table
from echo_jax.workloads.pixels import Channels, normalised

__all__ = ["ImageClassifier", "check_smoothing"]

_TOP = 5


@dataclass(frozen=True)
class ImageClassifier(Task):
    """Predicts the class of an image.

    A batch holds ``"image"``, ``uint8[B, H, W, 3]``, and ``"label"``, ``int32[B]``.
    Pixels are transferred as bytes and become floats on the device.

    Attributes:
      model: Maps ``float32[B, H, W, 3]`` and ``train`` to logits.
      pixel_mean, pixel_scale: The normalisation of each channel, from 0 to 255.
      label_smoothing: Training target spread over all classes (Szegedy et al. 2016).
      has_top_5: Whether ``"top_5"`` accuracy is evaluated.
    """

    model: nn.Module
    image_size: int
    pixel_mean: Channels
    pixel_scale: Channels
    label_smoothing: float = 0.0
    has_top_5: bool = False

    def init(self, key: jax.Array) -> Variables:
        images = jnp.zeros((1, self.image_size, self.image_size, 3), jnp.float32)
        return dict(self.model.init(key, images, train=False))

    def table(self) -> str:
        shape = (1, self.image_size, self.image_size, 3)
        return module_table(self.model, np.zeros(shape, np.float32))

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
        images = self._pixels(batch)
        logits = cast(jax.Array, self.model.apply(variables, images, train=False))
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
        images = self._pixels(batch)
        logits = cast(jax.Array, self.model.apply(variables, images, train=False))
        return {"probabilities": jax.nn.softmax(logits)}

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (batch_size, self.image_size, self.image_size, 3)
        return {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}

    def _pixels(self, batch: Batch) -> jax.Array:
        return normalised(batch["image"], self.pixel_mean, self.pixel_scale)


def _cross_entropy(logits: jax.Array, labels: ArrayLike) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))


def check_smoothing(label_smoothing: float) -> None:
    """Refuses a ``model.label_smoothing`` that leaves nothing of the label."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"model.label_smoothing={label_smoothing} must be at least 0 and below 1; "
            "set --config.model.label_smoothing=0.0."
        )
