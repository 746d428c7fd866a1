"""The stages above the echo: fresh items by their index in the endless stream.

Every stage is a function of the stream index, so any thread or worker of any engine may
compute any item.
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
    """Returns a shard's endless fresh items by index, some of them `Replaced`."""
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
        # A separate Grain stage would cost more than most checks.
        checked = dataset.map_with_index(Checked(last, otherwise))
        dataset = checked if pipeline.check_finite else unchecked
    if shard.count == 1:
        return dataset
    rows = shard.rows(pipeline.batch_size)
    return _ShardOfItems(dataset, functools.partial(shard.global_index, rows=rows))


def below_echo(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> FinishBatch | None:
    """Returns the stages below the echo, or None if only batching remains."""
    # None lets the echo gather whole batches out of its buffer, which is cheaper.
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
    """Returns the record number of each stream index."""
    return (
        grain.MapDataset.range(len(stages.source))
        # Grain adds the epoch to the seed, and uses 32 bits of the sum.
        .shuffle(seed=pipeline.stream_seed(SHUFFLE) % 2**32)
        .repeat()
    )


class _ShardOfItems(grain.MapDataset):
    """The items of one shard; `index` returns the index over all shards."""

    def __init__(self, items: grain.MapDataset, index: Callable[[int], int]):
        super().__init__(items)
        self._index = index

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[int(self._index(index))]
