"""Stages of a pipeline as pure functions of a record, an index and a seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.echo.finite import is_finite
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.stats import UseInfo
from echo_jax.echo.stores.leaves import read_only
from echo_jax.echo.tree import tree_map

Item = dict[str, Any]
"""A decoded example: a dict of NumPy arrays."""


class RecordSource(Protocol):
    """Raw records by index; several threads call it at the same time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...


@dataclass(frozen=True)
class Stages:
    """A workload's training records, and the functions that process them."""

    source: RecordSource
    # Turns a record into an item; must not write to its input.
    decode: Callable[[bytes], Item]
    # Changes an item at random, decided by the ``uint64`` seed alone. It must not write
    # to its input. None if nothing is random.
    augment: Callable[[Item, int], Item] | None = None


# A stage that writes to its input would change later uses, but only in some orders of
# the echo. With read-only views it fails at its first item in all orders.
@dataclass(frozen=True)
class Guarded:
    """Calls a stage with read-only views of its input."""

    name: str
    function: Callable[..., Item]

    def __call__(self, item: Any, *seed: int) -> Item:
        if type(item) is not bytes:  # Nobody can write into those.
            item = tree_map(read_only, item)
        try:
            return self.function(item, *seed)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise ValueError(
                f"{self.name} writes into the item that it is given, which may be used "
                f"again ({error}); have it make new arrays: x = 2 * x, not x *= 2"
            ) from error


@dataclass(frozen=True)
class Read:
    """Reads a record, after the time that the simulated read takes."""

    source: RecordSource
    storage: SimulatedStorage

    def __call__(self, stream_index: int, record_index: int) -> bytes:
        record = self.source[record_index]
        self.storage.wait(stream_index, len(record))
        return record


@dataclass(frozen=True)
class FinishFresh:
    """Decodes above the echo, and augments; a fresh item is its own first use."""

    decode: Callable[[bytes], Item]
    augment: Callable[[Item, int], Item] | None
    seed: int
    # For an item that is not finite; None looks at none. In a separate stage of Grain
    # this would cost more than most checks.
    otherwise: Callable[[int, Item], object] | None = None

    def __call__(self, stream_index: int, record: bytes) -> Item:
        item = self.decode(record)
        if self.augment is not None:
            item = self.augment(item, int(seed_for_use(self.seed, stream_index, 0)))
        if self.otherwise and not is_finite(item):
            self.otherwise(stream_index, item)
        return item


@dataclass(frozen=True)
class FinishBatch:
    """Runs the stages below the echo for every use, and stacks the results."""

    decode: Callable[[bytes], Item] | None
    augment: Callable[[Item, int], Item] | None
    seed: int
    # Turns the echo's fresh index into the index over all processes.
    global_index: Callable[[Any], Any] = lambda index: index
    # For an item decoded here that is not finite at its first use.
    otherwise: Callable[[int, Item], object] | None = None

    def __call__(self, uses: Sequence[tuple[Any, UseInfo]]) -> Item:
        index = np.array([tags.fresh_index for _, tags in uses], np.int64)
        fresh_index = self.global_index(index)
        repeat = np.array([tags.repeat for _, tags in uses], np.int32)
        seeds = seed_for_use(self.seed, fresh_index, repeat).tolist()
        finished = zip(uses, fresh_index.tolist(), repeat.tolist(), seeds, strict=True)
        items = [self._finished(item, *use) for (item, _), *use in finished]
        return {**stacked(items), "fresh_index": fresh_index, "repeat": repeat}

    def finish(self, item: Any, tags: UseInfo) -> Item:
        """Returns one finished example of the batch."""
        index, repeat = int(self.global_index(int(tags.fresh_index))), int(tags.repeat)
        seed = seed_for_use(self.seed, index, repeat)
        return self._finished(item, index, repeat, int(seed))

    def _finished(self, item: Any, index: int, repeat: int, seed: int) -> Item:
        decoded = item if self.decode is None else self.decode(item)
        if self.otherwise and not repeat and not is_finite(decoded):
            self.otherwise(index, decoded)
        return decoded if self.augment is None else self.augment(decoded, seed)


@dataclass(frozen=True)
class BroadcastTags:
    """Adds tags to a batch; a tag of the whole batch is repeated for each example."""

    batch_size: int
    global_index: Callable[[Any], Any] = lambda index: index

    def __call__(self, use: tuple[Mapping[str, Any], UseInfo]) -> Item:
        batch, tags = use
        shape = (self.batch_size,)
        index = self.global_index(np.asarray(tags.fresh_index))
        return {
            **batch,
            "fresh_index": np.full(shape, index, np.int64),
            "repeat": np.full(shape, tags.repeat, np.int32),
        }


def stacked(items: Sequence[Item]) -> Item:
    return {key: np.stack([item[key] for item in items]) for key in items[0]}
