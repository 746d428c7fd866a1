"""ImageNet, or other photographs in classes: ResNet-50 v1.5 and its relatives.

Behind an echo of decoded images the items are squares of ``data.resize`` pixels, so
that they can be stacked and kept on a device; crops are cut out of those. In every
other placement a crop is cut out of the whole photograph. Only the part that the crop
needs is decoded.
"""

import functools
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import ImageNetModel, PhotographData
from echo_jax.data.augment import ColourDistortion, Flip, RandomResizedCrop
from echo_jax.data.images.decode import random_resized_crop, resize_center_crop
from echo_jax.data.images.host_augment import OnImage, flip
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.models.imagenet_resnet import ImageNetResNet
from echo_jax.workloads.base import Workload
from echo_jax.workloads.classification import ImageClassifier, make_classifier

# The usual mean and standard deviation of ImageNet's pixels: 0.485, 0.456, 0.406 and
# 0.229, 0.224, 0.225 of white.
_PIXEL_MEAN = (123.675, 116.28, 103.53)
_PIXEL_SCALE = (58.395, 57.12, 57.375)


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"accuracy"``; it also evaluates top_5."""
    data: PhotographData = config.data
    size = data.image_size
    # On the host, and on the devices.
    crop = functools.partial(random_resized_crop, size=size)
    augment = {
        "crop": (OnImage(crop), RandomResizedCrop(size)),
        "flip": (OnImage(flip), Flip()),
        "colour": (OnImage(distort_colours), ColourDistortion()),
    }
    if not 0 < size <= data.resize:
        raise ValueError(
            f"data.image_size={size} must be at least 1 and at most "
            f"data.resize={data.resize}; set --config.data.resize={size}."
        )
    middle = functools.partial(resize_center_crop, size=size, resize=data.resize)
    if "crop" not in data.augment:
        decode = middle
    elif config.echo.stage == "decode":
        decode = functools.partial(middle, size=data.resize)
    else:
        decode = _keep_encoded
    return make_classifier(
        config,
        task_of,
        augment=augment,
        decode=decode,
        # Not kept: 50,000 images of 224 pixels are 7.5 GB.
        decode_evaluated=middle,
        eval_threads=min(os.cpu_count() or 1, 16),
    )


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> ImageClassifier:
    """Returns the task of a config, for data with these ``classes``."""
    sizes: ImageNetModel = config.model
    model = ImageNetResNet(
        num_classes=len(task_info["classes"]),
        stage_sizes=tuple(sizes.stage_sizes),
        block=sizes.block,
        width=sizes.width,
        virtual_batch=sizes.virtual_batch if sizes.norm == "ghost" else None,
        dtype=jnp.dtype(config.precision.compute),
    )
    return ImageClassifier(
        model,
        config.data.image_size,
        _PIXEL_MEAN,
        _PIXEL_SCALE,
        sizes.label_smoothing,
        has_top_5=True,
        resize=config.data.resize,
    )


def _keep_encoded(encoded: Any) -> Any:
    return encoded
