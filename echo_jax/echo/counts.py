"""What is known of uses: how many there were, and which they are."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Counts", "Tags"]


@dataclass(frozen=True)
class Counts:
    """Counts of an echo so far.

    Attributes:
      fresh: Items taken from the upstream stage.
      uses: Items emitted downstream.
      repeats: Those of the uses that were not the first of their item.
    """

    fresh: int = 0
    uses: int = 0
    repeats: int = 0

    def without(self, repeat: np.ndarray, pending: int) -> "Counts":
        """Returns them without the last uses of a batch, which took nothing fresh.

        Args:
          repeat: Which use of its item each use of the batch is, ``int32[G, n]``.
          pending: How many of each lane.
        """
        if not pending:
            return self
        left = repeat[:, -pending:]
        repeats = int(np.count_nonzero(left))
        return Counts(self.fresh, self.uses - left.size, self.repeats - repeats)


class Tags(NamedTuple):
    """Says which use of which item an output is.

    Attributes:
      fresh_index: Index of the item in the upstream: an int, or ``int64[B]``.
      repeat: 0 for its first use, then 1, 2, ...: an int, or ``int32[B]``.
    """

    fresh_index: Any
    repeat: Any
