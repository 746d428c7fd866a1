"""Single-shot detection on a residual trunk (Liu et al. 2016; He et al. 2016)."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp

from echo_jax.models.batch_norm import GhostBatchNorm
from echo_jax.models.imagenet_resnet import ResNetStages

# Channels of the maps behind the trunk, in units of its width. With the usual width of
# 64 they are as in SSD300: 512 for the first two maps, then 256.
_FIRST_EXTRAS, _OTHER_EXTRAS = 8, 4

# Wider maps are halved; smaller ones lose a border of one cell.
_SMALL = 5


class SSD(nn.Module):
    """Predicts the offset and the class scores of every default box.

    The trunk is a ResNet of basic blocks up to its third stage. That stage has stride
    1, so that the finest map has an eighth of the resolution. Pairs of a 1x1 and a 3x3
    convolution make the coarser maps. Every map has its own 3x3 convolution that
    predicts. With 300 pixels and three stages of 3, 4 and 6 blocks (ResNet-34) the maps
    are as in SSD300: 38, 19, 10, 5, 3 and 1 cells wide. The data echoing paper does
    not name its backbone. MLPerf's SSD has the same backbone, but does not normalise
    the maps behind the trunk.

    Attributes:
      num_outputs: Scores of every default box.
      boxes_per_cell: Default boxes around each cell, map by map.
      stage_sizes: Blocks in the trunk's three stages.
      width: Channels of the trunk's first stage.
      score_bias: The initial bias of the scores. A focal loss needs a value far below
        0, so that background does not dominate the first updates (Lin et al. 2017,
        section 4.1).
      virtual_batch: See `GhostBatchNorm`.
      dtype: The type of the computation; parameters, statistics and predictions are
        float32.

    Example:
      >>> model = SSD(num_outputs=81, boxes_per_cell=(4, 6, 6, 6, 4, 4))
      >>> images = jnp.zeros((1, 300, 300, 3))
      >>> init = lambda: model.init_with_output(jax.random.key(0), images, train=False)
      >>> outputs, variables = jax.eval_shape(init)
      >>> [x.shape for x in outputs]
      [(1, 8732, 4), (1, 8732, 81)]
    """

    num_outputs: int
    boxes_per_cell: tuple[int, ...]
    stage_sizes: tuple[int, int, int] = (3, 4, 6)
    width: int = 64
    score_bias: float = 0.0
    virtual_batch: int | None = None
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(
        self, images: jax.Array, *, train: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Predicts offsets and scores.

        Args:
          images: ``float32[B, S, S, C]``, normalised.
          train: Whether to use the batch's own statistics and to update the running
            ones (pass ``mutable=["batch_stats"]``).

        Returns:
          The offset of every default box, ``float32[B, A, 4]``, and its scores,
          ``float32[B, A, num_outputs]``: map by map, row by row, cell by cell.

        Raises:
          ValueError: Images of this size have another number of maps.
        """
        sizes = map_sizes(images.shape[1])
        if len(sizes) != len(self.boxes_per_cell):
            raise ValueError(
                f"images of {images.shape[1]} pixels have maps of {sizes} cells; "
                f"boxes_per_cell={self.boxes_per_cell} must name one number for each"
            )
        x = ResNetStages(
            stage_sizes=self.stage_sizes,
            block="basic",
            width=self.width,
            last_stride=1,
            virtual_batch=self.virtual_batch,
            dtype=self.dtype,
            name="trunk",
        )(images, train=train)[-1]
        offsets, scores = [], []
        for number, boxes in enumerate(self.boxes_per_cell):
            if number:
                x = self._next_map(x, number, train=train)
            offsets.append(self._head(x, boxes, 4, 0.0, f"offsets_{number}"))
            bias, name = self.score_bias, f"scores_{number}"
            scores.append(self._head(x, boxes, self.num_outputs, bias, name))
        return jnp.concatenate(offsets, axis=1), jnp.concatenate(scores, axis=1)

    def _next_map(self, x: jax.Array, number: int, *, train: bool) -> jax.Array:
        channels = self.width * (_FIRST_EXTRAS if number < 3 else _OTHER_EXTRAS)
        stride, padding = (2, 1) if x.shape[1] > _SMALL else (1, 0)
        plan = [(channels // 2, 1, 1, 0), (channels, 3, stride, padding)]
        for part, (features, kernel, stride, padding) in enumerate(plan):
            x = nn.Conv(
                features,
                (kernel, kernel),
                (stride, stride),
                padding=padding,
                use_bias=False,
                dtype=self.dtype,
                kernel_init=nn.initializers.he_normal(),
                name=f"map_{number}_conv_{part}",
            )(x)
            x = GhostBatchNorm(
                virtual_batch=self.virtual_batch,
                dtype=self.dtype,
                name=f"map_{number}_norm_{part}",
            )(x, train=train)
            x = nn.relu(x)
        return x

    def _head(
        self, x: jax.Array, boxes: int, outputs: int, bias: float, name: str
    ) -> jax.Array:
        y = nn.Conv(
            boxes * outputs,
            (3, 3),
            padding=1,
            dtype=self.dtype,
            kernel_init=nn.initializers.normal(stddev=0.01),
            bias_init=nn.initializers.constant(bias),
            name=name,
        )(x)
        # Losses are differences of large numbers: bfloat16 would round them.
        return y.astype(jnp.float32).reshape(x.shape[0], -1, outputs)


def map_sizes(image_size: int) -> tuple[int, ...]:
    """Returns the widths of the maps of an image in cells, from fine to coarse."""
    sizes = [math.ceil(image_size / 8)]
    while (last := sizes[-1]) >= 3:
        sizes.append(math.ceil(last / 2) if last > _SMALL else last - 2)
    return tuple(sizes)
