"""CIFAR-10 and CIFAR-100: a ResNet or a MobileNetV3 on images of 32x32 pixels."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from echo_jax.config.run import RunSpec
from echo_jax.data.augment import Augment, ColourDistortion, Flip, PadCrop
from echo_jax.data.images.decode import Encoded, decode_image, pad_crop_flip
from echo_jax.data.images.host_augment import OnImage
from echo_jax.data.images.host_colour import distort_colours
from echo_jax.models.mobilenet import MobileNetV3
from echo_jax.models.resnet import ResNet
from echo_jax.workloads.base import Workload
from echo_jax.workloads.classification import ImageClassifier, make_classifier

_IMAGE_SIZE = 32
_PADDING = 4

# Mean and standard deviation of CIFAR-10's training pixels. Those of CIFAR-100 differ
# by at most 4, which has no effect on training.
_PIXEL_MEAN = (125.3, 123.0, 113.9)
_PIXEL_SCALE = (63.0, 62.1, 66.7)

# The names for `data.augment`: on the host, and on the devices.
_AUGMENT = {
    "pad_crop_flip": (
        OnImage(functools.partial(pad_crop_flip, padding=_PADDING)),
        Augment((PadCrop(_PADDING), Flip())),
    ),
    "colour": (OnImage(distort_colours), ColourDistortion()),
}


def build(config: RunSpec) -> Workload:
    """Builds the workload; its metric is ``"accuracy"``, a fraction."""
    return make_classifier(
        config,
        task_of,
        augment=_AUGMENT,
        decode=_decode_small,
        decode_evaluated=_decode_small,
        # 31 MB for 10,000 images.
        keeps_evaluated=True,
    )


def task_of(config: RunSpec, task_info: Mapping[str, Any]) -> ImageClassifier:
    """Returns the task of a config, for data with these ``classes``."""
    sizes, num_classes = config.model, len(task_info["classes"])
    dtype = jnp.dtype(config.precision.compute)
    if sizes.name == "resnet":
        model = ResNet(num_classes, sizes.depth, sizes.width, sizes.norm, dtype)
    else:
        size = sizes.name.removeprefix("mobilenet_v3_")
        model = MobileNetV3(num_classes, size, True, sizes.norm, dtype)
    return ImageClassifier(
        model, _IMAGE_SIZE, _PIXEL_MEAN, _PIXEL_SCALE, sizes.label_smoothing
    )


def _decode_small(encoded: Encoded) -> np.ndarray:
    """Returns ``uint8[32, 32, 3]`` and refuses other sizes."""
    image = decode_image(encoded)
    if image.shape != (_IMAGE_SIZE, _IMAGE_SIZE, 3):
        height, width = image.shape[:2]
        raise ValueError(
            f"it has {width}x{height} pixels, and workload 'cifar' takes "
            f"{_IMAGE_SIZE}x{_IMAGE_SIZE}; use --config imagenet for other sizes, "
            "or on CPUs imagenet:small."
        )
    return image
