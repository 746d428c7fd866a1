"""Classification of synthetic images: a small ResNet on drawn shapes."""

import functools
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from echo_jax.data.evaluation import eval_batches
from echo_jax.data.pipeline import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.shapes import (
    CLASS_NAMES,
    IMAGE_SIZE,
    ShapeRecords,
    augment_shape,
    augment_shapes,
    decode_shape,
)
from echo_jax.data.stage_calls import stage_calls
from echo_jax.data.stages import Stages
from echo_jax.models.resnet import ResNet
from echo_jax.workloads.base import Batch, Task, Variables, Workload

__all__ = ["ImageClassifier", "build"]

# One data set for all runs: a run's seed shuffles and augments it, no more.
_TRAIN_SEED, _VALIDATION_SEED = 0, 1
_VALIDATION_IMAGES = 2048

# Of uniform pixels, 0 to 255: about mean 0 and variance 1 afterwards.
_PIXEL_MEAN, _PIXEL_SCALE = 127.5, 73.6


@dataclass(frozen=True)
class ImageClassifier(Task):
    """Predicts the class of an image.

    A batch holds ``"image"``, ``uint8[B, H, W, 3]``, and ``"label"``, ``int32[B]``.
    Pixels travel as bytes and become floats where the model runs.

    Attributes:
      model: The network.
      image_size: H and W, in pixels.

    Example:
      >>> task = ImageClassifier(ResNet(num_classes=8, depth=8, width=8), 32)
      >>> sorted(jax.eval_shape(task.init, jax.random.key(0)))
      ['batch_stats', 'params']
    """

    model: ResNet
    image_size: int

    def init(self, key: jax.Array) -> Variables:
        """Returns freshly initialised variables."""
        images = jnp.zeros((1, self.image_size, self.image_size, 3), jnp.float32)
        return dict(self.model.init(key, images, train=False))

    def loss(
        self, variables: Variables, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Variables]:
        """Returns the cross-entropy of every image and the new batch statistics."""
        del key  # Nothing in the model is random.
        # Not all of `variables`: a model without statistics has no such entry.
        collections = [name for name in variables if name != "params"]
        logits, updated = self.model.apply(
            variables, _normalised(batch["image"]), train=True, mutable=collections
        )
        return _cross_entropy(logits, batch["label"]), dict(updated)

    def evaluate(
        self, variables: Variables, batch: Batch
    ) -> dict[str, tuple[jax.Array, jax.Array]]:
        """Returns accuracy and loss, each as (sum over images with mask 1, images)."""
        images = _normalised(batch["image"])
        logits = cast(jax.Array, self.model.apply(variables, images, train=False))
        labels, mask = jnp.asarray(batch["label"]), batch["mask"]
        is_right = (logits.argmax(axis=-1) == labels).astype(jnp.float32)
        losses = _cross_entropy(logits, labels)
        count = mask.sum()
        return {
            "accuracy": ((is_right * mask).sum(), count),
            "loss": ((losses * mask).sum(), count),
        }


def _normalised(images: ArrayLike) -> jax.Array:
    return (jnp.asarray(images).astype(jnp.float32) - _PIXEL_MEAN) / _PIXEL_SCALE


def _cross_entropy(logits: jax.Array, labels: ArrayLike) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(labels))


def build(config: Any) -> Workload:
    """Builds the workload; draws the images, in about 0.2 ms each.

    Args:
      config: The shared fields with ``data.source="synthetic"``, the number of
        training images ``data.train_examples``, and
        ``model.{depth, width, norm, dtype}``.

    Returns:
      The workload; its metric is ``"accuracy"``, a fraction.

    Raises:
      ValueError: If ``data.source`` is anything else.
    """
    if config.data.source != "synthetic":
        raise ValueError(
            f"data.source={config.data.source!r}: workload 'shapes' draws its images; "
            "use --config.data.source=synthetic."
        )
    train = ShapeRecords(config.data.train_examples, _TRAIN_SEED)
    validation = ShapeRecords(_VALIDATION_IMAGES, _VALIDATION_SEED)
    model = ResNet(
        num_classes=len(CLASS_NAMES),
        depth=config.model.depth,
        width=config.model.width,
        norm=config.model.norm,
        dtype=jnp.dtype(config.model.dtype),
    )
    pipeline = PipelineSpec.from_config(config)
    stages = Stages(train, decode_shape, augment_shape)
    return Workload(
        name="shapes",
        task=ImageClassifier(model, IMAGE_SIZE),
        metric="accuracy",
        mode="max",
        train_dataset=functools.partial(train_dataset, stages, pipeline),
        fresh_dataset=functools.partial(fresh_batches, stages, pipeline),
        stage_calls=functools.partial(stage_calls, stages, pipeline),
        # Decoded at the first evaluation, and kept.
        eval_batches=functools.cache(
            functools.partial(
                eval_batches,
                validation,
                decode_shape,
                batch_size=config.batch_size,
                max_examples=config.data.eval_examples,
            )
        ),
        augment_on_device=augment_shapes,
        facts={
            "data": {
                "source": "synthetic: shapes drawn by echo_jax.data.shapes",
                "synthetic": True,
                "classes": list(CLASS_NAMES),
                "train": train.facts(),
                "validation": validation.facts(),
            },
            "storage": pipeline.storage.facts(),
        },
    )
