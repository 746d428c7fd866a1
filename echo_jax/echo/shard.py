"""Which part of every batch a process makes, where several share a run.

Of Q parts, part q makes rows [q*b, (q+1)*b) of every fresh batch of B examples, with
b = B/Q. So the fresh items of all parts together are those of a run in one process,
in the same order, no record is read by two of them in an epoch, and what an item is
depends on its place in that order alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.echo.plans.lanes import Spec, lane_spec

__all__ = ["WHOLE", "Part"]


@dataclass(frozen=True)
class Part:
    """One of several parts of the data.

    Attributes:
      number: Which one, from 0.
      of: How many there are.

    Example:
      >>> Part(1, of=2).rows(8), Part(1, of=2).whole_index(np.arange(6), rows=4)
      (4, array([ 4,  5,  6,  7, 12, 13]))
    """

    number: int = 0
    of: int = 1

    def rows(self, batch_size: int) -> int:
        """Returns how many examples of a batch it makes.

        Args:
          batch_size: Examples of all parts.

        Raises:
          ValueError: The parts do not divide the batch.
        """
        if batch_size % self.of:
            raise ValueError(
                f"config.batch_size={batch_size} is not a multiple of the {self.of} "
                "parts of the data, one for each process; change it, or use fewer "
                "processes"
            )
        return batch_size // self.of

    def whole_index(self, index: Any, rows: int) -> Any:
        """Returns the place, among the items of all parts, of items of this one.

        Args:
          index: Numbers of items of this part, from 0.
          rows: Examples of a batch that it makes.
        """
        if self.of == 1:
            return index
        batch, row = np.divmod(index, rows)
        return (batch * self.of + self.number) * rows + row

    def echo(self, spec: Spec) -> Spec:
        """Returns the echo of this part's examples: see `echo_jax.echo.plans.lanes`."""
        return lane_spec(spec, self.number, self.of)


WHOLE = Part()
"""The only part of a run in one process."""
