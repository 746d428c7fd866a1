"""ImageNet, or other photographs in classes: ResNet-50 v1.5 and its relatives.

Behind an echo of decoded images the items are squares of ``data.resize`` pixels, so
that they can be stacked and kept on a device; crops are cut out of those. In every
other placement a crop is cut out of the whole photograph. Only the part that the crop
needs is decoded.
"""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import ImageNetModel, PhotographData
from echo_jax.data.augment import Augment, ColourDistortion, Flip, RandomResizedCrop
from echo_jax.data.images.decode import (
    DecodeLabelled,
    Encoded,
    random_resized_crop,
    resize_center_crop,
)
from echo_jax.data.images.host_augment import HostAugment, OnImage, flip
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.data.pipeline.stages import Item, Stages
from echo_jax.models.imagenet_resnet import ImageNetResNet
from echo_jax.workloads.assembly import augmentations, make_workload, open_splits
from echo_jax.workloads.base import Workload
from echo_jax.workloads.classification import ImageClassifier

# The usual mean and standard deviation of ImageNet's pixels: 0.485, 0.456, 0.406 and
# 0.229, 0.224, 0.225 of white.
_PIXEL_MEAN = (123.675, 116.28, 103.53)
_PIXEL_SCALE = (58.395, 57.12, 57.375)

_MOST_EVAL_THREADS = 16


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"accuracy"``; it also evaluates top_5."""
    data: PhotographData = config.data
    on_host, on_device = _augmentations(config)
    if not 0 < data.image_size <= data.resize:
        raise ValueError(
            f"data.image_size={data.image_size} must be at least 1 and at most "
            f"data.resize={data.resize}; set --config.data.resize={data.image_size}."
        )
    splits = open_splits(config, "images")
    task_info = {"classes": splits.info["classes"]}
    return make_workload(
        config,
        task=task_of(config, task_info),
        task_info=task_info,
        metric="accuracy",
        mode="max",
        stages=Stages(
            splits.train, DecodeLabelled(splits.decode_record, _decode(config)), on_host
        ),
        # Not kept: 50,000 images of 224 pixels are 7.5 GB.
        evaluated=Stages(
            splits.evaluation, DecodeLabelled(splits.decode_record, _middle(config))
        ),
        eval_threads=min(os.cpu_count() or 1, _MOST_EVAL_THREADS),
        augment_on_device=on_device,
        data_metadata=splits.metadata,
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
        label_smoothing=sizes.label_smoothing,
        has_top_5=True,
    )


def decode_input(config: RunSpec, encoded: Encoded) -> Item:
    """Returns the item of a photograph, as in evaluation."""
    return {"image": _middle(config)(encoded)}


def _augmentations(config: RunSpec) -> tuple[HostAugment | None, Augment | None]:
    size = config.data.image_size
    on_host = {
        "crop": OnImage(functools.partial(random_resized_crop, size=size)),
        "flip": OnImage(flip),
        "colour": OnImage(distort_colours),
    }
    on_device = {
        "crop": RandomResizedCrop(size),
        "flip": Flip(),
        "colour": ColourDistortion(),
    }
    return augmentations(config.data.augment, on_host, on_device)


def _decode(config: RunSpec) -> Callable[[Encoded], Any]:
    """Returns the function that makes an item's image, before random augmentation."""
    if "crop" not in config.data.augment:
        return _middle(config)
    if config.echo.stage != "decode":
        return _keep_encoded
    size = config.data.resize
    return functools.partial(resize_center_crop, size=size, resize=size)


def _middle(config: RunSpec) -> functools.partial:
    return functools.partial(
        resize_center_crop, size=config.data.image_size, resize=config.data.resize
    )


def _keep_encoded(encoded: Encoded) -> Encoded:
    return encoded
