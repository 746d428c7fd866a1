"""Residual networks for small images (He et al. 2016, section 4.2)."""

from functools import partial
from typing import Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from echo_jax.models.batch_norm import momentum_or_none, statistics_axes

Norm = Literal["batch", "group"]

_GROUP_CHANNELS = 8


class ResNet(nn.Module):
    """The 6n+2 layer ResNet of the CIFAR-10 experiments.

    Three stages of n blocks with two 3x3 convolutions each, at 1, 1/2 and 1/4 of
    the resolution and 1, 2 and 4 times the width. Shortcuts have no parameters
    (the paper's option A): where the shape changes they skip every other pixel and
    pad the channels with zeros. With ``depth=20, width=16`` and 10 classes it has
    the paper's 0.27 million parameters. Unlike the ImageNet ResNet, it has neither
    bottlenecks nor a 7x7 stem.

    Attributes:
      num_classes: Number of logits.
      depth: Number of weighted layers, 6n + 2: 8, 14, 20, 32, 44, 56, 110.
      width: Channels of the first stage.
      norm: ``"batch"`` normalises over the whole batch, across devices, and keeps
        running statistics in ``"batch_stats"``. ``"group"`` normalises groups of 8
        channels of one example. It has no state and does not couple the examples of
        a batch, in which an echo may put one example twice.
      dtype: The type of the computation; parameters, statistics and logits are float32.

    Example:
      >>> model = ResNet(num_classes=10, depth=20)
      >>> images = jnp.zeros((8, 32, 32, 3))
      >>> variables = model.init(jax.random.key(0), images, train=False)
      >>> model.apply(variables, images, train=False).shape
      (8, 10)
    """

    num_classes: int
    depth: int = 20
    width: int = 16
    norm: Norm = "batch"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Classifies images.

        Args:
          images: ``float32[B, H, W, C]``, normalised; H and W multiples of 4.
          train: Whether to use the batch's own statistics and to update the
            running ones (pass ``mutable=["batch_stats"]``).

        Returns:
          Logits, ``float32[B, num_classes]``.

        Raises:
          ValueError: The depth is not 6n + 2, the norm is unknown, or groups do
            not divide the width.
        """
        self._check()
        x = _conv(self.width, self.dtype, name="stem")(images)
        normed = partial(normalise, norm=self.norm, dtype=self.dtype, train=train)
        x = nn.relu(normed(x, name="stem_norm"))
        for stage in range(3):
            for block in range((self.depth - 2) // 6):
                x = _Block(
                    channels=self.width * 2**stage,
                    stride=2 if stage > 0 and block == 0 else 1,
                    norm=self.norm,
                    dtype=self.dtype,
                    name=f"stage_{stage}_block_{block}",
                )(x, train=train)
        x = x.mean(axis=(1, 2))
        return nn.Dense(self.num_classes, dtype=jnp.float32, name="head")(x)

    def _check(self) -> None:
        if self.depth < 8 or (self.depth - 2) % 6:
            raise ValueError(
                f"depth={self.depth} is not 6n + 2; use one of 8, 14, 20, 32, 56, 110"
            )
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm={self.norm!r} is unknown; use 'batch' or 'group'")
        if self.norm == "group" and self.width % _GROUP_CHANNELS:
            raise ValueError(
                f"width={self.width} is not a multiple of {_GROUP_CHANNELS}, the "
                "channels of a group; change it or use norm='batch'"
            )


class _Block(nn.Module):
    channels: int
    stride: int
    norm: Norm
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        normed = partial(normalise, norm=self.norm, dtype=self.dtype, train=train)
        y = _conv(self.channels, self.dtype, self.stride, name="conv_0")(x)
        y = nn.relu(normed(y, name="norm_0"))
        y = _conv(self.channels, self.dtype, name="conv_1")(y)
        y = normed(y, name="norm_1")
        if x.shape != y.shape:
            extra = self.channels - x.shape[-1]
            x = jnp.pad(
                x[:, :: self.stride, :: self.stride],
                ((0, 0), (0, 0), (0, 0), (extra // 2, extra - extra // 2)),
            )
        return nn.relu(x + y)


def _conv(channels: int, dtype: jnp.dtype, stride: int = 1, *, name: str) -> nn.Conv:
    return nn.Conv(
        channels,
        (3, 3),
        (stride, stride),
        use_bias=False,
        dtype=dtype,
        kernel_init=nn.initializers.he_normal(),
        name=name,
    )


def normalise(
    x: jax.Array, norm: Norm, dtype: jnp.dtype, *, train: bool, name: str
) -> jax.Array:
    """Normalises the output of a convolution."""
    with jax.numpy_dtype_promotion("standard"):  # Flax needs it in bfloat16.
        if norm == "group":
            return nn.GroupNorm(
                num_groups=None, group_size=_GROUP_CHANNELS, dtype=dtype, name=name
            )(x)
        return nn.BatchNorm(
            use_running_average=not train,
            momentum=momentum_or_none(0.9),
            dtype=dtype,
            axis_name=statistics_axes(),
            name=name,
        )(x)
