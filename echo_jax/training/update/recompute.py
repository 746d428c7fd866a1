"""Batch norm's statistics, recomputed for the parameters that are evaluated.

Moving averages are of parameters that have changed since, the more so the faster they
change, and of all replicas' own where these are averaged. Instead, some fresh batches
go through the model as it is (Wu and Johnson 2021, section 3; Akiba et al. 2017 do so
at the end of a training).
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

__all__ = ["check_norm", "with_recomputed_statistics"]

_TAGS = ("fresh_index", "repeat")


def check_norm(
    config: Config, compiled: CompiledFunctions[Any, Any], workload: Workload
) -> None:
    """Refuses a config that says what batch norm does where there is none.

    Args:
      config: A checked training config.
      compiled: Its functions.
      workload: Made from it.

    Raises:
      ValueError: It asks for other statistics than moving averages, and the model has
        nothing but parameters.
    """
    norm = config.batch.norm
    model = jax.eval_shape(compiled.model, compiled.abstract_state)
    if norm != "moving" and not jax.tree.leaves(model.model_state):
        raise ValueError(
            f"config.batch.norm={norm!r} needs a model with batch norm, which that of "
            f"workload {workload.name!r} has not; set --config.batch.norm=moving"
        )


def with_recomputed_statistics(
    config: Config,
    compiled: CompiledFunctions[Any, Any],
    model: Any,
    workload: Workload,
    watchdog: Watchdog,
) -> Any:
    """Returns a model whose batch norms have the statistics of fresh batches.

    They are the first ``config.batch.norm_batches`` of an iterator of its own, without
    an echo and augmented as in training: always the same, so that a resumed run
    evaluates alike, and the place of the training data stays where it is. The variance
    is that of all their examples: see `echo_jax.models.batch_norm.merged_statistics`.

    Args:
      config: A checked training config.
      compiled: The run's functions.
      model: From ``compiled.model``; not changed.
      workload: Made from the config.
      watchdog: Looks after the waits for the batches.

    Raises:
      ValueError: The data ended.
    """
    found: list[Any] = []
    for batch in _fresh_batches(config, workload, watchdog):
        arrays = {name: x for name, x in batch.items() if name not in _TAGS}
        # No more than two batches in memory.
        jax.block_until_ready(found[-1:])
        found.append(compiled.statistics(model, put_batch(arrays, compiled.mesh)))
    return model.replace(model_state=compiled.merge(found))


def _fresh_batches(
    config: Config, workload: Workload, watchdog: Watchdog
) -> Iterator[Batch]:
    num_batches = config.batch.norm_batches
    dataset = workload.train_dataset(unechoed(config), this_shard())
    with watchdog.closing(JoinedBatches([dataset])) as batches:
        for number in range(num_batches):
            what = f"batch {number + 1} of {num_batches} for batch norm"
            with watchdog.waiting(what):
                batch = next_batch(batches, workload, f"before {what}")
            yield batch
