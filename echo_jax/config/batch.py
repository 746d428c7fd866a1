"""How the batch of a training config grows while it trains."""

import math
from dataclasses import dataclass

from echo_jax.config import Config

__all__ = ["BatchGrowth"]


@dataclass(frozen=True)
class BatchGrowth:
    """At which updates a batch grows, until it is the config's (Smith et al. 2018).

    A smaller batch is a part of one of the config's: the data, and an echo of it, are
    those of a run that does not grow, and several updates use a batch in parts.

    Attributes:
      boundaries: After how many updates it grows.
      factors: How many times as large it is then.

    Example:
      The batch of 16 is at first used in 4 parts, then in 2, then whole.

      >>> growth = BatchGrowth(boundaries=(8, 12), factors=(2, 2))
      >>> [16 // growth.parts(update) for update in (0, 7, 8, 12)]
      [4, 4, 8, 16]
    """

    boundaries: tuple[int, ...] = ()
    factors: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Config) -> "BatchGrowth":
        """Returns that of a training config."""
        return cls(tuple(config.batch.boundaries), tuple(config.batch.factors))

    def __bool__(self) -> bool:
        return bool(self.boundaries)

    def parts(self, update: int) -> int:
        """Returns of how many parts of a batch one is used by an update.

        Args:
          update: Updates done before.
        """
        return math.prod(
            factor for boundary, factor in self.steps() if update < boundary
        )

    def steps(self) -> list[tuple[int, int]]:
        """Returns each boundary with its factor."""
        return list(zip(self.boundaries, self.factors, strict=True))

    def number(self, update: int) -> int:
        """Returns which part of a batch an update uses; see `parts`."""
        begun = max((b for b in self.boundaries if b <= update), default=0)
        return (update - begun) % self.parts(update)

    def first_split(self) -> tuple[int, int] | None:
        """Returns the first boundary that is within a batch, and the next that is not.

        None if there is none.
        """
        begun = 0
        for boundary in self.boundaries:
            parts = self.parts(boundary - 1)
            if left := (boundary - begun) % parts:
                return boundary, boundary + parts - left
            begun = boundary
        return None
