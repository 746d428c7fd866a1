"""Feeds: the connection between the data and the jitted program.

A feed hands out the *input* of the next updates, a pytree that goes to the devices.
Its `Batching`, traced into the program, turns the input into batches. A feed may also
keep ``arrays`` on the devices, which the program reads. So the loop treats a feed of
host batches and a feed of an echo on the devices alike.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from grain import IterDataset
from jax.sharding import Mesh, NamedSharding

from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.decision_log import DecisionLog, log_of
from echo_jax.training.arrays import group_sharding, put, replicated
from echo_jax.workloads.base import Batch

# Smaller inputs are sent by the call that uses them, which saves two thirds of the
# host's work for a small step. This call would copy larger inputs.
_SENT_AHEAD_BYTES = 1 << 20
# Bounds on a time of which nothing was seen.
_UNSEEN = (0.0, math.inf)


# A static argument of the program, so that runs share compilations by its value.
class Batching(Protocol):
    """Makes batches in a program; hashable, and equal by value."""

    # The sharding of a feed's arrays, or a tree of shardings.
    @property
    def arrays_sharding(self) -> Any: ...
    # The sharding of an input, or a tree of shardings.
    @property
    def input_sharding(self) -> Any: ...
    # Returns one batch with ``"repeat"`` for each update.
    def __call__(self, arrays: Any, inputs: Any) -> Sequence[Batch]: ...
    # The use index of this process' examples, int32[K, B], on the host.
    def repeats(self, inputs: Any) -> Any: ...
    # Starts the transfer of an input to the devices; need not wait for it.
    def send(self, inputs: Any) -> Any: ...


class Feed(Protocol):
    """Hands out inputs."""

    # The lanes of an echo on the devices, over all processes; 0 without one.
    num_lanes: int

    # The arrays on the devices; `take` and `hold` may replace them.
    @property
    def arrays(self) -> Any: ...
    @property
    def batching(self) -> Batching: ...

    # The decisions of an adaptive echo, by the index of this process' shards.
    @property
    def logs(self) -> Mapping[int, DecisionLog]: ...
    # Seconds per fresh batch up to the echo, at least and at most, so far.
    @property
    def t_up_bounds(self) -> tuple[float, float]: ...
    # Waits for the input of the next updates; returns None if the data ended.
    def take(self, num_updates: int) -> Any: ...
    # Returns an input like `take`, always of the same data; takes nothing.
    def hold(self, num_updates: int) -> Any: ...
    # Returns plain data for `set_state`, one item for each shard.
    def get_state(self) -> list[Any]: ...
    # Continues as the feed that gave the state would have.
    def set_state(self, state: list[Any]) -> None: ...
    # Stops reading ahead.
    def close(self) -> None: ...


class JoinedBatches(Iterator[Batch]):
    """Joins the rows of all shards of every batch, in order, until a shard ends."""

    copies = True  # The pipeline makes new arrays for every batch.

    def __init__(self, datasets: Sequence[IterDataset]):
        self._iterators = [iter(dataset) for dataset in datasets]
        self._fresh_times = [getattr(each, "fresh_time", None) for each in datasets]

    @property
    def t_up_bounds(self) -> tuple[float, float]:
        """Seconds per fresh batch, at least and at most, so far."""
        bounds = [each.bounds() if each else _UNSEEN for each in self._fresh_times]
        # The slowest shard counts.
        low, high = np.max(bounds, axis=0).tolist()
        return low, high

    @property
    def held(self) -> int:
        """The maximum number of fresh batches that are ready or in progress."""
        return max([each.held_batches if each else 0 for each in self._fresh_times])

    def __next__(self) -> Batch:
        rows = [next(iterator) for iterator in self._iterators]
        if len(rows) == 1:
            return rows[0]
        return {name: np.concatenate([r[name] for r in rows]) for name in rows[0]}

    def get_state(self) -> list[Any]:
        return [iterator.get_state() for iterator in self._iterators]

    def set_state(self, state: Sequence[Any]) -> None:
        for iterator, own in zip(self._iterators, state, strict=True):
            iterator.set_state(own)

    def close(self) -> None:
        for iterator in self._iterators:
            # Grain's iterators have `close`; the iterator of a user need not.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()


@dataclass(frozen=True)
class HostBatching:
    """Passes on the batches that the host made."""

    mesh: Mesh

    @property
    def arrays_sharding(self) -> NamedSharding:
        return replicated(self.mesh)

    @property
    def input_sharding(self) -> NamedSharding:
        return group_sharding(self.mesh)

    def __call__(self, arrays: Any, inputs: Batch) -> list[Batch]:
        updates = range(len(inputs["repeat"]))
        return [{name: x[k] for name, x in inputs.items()} for k in updates]

    def repeats(self, inputs: Batch) -> Any:
        return inputs["repeat"]

    def send(self, inputs: Batch) -> Batch:
        num_bytes = sum([x.nbytes for x in inputs.values()])
        if num_bytes < _SENT_AHEAD_BYTES and jax.process_count() == 1:
            return inputs
        return put(inputs, self.input_sharding)


class HostFeed(JoinedBatches):
    """Hands out the batches of the host's pipeline; keeps no arrays on the devices."""

    num_lanes = 0
    arrays = ()

    def __init__(
        self,
        datasets: Sequence[IterDataset],
        mesh: Mesh,
        *,
        sample: Batch,
        shards: Sequence[DataShard] = (SINGLE,),
    ):
        super().__init__(datasets)
        self.batching = HostBatching(mesh)
        self._shards, self._sample = shards, sample

    def take(self, num_updates: int) -> Batch | None:
        batches = list(itertools.islice(self, num_updates))
        if len(batches) < num_updates:
            return None
        return stacked(batches)

    @property
    def logs(self) -> dict[int, DecisionLog]:
        states = zip(self._shards, self.get_state(), strict=True)
        logs = {
            shard.index: log_of(state) for shard, state in states if "plan" in state
        }
        return {number: log for number, log in logs.items() if log is not None}

    def hold(self, num_updates: int) -> Batch:
        return stacked([self._sample] * num_updates)


def stacked(batches: Sequence[Batch]) -> Batch:
    """Returns the input of updates on host batches, ``[K, B, ...]``."""
    # Only the host needs to know which fresh item an example is.
    first = {name: x for name, x in batches[0].items() if name != "fresh_index"}
    if len(batches) == 1:  # It is not copied.
        return {name: np.asarray(x)[None] for name, x in first.items()}
    return {name: np.stack([each[name] for each in batches]) for name in first}
