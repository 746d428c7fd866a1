"""Classification of synthetic images: a small ResNet on drawn shapes."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.sources import shapes
from echo_jax.models.resnet import ResNet
from echo_jax.workloads.assembly import make_workload
from echo_jax.workloads.base import Workload
from echo_jax.workloads.classification import ImageClassifier

# One data set for all runs: a run's seed only shuffles and augments it.
_TRAIN_SEED, _VALIDATION_SEED = 0, 1
_VALIDATION_IMAGES = 2048

# For uniform pixels from 0 to 255: about mean 0 and variance 1 afterwards.
_PIXEL_MEAN, _PIXEL_SCALE = (127.5, 127.5, 127.5), (73.6, 73.6, 73.6)


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"accuracy"``, a fraction."""
    if config.data.source != "synthetic":
        raise ValueError(
            f"data.source={config.data.source!r}: workload 'shapes' draws its images; "
            "use --config.data.source=synthetic."
        )
    train = shapes.ShapeRecords(config.data.train_examples, _TRAIN_SEED)
    validation = shapes.ShapeRecords(_VALIDATION_IMAGES, _VALIDATION_SEED)
    return make_workload(
        config,
        task_of,
        {"classes": list(shapes.CLASS_NAMES)},
        metric="accuracy",
        mode="max",
        stages=Stages(train, shapes.decode_shape, shapes.augment_shape),
        evaluated=Stages(validation, shapes.decode_shape),
        keeps_evaluated=True,
        augment_on_device=shapes.augment_shapes,
        data_metadata={
            "source": "synthetic: shapes drawn by echo_jax.data.sources.shapes",
            "synthetic": True,
            "classes": list(shapes.CLASS_NAMES),
            "train": train.metadata(),
            "validation": validation.metadata(),
        },
    )


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> ImageClassifier:
    """Returns the task of a config, for data with these ``classes``."""
    sizes, num_classes = config.model, len(task_info["classes"])
    dtype = jnp.dtype(config.precision.compute)
    model = ResNet(num_classes, sizes.depth, sizes.width, sizes.norm, dtype)
    return ImageClassifier(model, shapes.IMAGE_SIZE, _PIXEL_MEAN, _PIXEL_SCALE)
