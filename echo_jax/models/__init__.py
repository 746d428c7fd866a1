"""Flax Linen modules, which depend on neither data nor training."""

from echo_jax.lazy import door
from echo_jax.models.batch_norm import GhostBatchNorm
from echo_jax.models.imagenet_resnet import ImageNetResNet
from echo_jax.models.mobilenet import MobileNetV3
from echo_jax.models.resnet import ResNet
from echo_jax.models.ssd import SSD
from echo_jax.models.transformer import Transformer

__all__ = [
    "SSD",
    "GhostBatchNorm",
    "ImageNetResNet",
    "MobileNetV3",
    "ResNet",
    "Transformer",
]

__getattr__ = door(
    __name__,
    {
        "batch_norm": ["statistics_axes", "statistics_over"],
        "resnet": ["normalise"],
        "ssd": ["map_sizes"],
    },
)
