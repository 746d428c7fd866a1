"""What the image classification workloads share: the task."""

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
    Pixels travel as bytes and become floats where the model runs.

    Attributes:
      model: The network: called with ``float32[B, H, W, 3]`` and ``train``, it returns
        logits.
      image_size: H and W, in pixels.
      pixel_mean: Subtracted from each channel, of 0 to 255.
      pixel_scale: What each channel is divided by then.
      label_smoothing: How much of the target is spread evenly over all classes, in
        training (Szegedy et al. 2016, section 7).
      has_top_5: Whether "top_5" is evaluated: how often the class is among the five
        of the largest logits.

    Example:
      >>> model = ResNet(num_classes=8, depth=8, width=8)
      >>> task = ImageClassifier(model, 32, (127.5,) * 3, (73.6,) * 3)
      >>> sorted(jax.eval_shape(task.init, jax.random.key(0)))
      ['batch_stats', 'params']
    """

    model: nn.Module
    image_size: int
    pixel_mean: Channels
    pixel_scale: Channels
    label_smoothing: float = 0.0
    has_top_5: bool = False

    def init(self, key: jax.Array) -> Variables:
        """Returns freshly initialised variables."""
        images = jnp.zeros((1, self.image_size, self.image_size, 3), jnp.float32)
        return dict(self.model.init(key, images, train=False))

    def table(self) -> str:
        """Returns Flax's table of the modules."""
        shape = (1, self.image_size, self.image_size, 3)
        return module_table(self.model, np.zeros(shape, np.float32))

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns the cross-entropy of every image, and the new batch statistics.

        The metric is ``"accuracy"``, of the images as they were augmented.
        """
        del key  # Nothing in the model is random.
        # Not all of `variables`: a model without statistics has no such entry.
        collections = [name for name in variables if name != "params"]
        logits, updated = self.model.apply(
            variables, self._pixels(batch), train=True, mutable=collections
        )
        losses = _cross_entropy(logits, batch["label"])
        right = (logits.argmax(axis=-1) == batch["label"]).astype(jnp.float32)
        if self.label_smoothing:
            # The cross-entropy with all classes, evenly.
            even = -jax.nn.log_softmax(logits).mean(axis=-1)
            losses += self.label_smoothing * (even - losses)
        return losses, dict(updated), {"accuracy": (right.sum(), right.size)}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns every metric as (sum over the images with mask 1, images).

        They are ``"accuracy"``, ``"loss"``, which is not smoothed, and ``"top_5"``.
        """
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
        """Returns how likely each class is, ``"probabilities"``, ``float32[B, K]``."""
        images = self._pixels(batch)
        logits = cast(jax.Array, self.model.apply(variables, images, train=False))
        return {"probabilities": jax.nn.softmax(logits)}

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape of ``"image"``, ``uint8[B, S, S, 3]``."""
        shape = (batch_size, self.image_size, self.image_size, 3)
        return {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}

    def _pixels(self, batch: Batch) -> jax.Array:
        return normalised(batch["image"], self.pixel_mean, self.pixel_scale)


def _cross_entropy(logits: jax.Array, labels: ArrayLike) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))


def check_smoothing(label_smoothing: float) -> None:
    """Refuses a ``model.label_smoothing`` that leaves nothing of the label.

    Raises:
      ValueError: It is below 0, or not below 1.
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"model.label_smoothing={label_smoothing} must be at least 0 and below 1; "
            "set --config.model.label_smoothing=0.0."
        )
