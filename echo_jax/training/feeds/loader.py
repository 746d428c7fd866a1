"""Measures the loader of a run alone."""

import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.echo.instrument.measure import time_calls
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.processes.distributed import all_gather
from echo_jax.training.processes.stop import Watchdog
from echo_jax.workloads.base import Batch, Workload

# Seconds and calls to measure the loader, and the step. A training run starts with at
# most QUICK_CALLS.
BUDGET_S = 2.0
LEAST_CALLS, QUICK_CALLS = 3, 20


@dataclass(frozen=True)
class Loader:
    """A measured loader.

    Attributes:
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      sample: A batch, in host memory.
    """

    workload: Workload
    t_up_s: float
    sample: Batch


def measure_loader(
    workload: Workload,
    config: RunSpec,
    *,
    shards: Sequence[DataShard] = (SINGLE,),
    most: int = QUICK_CALLS,
    watchdog: Watchdog,
) -> Loader:
    """Measures the pipeline up to the echo."""

    def load() -> Batch:
        with watchdog.waiting("a batch, to see how fast they come"):
            return next_batch(batches, workload, "while it was measured")

    with watchdog.closing(_upstream(workload, config, shards)) as batches:
        sample = load()  # Starts threads, fills caches.
        # Threads that began together end together, so batches come in groups. The rest
        # of a group comes in no time after its first batch.
        together = max(1, batches.held)
        for _ in range(batches.held):
            load()
        up = time_calls(
            load,
            window_s=BUDGET_S,
            least=LEAST_CALLS,
            most=math.ceil(most / together) * together,
            stride=together,
        )
    # The mean, because slow storage may come in bursts. The slowest process counts,
    # because the others wait for it. A part of a batch takes that part of the time.
    parts = config.batch.parts(0)
    return Loader(workload, max(all_gather(statistics.mean(up))) / parts, sample)


def take_sample(workload: Workload, config: RunSpec) -> Batch:
    """Returns a batch of the data upstream of a run's feed; measures nothing."""
    with closing(_upstream(workload, config, (SINGLE,))) as batches:
        return next_batch(batches, workload, "before its first batch")


def _upstream(
    workload: Workload, config: RunSpec, shards: Sequence[DataShard]
) -> JoinedBatches:
    if config.echo.buffer_on == "device":
        return JoinedBatches([workload.fresh_dataset(shard) for shard in shards])
    spec = unechoed(config)
    return JoinedBatches([workload.train_dataset(spec, shard) for shard in shards])


def next_batch(iterator: Iterator[Batch], workload: Workload, when: str) -> Batch:
    """Returns the next training batch, or raises the error of `data_ended`."""
    batch = next(iterator, None)
    if batch is None:
        raise data_ended(workload, when)
    return batch


def data_ended(workload: Workload, when: str) -> ValueError:
    """Returns the error "the training data of a workload ended `when`"."""
    return ValueError(
        f"the training data of workload {workload.name!r} ended {when}; "
        "it must repeat without end"
    )


def unechoed(config: RunSpec) -> EchoSpec:
    """Returns an echo of factor 1, to use instead of the config's echo."""
    is_of_batches = config.echo.stage == "batch"
    return EchoSpec(batch_size=1 if is_of_batches else config.batch_size)
