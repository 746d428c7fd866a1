"""Batch norm's statistics, recomputed for the parameters that are evaluated.

Moving averages belong to parameters that have changed since. With averaged replicas,
they belong to each replica's own parameters. Instead, some fresh batches go through the
model as it is (Wu and Johnson 2021, section 3; Akiba et al. 2017 do so at the end of a
training).
"""

from collections.abc import Iterator
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.processes.distributed import this_shard
from echo_jax.training.processes.sharding import put_batch
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.workloads.base import Batch, Workload

_TAGS = ("fresh_index", "repeat")


def check_norm(config: Config, compiled: CompiledFunctions, workload: Workload) -> None:
    """Raises ValueError if the config sets batch.norm without a batch norm."""
    norm = config.batch.norm
    model = jax.eval_shape(compiled.model, compiled.abstract_state)
    if norm != "moving" and not jax.tree.leaves(model.model_state):
        raise ValueError(
            f"config.batch.norm={norm!r} needs a model with batch norm, which that of "
            f"workload {workload.name!r} has not; set --config.batch.norm=moving"
        )


def with_recomputed_statistics(
    config: Config,
    compiled: CompiledFunctions,
    model: Any,
    workload: Workload,
    watchdog: Watchdog,
) -> Any:
    """Returns a model whose batch norms have the statistics of fresh batches."""
    found: list[Any] = []
    count = config.batch.norm_batches
    # Always the first batches of a new iterator, augmented as in training. So a resumed
    # run evaluates alike, and the run's own data does not move.
    for batch in fresh_batches(config, workload, watchdog, count, "for batch norm"):
        arrays = {name: x for name, x in batch.items() if name not in _TAGS}
        # At most two batches are in memory.
        jax.block_until_ready(found[-1:])
        found.append(compiled.statistics(model, put_batch(arrays, compiled.mesh)))
    return model.replace(model_state=compiled.merge(found))


def fresh_batches(
    config: Config, workload: Workload, watchdog: Watchdog, count: int, purpose: str
) -> Iterator[Batch]:
    """Yields the first batches of a new iterator without an echo; watches each wait."""
    dataset = workload.train_dataset(unechoed(config), this_shard())
    with watchdog.closing(JoinedBatches([dataset])) as batches:
        for number in range(count):
            what = f"batch {number + 1} of {count} {purpose}"
            with watchdog.waiting(what):
                batch = next_batch(batches, workload, f"before {what}")
            yield batch
