"""Residual networks for photographs: ResNet-50 v1.5 and its relatives.

He et al. 2016, table 1. The stride is in the 3x3 convolution of a bottleneck, not in
the 1x1 before it (v1.5, as MLPerf trains it). The scale of each block's last norm
starts at zero, so that a new block passes its input on (Goyal et al. 2017, section
5.1).
"""

from functools import partial
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp

from echo_jax.models.batch_norm import GhostBatchNorm

Block = Literal["bottleneck", "basic"]

_EXPANSION = 4


class ResNetStages(nn.Module):
    """The convolutions of a ResNet without a head, also the trunk of detectors.

    A 7x7 convolution and a 3x3 max pooling, both of stride 2, then stages of blocks.
    The first block of every stage but the first halves the resolution; channels
    double from stage to stage.

    Attributes:
      stage_sizes: Blocks in each stage: ``(3, 4, 6, 3)`` for a ResNet-50 or -34.
      block: ``"bottleneck"`` (1x1, 3x3, 1x1 with 4 times the channels; ResNet-50 and
        up) or ``"basic"`` (two 3x3; ResNet-18 and -34).
      width: Channels of the stem and of the first stage's 3x3 convolutions.
      last_stride: The stride of the last stage; 1 keeps the resolution of the stage
        before, as detectors need it.
      virtual_batch: See `GhostBatchNorm`.
      dtype: The type of the computation; parameters and statistics are float32.

    Example:
      >>> trunk = ResNetStages(stage_sizes=(1, 1))
      >>> images = jnp.zeros((8, 64, 64, 3))
      >>> init = lambda: trunk.init_with_output(jax.random.key(0), images, train=False)
      >>> features, variables = jax.eval_shape(init)
      >>> [x.shape for x in features]
      [(8, 16, 16, 256), (8, 8, 8, 512)]
    """

    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    block: Block = "bottleneck"
    width: int = 64
    last_stride: int = 2
    virtual_batch: int | None = None
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> list[jax.Array]:
        """Computes features.

        Args:
          images: ``float32[B, H, W, C]``, normalised.
          train: Whether to use the batch's own statistics and to update the running
            ones (pass ``mutable=["batch_stats"]``).

        Returns:
          The output of every stage, ``dtype[B, h, w, c]``: stage i has 1 / 2^(2 + i)
          of the height and the width, rounded up (but see `last_stride`).

        Raises:
          ValueError: A stage has no block, or `block` is unknown.
        """
        if not self.stage_sizes or min(self.stage_sizes) < 1:
            raise ValueError(
                f"stage_sizes={self.stage_sizes}: every stage needs a block; use "
                "(3, 4, 6, 3)"
            )
        if self.block not in get_args(Block):
            raise ValueError(
                f"block={self.block!r} is unknown; use 'bottleneck' or 'basic'"
            )
        norm = partial(
            GhostBatchNorm, virtual_batch=self.virtual_batch, dtype=self.dtype
        )
        x = conv(self.width, 7, 2, self.dtype, name="stem")(images)
        x = nn.relu(norm(name="stem_norm")(x, train=train))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        features = []
        last = len(self.stage_sizes) - 1
        for stage, num_blocks in enumerate(self.stage_sizes):
            stride = 1 if stage == 0 else self.last_stride if stage == last else 2
            for block in range(num_blocks):
                x = _ResidualBlock(
                    block=self.block,
                    channels=self.width * 2**stage,
                    stride=stride if block == 0 else 1,
                    virtual_batch=self.virtual_batch,
                    dtype=self.dtype,
                    name=f"stage_{stage}_block_{block}",
                )(x, train=train)
            features.append(x)
        return features


class ImageNetResNet(nn.Module):
    """A ResNet classifier; the default is ResNet-50 v1.5 of 25.56 million parameters.

    Attributes:
      num_classes: Number of logits.
      stage_sizes: See `ResNetStages`.
      block: See `ResNetStages`.
      width: See `ResNetStages`.
      virtual_batch: See `GhostBatchNorm`.
      dtype: See `ResNetStages`; logits are float32.

    Example:
      >>> model = ImageNetResNet(num_classes=1000)
      >>> images = jnp.zeros((8, 224, 224, 3))
      >>> init = lambda: model.init_with_output(jax.random.key(0), images, train=False)
      >>> logits, variables = jax.eval_shape(init)
      >>> logits.shape
      (8, 1000)
    """

    num_classes: int
    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    block: Block = "bottleneck"
    width: int = 64
    virtual_batch: int | None = None
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Classifies images.

        Args:
          images: See `ResNetStages`.
          train: See `ResNetStages`.

        Returns:
          Logits, ``float32[B, num_classes]``.
        """
        features = ResNetStages(
            stage_sizes=self.stage_sizes,
            block=self.block,
            width=self.width,
            virtual_batch=self.virtual_batch,
            dtype=self.dtype,
            name="trunk",
        )(images, train=train)
        # The loss is a difference of large numbers: bfloat16 would round it.
        x = features[-1].astype(jnp.float32).mean(axis=(1, 2))
        return nn.Dense(
            self.num_classes,
            kernel_init=nn.initializers.normal(stddev=0.01),
            dtype=jnp.float32,
            name="head",
        )(x)


class _ResidualBlock(nn.Module):
    """Convolutions beside a shortcut, which is projected where the shape changes."""

    block: Block
    channels: int
    stride: int
    virtual_batch: int | None
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        norm = partial(
            GhostBatchNorm, virtual_batch=self.virtual_batch, dtype=self.dtype
        )
        if self.block == "bottleneck":
            plan = [(1, 1, 1), (3, self.stride, 1), (1, 1, _EXPANSION)]
        else:
            plan = [(3, self.stride, 1), (3, 1, 1)]
        y = x
        for number, (size, stride, expansion) in enumerate(plan):
            is_last = number == len(plan) - 1
            channels, name = self.channels * expansion, f"conv_{number}"
            y = conv(channels, size, stride, self.dtype, name=name)(y)
            start = nn.initializers.zeros if is_last else nn.initializers.ones
            y = norm(scale_init=start, name=f"norm_{number}")(y, train=train)
            y = y if is_last else nn.relu(y)
        if x.shape != y.shape:
            channels = y.shape[-1]
            x = conv(channels, 1, self.stride, self.dtype, name="shortcut")(x)
            x = norm(name="shortcut_norm")(x, train=train)
        return nn.relu(x + y)


def conv(
    channels: int, size: int, stride: int, dtype: Any, *, name: str, groups: int = 1
) -> nn.Conv:
    """Returns a convolution without a bias whose windows are centred on pixels."""
    return nn.Conv(
        channels,
        (size, size),
        (stride, stride),
        # "SAME" would pad an even image on one side only where the stride is 2.
        padding=[(size // 2, size // 2)] * 2,
        feature_group_count=groups,
        use_bias=False,
        dtype=dtype,
        kernel_init=nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
        name=name,
    )
