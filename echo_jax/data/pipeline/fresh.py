"""The stages above the echo: fresh items by their index in the endless stream.

Every stage is a function of the stream index, so any thread or worker of any engine may
compute any item. An item with NaN or infinity ends the run: leaving it out would move
all later ones. `echo-jax prepare` leaves such records out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import grain

from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.data.pipeline.spec import AUGMENT, SHUFFLE, STORAGE, PipelineSpec
from echo_jax.data.pipeline.stages import (
    FinishBatch,
    FinishFresh,
    Guarded,
    Read,
    Stages,
)
from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.echo.finite import BadItemError, what_is_bad


def fresh_items(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> grain.MapDataset[Any]:
    """Returns a shard's endless fresh items by index."""
    records = _records(stages, pipeline)
    dataset = records.map(stages.source.__getitem__)
    if pipeline.storage.is_simulated:
        storage = SimulatedStorage(pipeline.storage, pipeline.stream_seed(STORAGE))
        dataset = records.map_with_index(Read(stages.source, storage))
    if pipeline.after != "read":
        augment = stages.augment if pipeline.after in ("augment", "batch") else None
        finish = FinishFresh(
            Guarded("decode", stages.decode),
            augment and Guarded("augment", augment),
            pipeline.stream_seed(AUGMENT),
            partial(_refuse_bad, records) if pipeline.check_finite else None,
        )
        dataset = dataset.map_with_index(finish)
    if shard.count == 1:
        return dataset
    rows = shard.rows(pipeline.batch_size)
    return _ShardOfItems(dataset, partial(shard.global_index, rows=rows))


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
        partial(shard.global_index, rows=rows),
        partial(_refuse_bad, _records(stages, pipeline)) if looks else None,
    )


def _records(stages: Stages, pipeline: PipelineSpec) -> grain.MapDataset[Any]:
    return (
        grain.MapDataset.range(len(stages.source))
        # Grain adds the epoch to the seed, and uses 32 bits of the sum.
        .shuffle(seed=pipeline.stream_seed(SHUFFLE) % 2**32)
        .repeat()
    )


class _ShardOfItems(grain.MapDataset):
    def __init__(self, items: grain.MapDataset, index: Callable[[int], int]):
        super().__init__(items)
        self._index = index

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._parent[int(self._index(index))]


def _refuse_bad(records: grain.MapDataset, index: int, item: Any) -> NoReturn:
    record: Any = records[int(index)]
    raise BadItemError(
        f"fresh item {int(index)} (record {int(record)}): {what_is_bad(item)}. Mend "
        "the record, or use --config.data.check_finite=False, which looks for none."
    )
