"""The rows of every batch that one of several processes makes.

With Q data shards, shard q makes the rows [q*b, (q+1)*b) of every fresh batch of B
examples, with b = B/Q. So all shards together have the fresh items of a run in one
process, in the same order, and none reads what another one reads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_jax.echo.plans.lanes import Spec, lane_spec


@dataclass(frozen=True)
class DataShard:
    """One of the shards of the data."""

    index: int = 0
    count: int = 1

    def rows(self, batch_size: int) -> int:
        """Returns the number of examples of a batch that this shard makes."""
        if batch_size % self.count:
            raise ValueError(
                f"config.batch_size={batch_size} is not a multiple of the {self.count} "
                "data shards, one for each process; change it, or use fewer processes"
            )
        return batch_size // self.count

    def global_index(self, index: Any, rows: int) -> Any:
        """Returns the places, over all shards, of items that this shard counts."""
        if self.count == 1:
            return index
        batch, row = np.divmod(index, rows)
        return (batch * self.count + self.index) * rows + row

    def echo(self, spec: Spec) -> Spec:
        """Returns the echo of this shard's own examples."""
        return lane_spec(spec, self.index, self.count)


SINGLE = DataShard()
