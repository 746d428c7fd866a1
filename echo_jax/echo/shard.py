"""Which rows of every batch a process makes, where several share a run.

Of Q data shards, shard q makes rows [q*b, (q+1)*b) of every fresh batch of B examples,
with b = B/Q. So the fresh items of all shards together are those of a run in one
process, in the same order, no record is read by two of them in an epoch, and what an
item is depends on its place in that order alone.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.echo.plans.lanes import Spec, lane_spec

__all__ = ["SINGLE", "DataShard"]


@dataclass(frozen=True)
class DataShard:
    """One of the shards of the data.

    Attributes:
      index: Which one, from 0.
      count: How many there are.

    Example:
      >>> shard = DataShard(1, count=2)
      >>> shard.rows(8), shard.global_index(np.arange(6), rows=4)
      (4, array([ 4,  5,  6,  7, 12, 13]))
    """

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> int:
        """Returns how many examples of a batch it makes.

        Args:
          batch_size: Examples of all shards.

        Raises:
          ValueError: The shards do not divide the batch.
        """
        if batch_size % self.count:
            raise ValueError(
                f"config.batch_size={batch_size} is not a multiple of the {self.count} "
                "data shards, one for each process; change it, or use fewer processes"
            )
        return batch_size // self.count

    def global_index(self, index: Any, rows: int) -> Any:
        """Returns the place, among the items of all shards, of items of this one.

        Args:
          index: Numbers of items of this shard, from 0.
          rows: Examples of a batch that it makes.
        """
        if self.count == 1:
            return index
        batch, row = np.divmod(index, rows)
        return (batch * self.count + self.index) * rows + row

    def echo(self, spec: Spec) -> Spec:
        """Returns the echo of its own examples: see `echo_jax.echo.plans.lanes`."""
        return lane_spec(spec, self.index, self.count)


SINGLE = DataShard()
"""The only shard of a run in one process."""
