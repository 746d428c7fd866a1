"""The tasks and the data of images that several workloads share."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from echo_jax.config.run import RunSpec
from echo_jax.data.images.decode import DecodeLabelled, Encoded, resize_center_crop
from echo_jax.data.pipeline.stages import Item, Stages
from echo_jax.workloads.assembly import augmentations, make_workload, open_splits
from echo_jax.workloads.base import Batch, ModelTask, Sums, Variables, Workload, masked

_TOP = 5
_cross_entropy = optax.softmax_cross_entropy_with_integer_labels

Channels = tuple[float, float, float]
"""A number for each of red, green and blue, of 0 to 255."""


@dataclass(frozen=True)
class ImageTask(ModelTask):
    """A task of square images, whose model maps ``float32[B, S, S, 3]`` and ``train``.

    A batch holds ``"image"``, ``uint8[B, S, S, 3]``. Pixels are transferred as bytes
    and become floats on the device.

    Attributes:
      image_size: S, in pixels.
      pixel_mean, pixel_scale: The normalisation of each channel, from 0 to 255.
    """

    image_size: int
    pixel_mean: Channels
    pixel_scale: Channels

    def input_shapes(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (batch_size, self.image_size, self.image_size, 3)
        return {"image": jax.ShapeDtypeStruct(shape, jnp.uint8)}

    def _outputs(self, variables: Variables, batch: Batch, **options: Any) -> Any:
        """Returns what the model gives for the normalised images."""
        mean, scale = (
            jnp.array(x, jnp.float32).reshape(1, 1, 1, 3)
            for x in (self.pixel_mean, self.pixel_scale)
        )
        pixels = (jnp.asarray(batch["image"]).astype(jnp.float32) - mean) / scale
        return self.model.apply(variables, pixels, **{"train": False, **options})

    def _trained(self, variables: Variables, batch: Batch) -> tuple[Any, Variables]:
        """Returns the outputs in training, and the new batch statistics."""
        # A model without statistics has no such collection.
        names = [name for name in variables if name != "params"]
        outputs, new = self._outputs(variables, batch, train=True, mutable=names)
        return outputs, dict(new)


@dataclass(frozen=True)
class ImageClassifier(ImageTask):
    """Predicts the class of an image: ``"label"`` in a batch, ``int32[B]``.

    Attributes:
      label_smoothing: Training target spread over all classes (Szegedy et al. 2016).
      has_top_5: Whether ``"top_5"`` accuracy is evaluated.
      resize: The shorter side, in pixels, of a picture before its middle is cut out.
        0: `image_size`.
    """

    label_smoothing: float = 0.0
    has_top_5: bool = False
    resize: int = 0

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables, Sums]:
        """Returns every image's cross-entropy, new batch statistics, and accuracy."""
        del key  # Nothing in the model is random.
        logits, new = self._trained(variables, batch)
        labels = jnp.asarray(batch["label"])
        losses = _cross_entropy(logits, labels)
        right = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
        if self.label_smoothing:
            # The cross-entropy with the uniform distribution.
            even = -jax.nn.log_softmax(logits).mean(axis=-1)
            losses += self.label_smoothing * (even - losses)
        return losses, new, {"accuracy": (right.sum(), right.size)}

    def evaluate(self, variables: Variables, batch: Batch) -> Sums:
        """Returns sums and counts of accuracy, unsmoothed loss and ``"top_5"``."""
        logits = self._outputs(variables, batch)
        labels = jnp.asarray(batch["label"])
        values = {
            "accuracy": (logits.argmax(axis=-1) == labels).astype(jnp.float32),
            "loss": _cross_entropy(logits, labels),
        }
        if self.has_top_5:
            _, best = jax.lax.top_k(logits, min(_TOP, logits.shape[-1]))
            is_among = (best == labels[:, None]).any(axis=-1)
            values["top_5"] = is_among.astype(jnp.float32)
        return {name: masked(value, batch) for name, value in values.items()}

    def predict(self, variables: Variables, batch: Batch) -> dict[str, jax.Array]:
        """Returns the probability of each class, ``"probabilities"``, float32[B, K]."""
        return {"probabilities": jax.nn.softmax(self._outputs(variables, batch))}

    def decode_input(self, encoded: Encoded) -> Item:
        """Returns the item of an image of any size: its resized middle."""
        size = self.image_size
        image = resize_center_crop(encoded, size, resize=self.resize or size)
        return {"image": image}


def make_classifier(
    config: RunSpec,
    task_of: Callable[[RunSpec, Mapping[str, Any]], ImageClassifier],
    *,
    augment: Mapping[str, tuple[Any, Any]],
    decode: Callable[[Encoded], Any],
    decode_evaluated: Callable[[Encoded], Any],
    **options: Any,
) -> Workload:
    """Builds a workload of images in classes; its metric is ``"accuracy"``."""
    on_host, on_device = augmentations(config, augment)
    splits = open_splits(config, "images")
    labelled = functools.partial(DecodeLabelled, splits.decode_record)
    return make_workload(
        config,
        task_of,
        {"classes": splits.evaluation_source.info["classes"]},
        metric="accuracy",
        mode="max",
        stages=Stages(splits.train, labelled(decode), on_host),
        evaluated=Stages(splits.evaluation, labelled(decode_evaluated)),
        augment_on_device=on_device,
        data_metadata=splits.metadata,
        **options,
    )
