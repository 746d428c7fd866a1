"""The growth of a training config's batch during training."""

import math
from dataclasses import dataclass

from echo_jax.config import Config


@dataclass(frozen=True)
class BatchGrowth:
    """The updates at which the batch grows to the config's size (Smith et al. 2018).

    A smaller batch is a part of one of the config's batches. Data and echo do not
    change; several updates use the parts of a batch.
    """

    boundaries: tuple[int, ...] = ()  # Numbers of updates after which the batch grows.
    factors: tuple[int, ...] = ()  # The growth at each boundary.

    @classmethod
    def of(cls, config: Config) -> "BatchGrowth":
        return cls(tuple(config.batch.boundaries), tuple(config.batch.factors))

    def __bool__(self) -> bool:
        return bool(self.boundaries)

    def parts(self, update: int) -> int:
        """Returns the number of parts of a batch after `update` updates."""
        return math.prod(
            factor for boundary, factor in self.steps() if update < boundary
        )

    def steps(self) -> list[tuple[int, int]]:
        """Returns each boundary with its factor."""
        return list(zip(self.boundaries, self.factors, strict=True))

    def number(self, update: int) -> int:
        """Returns the part of a batch that an update uses; see `parts`."""
        begun = max((b for b in self.boundaries if b <= update), default=0)
        return (update - begun) % self.parts(update)

    def first_split(self) -> tuple[int, int] | None:
        """Returns the first boundary within a batch and the next valid one, or None."""
        begun = 0
        for boundary in self.boundaries:
            parts = self.parts(boundary - 1)
            if left := (boundary - begun) % parts:
                return boundary, boundary + parts - left
            begun = boundary
        return None
