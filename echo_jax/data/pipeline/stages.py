"""The stages of a pipeline as pure functions of a record, an index and a seed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.echo.counts import Tags
from echo_jax.echo.finite import is_finite
from echo_jax.echo.keys import use_seed
from echo_jax.echo.stores.leaves import read_only
from echo_jax.echo.tree import tree_map

__all__ = [
    "AugmentFresh",
    "BroadcastTags",
    "DecodeFresh",
    "FinishBatch",
    "Guarded",
    "Item",
    "Read",
    "RecordSource",
    "Stages",
]

Item = dict[str, Any]
"""A decoded example: a dict of NumPy arrays."""


class RecordSource(Protocol):
    """Raw records by index; called from several threads at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> bytes: ...


@dataclass(frozen=True)
class Stages:
    """What a workload's records go through.

    Attributes:
      source: The training records.
      decode: Turns a record into an item; must not write to its input.
      augment: Returns the item at random, decided by the ``uint64`` seed alone;
        must not write to its input. None if nothing is random.
    """

    source: RecordSource
    decode: Callable[[bytes], Item]
    augment: Callable[[Item, int], Item] | None = None


@dataclass(frozen=True)
class Guarded:
    """Calls a stage with read-only views of its input, wherever it stands.

    One that writes there would change what is used again in some orders of the echo,
    and in others nothing; so it fails at its first item in all of them.

    Attributes:
      name: ``"decode"`` or ``"augment"``.
      function: The stage.
    """

    name: str
    function: Callable[..., Item]

    def __call__(self, item: Any, *seed: int) -> Item:
        """Returns what the stage makes.

        Raises:
          ValueError: It writes into its input.
        """
        try:
            return self.function(tree_map(read_only, item), *seed)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise ValueError(
                f"{self.name} writes into the item that it is given, which may be used "
                f"again ({error}); have it make new arrays: x = 2 * x, not x *= 2"
            ) from error


@dataclass(frozen=True)
class Read:
    """Stage one: the record of an index, after the time that a read takes."""

    source: RecordSource
    storage: SimulatedStorage

    def __call__(self, stream_index: int, record_index: int) -> bytes:
        """Returns the record, read as number `stream_index` of the stream."""
        record = self.source[record_index]
        self.storage.wait(stream_index, len(record))
        return record


@dataclass(frozen=True)
class DecodeFresh:
    """Decoding above the echo."""

    decode: Callable[[bytes], Item]

    def __call__(self, stream_index: int, record: Any) -> Item:
        """Returns the decoded item number `stream_index`."""
        del stream_index
        return self.decode(record)


@dataclass(frozen=True)
class AugmentFresh:
    """Augmentation above the echo: a fresh item is its own first use."""

    augment: Callable[[Item, int], Item]
    seed: int

    def __call__(self, stream_index: int, item: Any) -> Item:
        """Returns the augmented item number `stream_index`."""
        return self.augment(item, int(use_seed(self.seed, stream_index, 0)))


@dataclass(frozen=True)
class FinishBatch:
    """The stages between the echo and the trainer, anew for every use of an item.

    Attributes:
      decode: If it is below the echo.
      augment: If it is below the echo.
      seed: Of the augmentation.
      global_index: Turns the echo's fresh indices into those over all processes.
      otherwise: Is called with the index of an item that is decoded here for its first
        use, and with the item, where it is not finite; None looks at none.
    """

    decode: Callable[[bytes], Item] | None
    augment: Callable[[Item, int], Item] | None
    seed: int
    global_index: Callable[[Any], Any] = lambda index: index
    otherwise: Callable[[int, Item], object] | None = None

    def __call__(self, uses: Sequence[tuple[Any, Tags]]) -> Item:
        """Returns the batch of these uses, with their tags in it."""
        index = np.array([tags.fresh_index for _, tags in uses], np.int64)
        fresh_index = self.global_index(index)
        repeat = np.array([tags.repeat for _, tags in uses], np.int32)
        seeds = use_seed(self.seed, fresh_index, repeat).tolist()
        finished = zip(uses, fresh_index.tolist(), repeat.tolist(), seeds, strict=True)
        items = [self._finished(item, *use) for (item, _), *use in finished]
        batch = {key: np.stack([item[key] for item in items]) for key in items[0]}
        return {**batch, "fresh_index": fresh_index, "repeat": repeat}

    def finish(self, item: Any, tags: Tags) -> Item:
        """Returns one example of the batch that holds this use."""
        index, repeat = int(self.global_index(int(tags.fresh_index))), int(tags.repeat)
        seed = use_seed(self.seed, index, repeat)
        return self._finished(item, index, repeat, int(seed))

    def _finished(self, item: Any, index: int, repeat: int, seed: int) -> Item:
        decoded = item if self.decode is None else self.decode(item)
        if self.otherwise and not repeat and not is_finite(decoded):
            self.otherwise(index, decoded)
        return decoded if self.augment is None else self.augment(decoded, seed)


@dataclass(frozen=True)
class BroadcastTags:
    """Puts the tags of a batch, one or one per example, into the batch.

    Attributes:
      batch_size: Examples.
      global_index: See `FinishBatch`; the index of a batch is that of all its shards.
    """

    batch_size: int
    global_index: Callable[[Any], Any] = lambda index: index

    def __call__(self, use: tuple[Mapping[str, Any], Tags]) -> Item:
        """Returns the batch with its tags in it."""
        batch, tags = use
        shape = (self.batch_size,)
        index = self.global_index(np.asarray(tags.fresh_index))
        return {
            **batch,
            "fresh_index": np.full(shape, index, np.int64),
            "repeat": np.full(shape, tags.repeat, np.int32),
        }
