"""Feeds: what stands between the data and the jitted program.

A feed hands out the *input* of the next updates, a pytree that goes to the devices.
Its `Batching`, traced into the program, turns the input into batches. So a feed whose
batches come from the host and one that keeps items on the devices are the same to
the loop: what a feed keeps there are its ``arrays``, which the program reads.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from grain import IterDataset
from jax.sharding import Mesh, NamedSharding

from echo_jax.echo.bad_items import BadItem, BadItems
from echo_jax.echo.decision_log import DecisionLog, log_of
from echo_jax.echo.instrument.fresh_time import UNSEEN, bounds_of_all
from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.training.processes.distributed import put
from echo_jax.training.processes.sharding import group_sharding, replicated
from echo_jax.workloads.base import Batch

__all__ = [
    "Batching",
    "Feed",
    "HeldFeed",
    "HostBatching",
    "HostFeed",
    "HostInput",
    "Input",
    "JoinedBatches",
]

# Smaller inputs cross to the devices with the call that uses them, which spares two
# thirds of the host's work for a small step; larger ones would be copied by it.
_SENT_AHEAD_BYTES = 1 << 20


class Input(Protocol):
    """The input of some updates: a NamedTuple with at least this field.

    Attributes:
      repeat: Which use of its item every example is, ``int32[K, B]``, on the host;
        of several processes, that of this one's rows.
    """

    @property
    def repeat(self) -> Any:
        """See the class."""
        ...

    def with_repeat(self, repeat: np.ndarray) -> Any:
        """Returns the same input with other repeats."""
        ...


class Batching(Protocol):
    """How a program turns arrays and an input into batches.

    A static argument of the program: hashable, and equal by value, so that runs share
    compilations.

    Attributes:
      arrays_sharding: How the feed's arrays lie on the devices: a sharding, or a tree
        of them.
      input_sharding: The same of inputs.
    """

    @property
    def arrays_sharding(self) -> Any:
        """See the class."""
        ...

    @property
    def input_sharding(self) -> Any:
        """See the class."""
        ...

    def __call__(self, arrays: Any, inputs: Any) -> Sequence[Batch]:
        """Returns one batch with ``"repeat"`` for each update."""
        ...

    def send(self, inputs: Any) -> Any:
        """Starts the transfer of an input to the devices; need not wait for it."""
        ...

    def hold(self, inputs: Any) -> Any:
        """Returns an input whose data stays on the devices, to be sent many times."""
        ...


class Feed(Protocol):
    """Hands out inputs.

    Attributes:
      batching: Makes batches of them, in the program.
      arrays: What the feed keeps on the devices, for the program to read; asked for
        after `take` or `hold`, which may replace them.
      num_lanes: Of an echo on the devices; 0 without one.
      logs: What an adaptive echo decided so far, by the index of the data shard;
        of those that this process makes. Empty if there was nothing to decide.
      t_up_bounds: Seconds that a fresh batch takes the pipeline up to the echo, at
        least and at most, as seen so far.
      skipped: The bad items in whose places others were used, for the first time, in
        what `take` gave last.
    """

    num_lanes: int

    @property
    def arrays(self) -> Any:
        """See the class."""
        ...

    @property
    def batching(self) -> Batching:
        """See the class."""
        ...

    @property
    def logs(self) -> Mapping[int, DecisionLog]:
        """See the class."""
        ...

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        """See the class."""
        ...

    @property
    def skipped(self) -> Sequence[BadItem]:
        """See the class."""
        ...

    def take(self, num_updates: int) -> Input | None:
        """Returns the input of the next updates, and waits for it.

        Args:
          num_updates: K.

        Returns:
          The input; None if the data ended.
        """
        ...

    def hold(self, num_updates: int) -> Input:
        """Returns an input like those of `take`, always of the same data.

        It takes nothing and changes nothing; what was taken last may be among it.
        """
        ...

    def get_state(self) -> list[Any]:
        """Returns plain data, from which `set_state` goes on: for each shard."""
        ...

    def state_before_take(self) -> list[Any] | None:
        """Returns what `get_state` does, which costs microseconds, before a `take`.

        None where it can be asked after a `take` that a lock's wait ended, too.
        """
        ...

    def set_state(self, state: list[Any]) -> None:
        """Continues as the feed that gave the state would have."""
        ...

    def close(self) -> None:
        """Stops reading ahead."""
        ...


class JoinedBatches(Iterator[Batch]):
    """Puts the rows of several shards of every batch together, in the order of shards.

    It ends with the first shard that ends.
    """

    def __init__(self, datasets: Sequence[IterDataset]):
        """Reads nothing yet.

        Args:
          datasets: One of batches for each shard, in order.
        """
        self._iterators = [iter(dataset) for dataset in datasets]
        self._fresh_times = [getattr(each, "fresh_time", None) for each in datasets]
        none = BadItems()
        self._bad_items = [getattr(each, "bad_items", none) for each in datasets]

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        """Seconds that a fresh batch takes at least and at most, as seen so far."""
        return bounds_of_all(
            [each.bounds() if each else UNSEEN for each in self._fresh_times]
        )

    @property
    def held(self) -> int:
        """How many fresh batches may be ready, or under way."""
        return max([each.held_batches if each else 0 for each in self._fresh_times])

    @property
    def has_bad(self) -> bool:
        """Whether there are bad items that `take_bad` may give."""
        return any(self._bad_items)

    def take_bad(self, fresh_index: np.ndarray, repeat: np.ndarray) -> list[BadItem]:
        """Does what `echo_jax.echo.bad_items.BadItems.take` does, for all shards."""
        found = [each.take(fresh_index, repeat) for each in self._bad_items]
        return [*itertools.chain(*found)]

    def __next__(self) -> Batch:
        """Returns the next batch; that of a single shard is not copied."""
        rows = [next(iterator) for iterator in self._iterators]
        if len(rows) == 1:
            return rows[0]
        return {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}

    def get_state(self) -> list[Any]:
        """Returns the state of every shard."""
        return [iterator.get_state() for iterator in self._iterators]

    def set_state(self, state: Sequence[Any]) -> None:
        """Goes to the states of as many shards."""
        for iterator, own in zip(self._iterators, state, strict=True):
            iterator.set_state(own)

    def close(self) -> None:
        """Stops reading ahead."""
        for iterator in self._iterators:
            # Grain's have it; what a test or a user gives need not.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


class HostInput(NamedTuple):
    """Batches that the host made.

    Attributes:
      batches: The batches' arrays by name, stacked: ``[K, B, ...]``.
      repeat: Which use of its item every example is, ``int32[K, B]``.
    """

    batches: dict[str, Any]
    repeat: Any

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "HostInput":
        """Returns the input made of host batches with the echo's tags."""
        # Only the host needs to know which fresh item an example is.
        names = batches[0].keys() - {"fresh_index"}
        arrays = {name: _stack([b[name] for b in batches]) for name in sorted(names)}
        return cls(repeat=arrays.pop("repeat"), batches=arrays)

    def with_repeat(self, repeat: np.ndarray) -> "HostInput":
        """See `Input`."""
        return self._replace(repeat=repeat)


