"""Follows the first examples of a training through their uses, without training."""

import itertools
import math
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import closing
from typing import NamedTuple

import jax
import numpy as np

from echo_jax.config.run import RunSpec
from echo_jax.training.arrays import make_mesh
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import next_batch
from echo_jax.training.feeds.of_config import EchoedData, open_feed
from echo_jax.workloads.base import Batch, Workload


class Use(NamedTuple):
    """A use of an example."""

    update: int  # Counted from 1.
    repeat: int  # 0 for the first use, then 1, 2, and so on.
    example: Batch  # Its arrays by name, without the axis of the batch.


class _Update(NamedTuple):
    """The batch of an update, and keys that identify its examples while in use."""

    batch: Batch
    items: Sequence[Hashable]
    repeat: np.ndarray


def first_uses(
    config: RunSpec,
    workload: Workload,
    *,
    examples: int,
    most_updates: int,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> list[list[Use]]:
    """Returns the uses of the first batch's first examples, without training."""
    # Small batches are parts of the whole ones, so whole ones show the same examples.
    config = config.changed({"batch.boundaries": (), "batch.factors": ()})
    # An adaptive echo repeats by time. Nothing but reading takes time here, so it
    # repeats as much as it may.
    mode, factor = config.echo.mode, math.ceil(config.echo.factor)
    wanted = {"stochastic": math.inf, "adaptive": config.echo.max_uses}.get(
        mode, factor
    )
    found: list[list[Use]] = []
    in_use: dict[Hashable, list[Use]] = {}
    batches = _on_device if config.echo.buffer_on == "device" else _on_host
    with closing(batches(config, workload)) as updates:
        for number, update in enumerate(itertools.islice(updates, most_updates), 1):
            for row, item in enumerate(update.items):
                repeat = int(update.repeat[row])
                if repeat == 0:
                    # A new example has this key now, so the old one is not in use.
                    in_use.pop(item, None)
                    if number == 1 and len(found) < examples:
                        in_use[item] = []
                        found.append(in_use[item])
                if item in in_use:
                    example = {name: x[row] for name, x in update.batch.items()}
                    in_use[item].append(Use(number, repeat, example))
            on_progress("reading examples", number / most_updates)
            if all(len(uses) >= wanted for uses in in_use.values()):
                break
    return found


def _on_host(config: RunSpec, workload: Workload) -> Generator[_Update]:
    dataset = workload.train_dataset(config.echo.spec(config.batch_size))
    with closing(JoinedBatches([dataset])) as batches:
        for batch in batches:
            index, repeat = (np.asarray(batch[x]) for x in ("fresh_index", "repeat"))
            # An echo after the batch repeats whole batches. Then the index is the
            # batch's, and every use has the same rows.
            row = np.arange(len(index)) * (config.echo.stage == "batch")
            items = [*zip(index.tolist(), row.tolist(), strict=True)]
            yield _Update(_untagged(batch), items, repeat)


def _on_device(config: RunSpec, workload: Workload) -> Generator[_Update]:
    mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.batch_size)
    dataset = EchoedData.of(config, workload).dataset
    with closing(JoinedBatches([dataset])) as batches:
        sample = next_batch(batches, workload, "before its first batch")
    feed = open_feed(config, workload, mesh, sample=sample)
    # Jitted, as in the program of an update.
    batching = jax.jit(feed.batching)
    lanes = np.repeat(np.arange(feed.num_lanes), config.batch_size // feed.num_lanes)
    with closing(feed):
        while (inputs := feed.take(1)) is not None:
            slots, repeat, *_ = inputs[0]
            (batch,) = jax.device_get(batching(feed.arrays, inputs))
            items = [*zip(lanes.tolist(), slots.tolist(), strict=True)]
            yield _Update(_untagged(batch), items, repeat)


def _untagged(batch: Batch) -> Batch:
    tags = "fresh_index", "repeat"
    return {name: np.asarray(x) for name, x in batch.items() if name not in tags}
