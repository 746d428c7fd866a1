"""The stages above the echo: fresh items by their index in the endless stream.

Every stage is a function of the stream index, so any thread or worker of any engine may
compute any item. Dropping an item with NaN or infinity would move all later ones. So
the item at the same place in the next epoch replaces it, or in a later epoch if that
item is bad too. The result does not depend on engine, worker, host or restart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import grain

from echo_jax.data.pipeline.bad_items import BadItem, BadItems
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
from echo_jax.echo.finite import BadItemError, is_finite, what_is_bad

_MOST_EPOCHS = 100


def fresh_items(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> grain.MapDataset[Any]:
    """Returns a shard's endless fresh items by index, some of them `_Replaced`."""
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
        )
        unchecked = dataset.map_with_index(finish)
        otherwise = partial(_refuse_bad, records)
        if pipeline.max_bad:
            otherwise = partial(_replace_bad, unchecked, records, len(stages.source))
        # A separate Grain stage would cost more than most checks.
        checked = dataset.map_with_index(partial(_checked, finish, otherwise))
        dataset = checked if pipeline.check_finite else unchecked
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


class _Replaced(NamedTuple):
    """An element to use, and the bad items that were replaced in it."""

    element: Any
    bad: Sequence[BadItem]


def _checked(
    finish: Callable[[int, Any], Any],
    otherwise: Callable[[int, Any], Any],
    index: int,
    record: Any,
) -> Any:
    item = finish(index, record)
    return item if is_finite(item) else otherwise(index, item)


def _refuse_bad(records: grain.MapDataset, index: int, item: Any) -> NoReturn:
    raise BadItemError(
        f"{_bad(records, index, item)}; mend the record, or skip such items: "
        "--config.data.max_bad=1 or more, with --config.echo.after=decode, augment "
        "or batch; --config.data.check_finite=False looks for none"
    )


def _replace_bad(
    items: grain.MapDataset, records: grain.MapDataset, size: int, index: int, item: Any
) -> _Replaced:
    """Replaces a bad item by the finite item at its place in a later epoch."""
    bad = _bad(records, index, item)
    for epoch in range(1, _MOST_EPOCHS + 1):
        other = items[index + epoch * size]
        if is_finite(other):
            return _Replaced(other, (bad,))
    raise BadItemError(
        f"{bad}; neither is finite what has its place in the {_MOST_EPOCHS} epochs "
        "after it, and could be used instead; mend the records"
    )


def _bad(records: grain.MapDataset, index: int, item: Any) -> BadItem:
    record: Any = records[int(index)]
    return BadItem(int(index), int(record), what_is_bad(item))


@dataclass(frozen=True)
class Gather:
    """Gathers items to one element, which is `_Replaced` if any item is."""

    gather: Callable[[Sequence[Any]], Any]

    def __call__(self, items: Sequence[Any]) -> Any:
        bad = [each for item in items if type(item) is _Replaced for each in item.bad]
        if not bad:
            return self.gather(items)
        items = [item.element if type(item) is _Replaced else item for item in items]
        return _Replaced(self.gather(items), bad)


@dataclass(frozen=True)
class TakeNote:
    """Reports bad items in the training process; returns the element to use."""

    bad_items: BadItems

    def __call__(self, element: Any) -> Any:
        if type(element) is _Replaced:
            self.bad_items.add(element.bad)
            return element.element
        return element