@dataclass(frozen=True)
class HostBatching:
    """Hands on the batches that the host made.

    Attributes:
      mesh: The devices, over which examples are split.
    """

    mesh: Mesh

    @property
    def arrays_sharding(self) -> NamedSharding:
        """See `Batching`; of nothing."""
        return replicated(self.mesh)

    @property
    def input_sharding(self) -> NamedSharding:
        """See `Batching`."""
        return group_sharding(self.mesh)

    def __call__(self, arrays: Any, inputs: HostInput) -> list[Batch]:
        """See `Batching`; there are no arrays."""
        return [
            {name: x[k] for name, x in inputs.batches.items()}
            | {"repeat": inputs.repeat[k]}
            for k in range(len(inputs.repeat))
        ]

    def send(self, inputs: HostInput) -> HostInput:
        """See `Batching`."""
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(inputs))
        if num_bytes < _SENT_AHEAD_BYTES and jax.process_count() == 1:
            return inputs
        return put(inputs, self.input_sharding)

    def hold(self, inputs: HostInput) -> HostInput:
        """See `Batching`; the host counts by the repeats."""
        return put(inputs, self.input_sharding).with_repeat(inputs.repeat)


class HostFeed:
    """The batches that the host's pipeline made.

    Attributes:
      batching: See `Feed`.
      arrays: None are kept: ``()``.
      num_lanes: 0.
      skipped: See `Feed`.
    """

    num_lanes = 0
    arrays = ()

    def __init__(
        self,
        batches: JoinedBatches,
        mesh: Mesh,
        *,
        sample: Batch,
        shards: Sequence[DataShard] = (SINGLE,),
    ):
        """Reads nothing yet.

        Args:
          batches: With the echo's tags.
          mesh: The devices.
          sample: A batch like those.
          shards: Of the data, that the batches are joined from.
        """
        self._shards = shards
        self.batching = HostBatching(mesh)
        self._batches = batches
        self._sample = sample
        self.skipped: list[BadItem] = []

    def take(self, num_updates: int) -> HostInput | None:
        """See `Feed`."""
        batches = list(itertools.islice(self._batches, num_updates))
        if len(batches) < num_updates:
            return None
        self.skipped = []
        if self._batches.has_bad:
            tags = ([b[name] for b in batches] for name in ("fresh_index", "repeat"))
            self.skipped = self._batches.take_bad(*map(_stack, tags))
        return HostInput.of(batches)

    @property
    def logs(self) -> dict[int, DecisionLog]:
        """See `Feed`."""
        states = zip(self._shards, self._batches.get_state(), strict=True)
        logs = {
            shard.index: log_of(state) for shard, state in states if "plan" in state
        }
        return {number: log for number, log in logs.items() if log is not None}

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        """See `Feed`."""
        return self._batches.t_up_bounds

    def hold(self, num_updates: int) -> HostInput:
        """See `Feed`: the sample."""
        return HostInput.of([self._sample] * num_updates)

    def get_state(self) -> list[Any]:
        """See `Feed`."""
        return self._batches.get_state()

    # An iterator may be interrupted in the middle of a batch.
    state_before_take = get_state

    def set_state(self, state: list[Any]) -> None:
        """See `Feed`."""
        self._batches.set_state(state)

    def close(self) -> None:
        """See `Feed`."""
        self._batches.close()


