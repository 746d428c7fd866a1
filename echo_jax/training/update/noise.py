"""How noisy gradients are: the noise scale, from norms of parts of a batch."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

__all__ = ["NoiseScale", "gradient_noise_scale", "noise_of_parts"]


class NoiseScale(NamedTuple):
    """How noisy gradients are; see `gradient_noise_scale`.

    Attributes:
      squared_norm: Of the true gradient, |G|².
      variance: tr(Σ): of the gradients of single examples, summed over parameters.
    """

    squared_norm: Any
    variance: Any

    @property
    def examples(self) -> float:
        """The simple noise scale, tr(Σ) / |G|²; NaN where |G|² was estimated below 0.

        Batches well below it lose little by being larger; well above it, much.
        """
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.nan


def gradient_noise_scale(
    part_norms: Sequence[float], norm: float, *, batch_size: int
) -> NoiseScale:
    """Estimates the noise of gradients from norms that data parallelism has at hand.

    The unbiased estimators of McCandlish et al. 2018, "An Empirical Model of
    Large-Batch Training", arXiv 1812.06162, appendix A.1, where the small batch is the
    part of a device, and the large one that of all. One update tells little: average
    `squared_norm` and `variance` over many, each by itself, before their ratio.

    Args:
      part_norms: Of the mean gradient of each part of a batch, all parts being equal;
        of each device before the sum, at least two.
      norm: Of the mean gradient of the whole batch.
      batch_size: Examples in the whole batch.

    Raises:
      ValueError: There are less than two parts, or they do not divide the batch.

    Example:
      >>> noise = gradient_noise_scale([3.0, 5.0], 4.0, batch_size=8)
      >>> noise.squared_norm, noise.variance, noise.examples
      (15.0, 8.0, 0.5333333333333333)
    """
    parts = len(part_norms)
    if parts < 2 or batch_size % parts:
        raise ValueError(
            f"part_norms has {parts} norms, of a batch of {batch_size}; give at least "
            "two, of equal parts of the batch"
        )
    square = sum(each**2 for each in part_norms) / parts
    return noise_of_parts(square, norm**2, batch_size // parts, parts)


def noise_of_parts(part_square: Any, square: Any, size: int, parts: int) -> NoiseScale:
    """Does what `gradient_noise_scale` does, of numbers or of arrays.

    Args:
      part_square: The mean of the squared norms of the parts' mean gradients.
      square: The squared norm of the mean gradient of the whole batch.
      size: Examples in a part.
      parts: How many there are, at least two.
    """
    # Of the whole batch, ``parts * size`` examples, in the paper's terms.
    squared_norm = (parts * square - part_square) / (parts - 1)
    variance = (part_square - square) * size * parts / (parts - 1)
    return NoiseScale(squared_norm, variance)
