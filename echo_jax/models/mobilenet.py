"""MobileNetV3 (Howard et al. 2019), for photographs and for small images."""

from functools import partial
from typing import Literal, NamedTuple, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from echo_jax.models.imagenet_resnet import conv
from echo_jax.models.resnet import Norm, normalise

MobileNetSize = Literal["small", "large"]


class _Block(NamedTuple):
    kernel: int
    expanded: int
    channels: int
    squeezes: bool
    hard_swish: bool
    stride: int


# Rows of tables 1 and 2 of the paper.
_BLOCKS = {
    "large": (
        _Block(3, 16, 16, False, False, 1),
        _Block(3, 64, 24, False, False, 2),
        _Block(3, 72, 24, False, False, 1),
        _Block(5, 72, 40, True, False, 2),
        _Block(5, 120, 40, True, False, 1),
        _Block(5, 120, 40, True, False, 1),
        _Block(3, 240, 80, False, True, 2),
        _Block(3, 200, 80, False, True, 1),
        _Block(3, 184, 80, False, True, 1),
        _Block(3, 184, 80, False, True, 1),
        _Block(3, 480, 112, True, True, 1),
        _Block(3, 672, 112, True, True, 1),
        _Block(5, 672, 160, True, True, 2),
        _Block(5, 960, 160, True, True, 1),
        _Block(5, 960, 160, True, True, 1),
    ),
    "small": (
        _Block(3, 16, 16, True, False, 2),
        _Block(3, 72, 24, False, False, 2),
        _Block(3, 88, 24, False, False, 1),
        _Block(5, 96, 40, True, True, 2),
        _Block(5, 240, 40, True, True, 1),
        _Block(5, 240, 40, True, True, 1),
        _Block(5, 120, 48, True, True, 1),
        _Block(5, 144, 48, True, True, 1),
        _Block(5, 288, 96, True, True, 2),
        _Block(5, 576, 96, True, True, 1),
        _Block(5, 576, 96, True, True, 1),
    ),
}
_STEM = 16
_HEAD = {"large": (960, 1280), "small": (576, 1024)}


class MobileNetV3(nn.Module):
    """Inverted residual blocks with depthwise convolutions, some squeezed and excited.

    With 1000 classes the large size has 5.48 million parameters and the small size 2.54
    million. The paper's dropout before the logits and its width multiplier are missing.

    Attributes:
      num_classes: Number of logits.
      size: ``"small"`` or ``"large"``.
      small_images: Whether the first two layers that halve the resolution keep it, so
        that an image of 32x32 has 4x4 pixels at the end instead of 1x1.
      norm: See `echo_jax.models.resnet.ResNet`.
      dtype: The type of the computation; parameters, statistics and logits are float32.

    Example:
      >>> model = MobileNetV3(num_classes=100, size="small", small_images=True)
      >>> images = jnp.zeros((8, 32, 32, 3))
      >>> variables = model.init(jax.random.key(0), images, train=False)
      >>> model.apply(variables, images, train=False).shape
      (8, 100)
    """

    num_classes: int
    size: MobileNetSize = "large"
    small_images: bool = False
    norm: Norm = "batch"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Classifies images.

        Args:
          images: ``float32[B, H, W, C]``, normalised.
          train: Whether to use the batch's own statistics and to update the
            running ones (pass ``mutable=["batch_stats"]``).

        Returns:
          Logits, ``float32[B, num_classes]``.

        Raises:
          ValueError: `size` is unknown.
        """
        if self.size not in get_args(MobileNetSize):
            raise ValueError(f"size={self.size!r} is unknown; use 'small' or 'large'")
        kept = 2 if self.small_images else 0  # strides that are left out

        def stride(wanted: int) -> int:
            nonlocal kept
            leaves_out = wanted > 1 and kept > 0
            kept -= leaves_out
            return 1 if leaves_out else wanted

        layer = partial(_ConvNorm, norm=self.norm, dtype=self.dtype)
        x = layer(_STEM, 3, stride(2), name="stem")(images, train=train)
        x = nn.hard_swish(x)
        for number, block in enumerate(_BLOCKS[self.size]):
            x = _InvertedResidual(
                block._replace(stride=stride(block.stride)),
                self.norm,
                self.dtype,
                name=f"block_{number}",
            )(x, train=train)
        widths = _HEAD[self.size]
        x = nn.hard_swish(layer(widths[0], 1, name="last")(x, train=train))
        # The loss is a difference of large numbers: bfloat16 would round it.
        x = x.astype(jnp.float32).mean(axis=(1, 2))
        x = nn.hard_swish(nn.Dense(widths[1], dtype=jnp.float32, name="hidden")(x))
        return nn.Dense(self.num_classes, dtype=jnp.float32, name="head")(x)


class _InvertedResidual(nn.Module):
    """Expands, convolves each channel, and projects; section 5.3 of the paper."""

    block: _Block
    norm: Norm
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        kernel, expanded, channels, squeezes, hard_swish, stride = self.block
        active = nn.hard_swish if hard_swish else nn.relu
        layer = partial(_ConvNorm, norm=self.norm, dtype=self.dtype)
        y = x
        if expanded != x.shape[-1]:
            y = active(layer(expanded, 1, name="expand")(y, train=train))
        depthwise = layer(expanded, kernel, stride, groups=expanded, name="depthwise")
        y = active(depthwise(y, train=train))
        if squeezes:
            y *= _Excitation(self.dtype, name="excitation")(y)
        y = layer(channels, 1, name="project")(y, train=train)
        return x + y if x.shape == y.shape else y


class _Excitation(nn.Module):
    """Scales every channel by a factor that depends on the means of all channels."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        channels = x.shape[-1]
        dense = partial(nn.Dense, dtype=self.dtype)
        means = x.mean(axis=(1, 2), keepdims=True)
        squeezed = nn.relu(dense(_divisible_by_8(channels // 4), name="squeeze")(means))
        return nn.hard_sigmoid(dense(channels, name="excite")(squeezed))


class _ConvNorm(nn.Module):
    channels: int
    kernel: int
    stride: int = 1
    groups: int = 1
    norm: Norm = "batch"
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        sizes = self.channels, self.kernel, self.stride, self.dtype
        x = conv(*sizes, groups=self.groups, name="conv")(x)
        return normalise(x, self.norm, self.dtype, train=train, name="norm")


def _divisible_by_8(channels: int) -> int:
    """Rounds to a multiple of 8 that is at least 90 % of `channels`."""
    rounded = max(8, (channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8