class HeldFeed:
    """Hands out one batch of another feed, for ever: the ceiling of speed.

    The batch lies on the devices, so nothing is read, made or sent but the first
    time. The first update is the one fresh use; all others are repeats.

    Attributes:
      batching: The other feed's.
      arrays: The other feed's.
      num_lanes: The other feed's.
      logs: Empty: nothing is decided.
      t_up_bounds: Those of what is not seen: nothing is read.
      skipped: Nothing.
    """

    logs: Mapping[int, DecisionLog] = MappingProxyType({})
    t_up_bounds = UNSEEN
    skipped = ()

    def __init__(self, feed: Feed):
        """Takes over a feed."""
        self._feed = feed
        self.batching = feed.batching
        self.num_lanes = feed.num_lanes
        self._held: dict[int, Any] = {}
        self._done = 0

    @property
    def arrays(self) -> Any:
        """See `Feed`."""
        return self._feed.arrays

    def take(self, num_updates: int) -> Any:
        """See `Feed`."""
        held = self.hold(num_updates)
        number = np.arange(self._done, self._done + num_updates, dtype=np.int32)
        self._done += num_updates
        return held.with_repeat(np.repeat(number[:, None], held.repeat.shape[1], 1))

    def hold(self, num_updates: int) -> Any:
        """See `Feed`."""
        if num_updates not in self._held:
            self._held[num_updates] = self.batching.hold(self._feed.hold(num_updates))
        return self._held[num_updates]

    def get_state(self) -> list[Any]:
        """Refuses: a run on one batch is not worth saving.

        Raises:
          TypeError: Always.
        """
        raise TypeError("a feed that holds one batch has no state to save")

    def state_before_take(self) -> None:
        """See `Feed`."""

    def set_state(self, state: list[Any]) -> None:
        """Refuses: there is no state.

        Raises:
          TypeError: Always.
        """
        raise TypeError("a feed that holds one batch has no state to restore")

    def close(self) -> None:
        """See `Feed`."""
        self._feed.close()


def _stack(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Stacks arrays; a single one is not copied."""
    return np.asarray(arrays[0])[None] if len(arrays) == 1 else np.stack(arrays)
