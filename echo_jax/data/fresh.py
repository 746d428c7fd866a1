"""What is above the echo: fresh items, by their index in the endless stream.

Every stage is a function of the stream index, so that any thread or worker, of any
engine, may compute any item.
"""

import functools
from collections.abc import Callable
from typing import Any

import grain

from echo_jax.data.pipeline_spec import AUGMENT, SHUFFLE, STORAGE, PipelineSpec
from echo_jax.data.stages import AugmentFresh, FinishBatch, Read, Stages
from echo_jax.data.storage import SimulatedStorage
from echo_jax.echo.shard import SINGLE, DataShard

__all__ = ["below_echo", "fresh_items"]


def fresh_items(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> grain.MapDataset[Any]:
    """Returns the stages above the echo, as the items that they make.

    Args:
      stages: Records and what they go through.
      pipeline: Says behind which stage the echo stands.
      shard: Of every batch.

    Returns:
      Item i is the i-th fresh one of the shard's endless stream; of batches, their
      examples.
    """
    storage = SimulatedStorage(pipeline.storage, pipeline.stream_seed(STORAGE))
    dataset: grain.MapDataset[Any] = (
        grain.MapDataset.range(len(stages.source))
        # Grain adds the epoch to the seed, and takes 32 bits of it.
        .shuffle(seed=pipeline.stream_seed(SHUFFLE) % 2**32)
        .repeat()
        .map_with_index(Read(stages.source, storage))
    )
    if pipeline.after != "read":
        dataset = dataset.map(stages.decode)
    if pipeline.after in ("augment", "batch") and stages.augment is not None:
        augment = AugmentFresh(stages.augment, pipeline.stream_seed(AUGMENT))
        dataset = dataset.map_with_index(augment)
    if shard.count == 1:
        return dataset
    rows = shard.rows(pipeline.batch_size)
    return _ShardOfItems(dataset, functools.partial(shard.global_index, rows=rows))


def below_echo(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> FinishBatch | None:
    """Returns what is left to do for every use of an item.

    Args:
      stages: Records and what they go through.
      pipeline: Says behind which stage the echo stands.
      shard: Of every batch.

    Returns:
      The stages; None if there are none but batching, so that the echo may gather
      whole batches out of its buffer, which spares the handling of single items.
    """
    if pipeline.after in ("augment", "batch"):
        return None
    decode = stages.decode if pipeline.after == "read" else None
    if decode is None and stages.augment is None:
        return None
    seed, rows = pipeline.stream_seed(AUGMENT), shard.rows(pipeline.batch_size)
    return FinishBatch(
        decode, stages.augment, seed, functools.partial(shard.global_index, rows=rows)
    )


class _ShardOfItems(grain.MapDataset):
    """The items of a shard, by their number in it."""

    def __init__(self, items: grain.MapDataset, index: Callable[[int], int]):
        """Takes items of all shards.

        Args:
          items: An endless dataset.
          index: Of an item of the shard, in there.
        """
        super().__init__(items)
        self._index = index

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[int(self._index(index))]
