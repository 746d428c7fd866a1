"""How noisy gradients are: the noise scale, from norms of parts of a batch."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


class NoiseScale(NamedTuple):
    """How noisy gradients are; see `gradient_noise_scale`."""

    squared_norm: Any  # |G|², for the true gradient G.
    variance: Any  # tr(Σ): of single examples' gradients, summed over parameters.

    @property
    def examples(self) -> float:
        """The simple noise scale, tr(Σ) / |G|²; NaN if |G|² was estimated below 0."""
        # Batches well below it lose little by being larger; well above it, much.
        return self.variance / self.squared_norm if self.squared_norm > 0 else math.nan


def gradient_noise_scale(
    part_norms: Sequence[float], norm: float, *, batch_size: int
) -> NoiseScale:
    """Estimates the noise of gradients from the norms of equal parts' mean gradients.

    These are the unbiased estimators of McCandlish et al. 2018, arXiv 1812.06162,
    appendix A.1. One update says little: average `squared_norm` and `variance` over
    many updates, each by itself, before their ratio.

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
    """Estimates the noise from the mean squared norm of parts, and the whole's."""
    # For the whole batch, ``parts * size`` examples, in the paper's terms.
    squared_norm = (parts * square - part_square) / (parts - 1)
    variance = (part_square - square) * size * parts / (parts - 1)
    return NoiseScale(squared_norm, variance)
