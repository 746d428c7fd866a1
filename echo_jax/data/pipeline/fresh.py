"""What is above the echo: fresh items, by their index in the endless stream.

Every stage is a function of the stream index, so that any thread or worker, of any
engine, may compute any item.
"""

import functools
from collections.abc import Callable
from typing import Any

import grain

from echo_jax.data.pipeline.check_finite import Checked, RefuseBad, ReplaceBad
from echo_jax.data.pipeline.spec import AUGMENT, SHUFFLE, STORAGE, PipelineSpec
from echo_jax.data.pipeline.stages import (
    AugmentFresh,
    DecodeFresh,
    FinishBatch,
    Guarded,
    Read,
    Stages,
)
from echo_jax.data.pipeline.storage import SimulatedStorage
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
      examples. With ``max_bad`` one that took the place of another is a `Replaced`.
    """
    storage = SimulatedStorage(pipeline.storage, pipeline.stream_seed(STORAGE))
    records = _records(stages, pipeline)
    dataset = records.map_with_index(Read(stages.source, storage))
    if pipeline.after != "read":
        last = DecodeFresh(Guarded("decode", stages.decode))
        if pipeline.after in ("augment", "batch") and stages.augment is not None:
            dataset = dataset.map_with_index(last)
            augment = Guarded("augment", stages.augment)
            last = AugmentFresh(augment, pipeline.stream_seed(AUGMENT))
        unchecked = dataset.map_with_index(last)
        otherwise = RefuseBad(records)
        if pipeline.max_bad:
            otherwise = ReplaceBad(unchecked, records, len(stages.source))
        # A stage of Grain's of its own would cost more than most checks.
        checked = dataset.map_with_index(Checked(last, otherwise))
        dataset = checked if pipeline.check_finite else unchecked
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
    is_read = pipeline.after == "read"
    if not is_read and stages.augment is None:
        return None
    rows = shard.rows(pipeline.batch_size)
    looks = is_read and pipeline.check_finite
    return FinishBatch(
        Guarded("decode", stages.decode) if is_read else None,
        stages.augment and Guarded("augment", stages.augment),
        pipeline.stream_seed(AUGMENT),
        functools.partial(shard.global_index, rows=rows),
        RefuseBad(_records(stages, pipeline)) if looks else None,
    )


def _records(stages: Stages, pipeline: PipelineSpec) -> grain.MapDataset[Any]:
    """Returns the numbers of the records of the stream, by the index in it."""
    return (
        grain.MapDataset.range(len(stages.source))
        # Grain adds the epoch to the seed, and takes 32 bits of it.
        .shuffle(seed=pipeline.stream_seed(SHUFFLE) % 2**32)
        .repeat()
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
