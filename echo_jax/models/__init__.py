"""Flax Linen modules. They know neither data nor training."""

from echo_jax.models.resnet import ResNet
from echo_jax.models.transformer import Transformer

__all__ = ["ResNet", "Transformer"]
