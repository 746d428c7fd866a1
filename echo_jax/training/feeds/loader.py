"""The loader of a run alone: how fast fresh batches come, and by how many threads."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from echo_jax.config import Config
from echo_jax.config.batch import BatchGrowth
from echo_jax.echo.instrument.stopwatch import time_calls
from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.processes.distributed import all_gather
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.workloads.base import Batch, Workload

__all__ = [
    "BUDGET_S",
    "LEAST_CALLS",
    "QUICK_CALLS",
    "Loader",
    "choose_threads",
    "data_ended",
    "measure_loader",
    "next_batch",
    "take_sample",
    "unechoed",
]

# For the loader, and for the step. A training run starts with a quick look.
BUDGET_S = 2.0
LEAST_CALLS, QUICK_CALLS = 3, 20
# A bound on what is tried.
_MOST_THREADS = 64
# The part of the time that twice the threads take at most, to be worth it.
_WORTH = 0.9


@dataclass(frozen=True)
class Loader:
    """How fast fresh batches come.

    Attributes:
      workload: Reads by so many threads.
      threads: Concurrent reads.
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      sample: A batch, in host memory.
    """

    workload: Workload
    threads: int
    t_up_s: float
    sample: Batch


def measure_loader(
    workload: Workload,
    config: Config,
    *,
    shards: Sequence[DataShard] = (SINGLE,),
    most: int = QUICK_CALLS,
    watchdog: Watchdog | None = None,
    note: Callable[[str], Any] = lambda line: None,
) -> Loader:
    """Measures the pipeline up to the echo alone.

    It is a pipeline of its own without echoing, thrown away afterwards. Where the
    config leaves ``data.threads`` open, it is measured for 1 thread, 2, 4, and so on,
    as long as twice the threads make batches come a tenth faster.

    Args:
      workload: Makes the pipeline.
      config: The run's config.
      shards: Of the data, that this process makes.
      most: Batches to measure at most.
      watchdog: Looks after the wait for each of them.
      note: Is told how many threads were chosen and why.

    Returns:
      The loader. Its t_up is a mean, for a bursty storage is slow in its mean; of
      several processes, that of the slowest, for which all others wait.

    Raises:
      ValueError: The threads are left open, and the workload does not say how it is
        read by more of them.
    """

    def measured(reading: Workload, threads: int) -> Loader:
        t_up_s, sample = _time_loader(reading, config, shards, most, watchdog)
        return Loader(reading, threads, t_up_s, sample)

    if config.data.threads != "auto":
        return measured(workload, config.data.threads)
    with_threads = workload.with_threads
    if with_threads is None:
        raise ValueError(
            f"config.data.threads='auto' needs a workload with with_threads, and that "
            f"of {workload.name!r} has none; set --config.data.threads=4, or what "
            "loads fastest"
        )
    tried: list[Loader] = []

    def seconds(threads: int) -> float:
        tried.append(measured(with_threads(threads), threads))
        return tried[-1].t_up_s

    threads = choose_threads(seconds)
    chosen = next(each for each in tried if each.threads == threads)
    times = ", ".join(f"{each.t_up_s * 1e3:.3g} ms by {each.threads}" for each in tried)
    note(f"data.threads={threads}: a fresh batch takes {times}")
    return chosen


def choose_threads(seconds: Callable[[int], float]) -> int:
    """Returns how many threads to read by.

    Args:
      seconds: Measures how long a fresh batch takes by so many threads.

    Returns:
      The fewest beyond which twice as many gain less than a tenth; a power of 2.

    Example:
      >>> choose_threads(lambda threads: max(1 / threads, 0.2))
      8
    """
    threads, took = 1, seconds(1)
    while threads < _MOST_THREADS:
        twice = seconds(2 * threads)
        if twice > _WORTH * took:
            break
        threads, took = 2 * threads, twice
    return threads


def take_sample(workload: Workload, config: Config) -> Batch:
    """Returns a batch of what is upstream of a run's feed, and measures nothing.

    Args:
      workload: Makes the pipeline.
      config: The run's config.

    Raises:
      ValueError: There is none.
    """
    watched = Watchdog()
    with (
        watched.closing(_upstream(workload, config, (SINGLE,))) as batches,
        watched.waiting("a batch, to see what is in it"),
    ):
        return next_batch(batches, workload, "before its first batch")


def _upstream(
    workload: Workload, config: Config, shards: Sequence[DataShard]
) -> JoinedBatches:
    if config.echo.where == "device":
        return JoinedBatches([workload.fresh_dataset(shard) for shard in shards])
    spec = unechoed(config)
    return JoinedBatches([workload.train_dataset(spec, shard) for shard in shards])


def _time_loader(
    workload: Workload,
    config: Config,
    shards: Sequence[DataShard],
    most: int,
    watchdog: Watchdog | None,
) -> tuple[float, Batch]:
    watched = watchdog or Watchdog()

    def load() -> Batch:
        when = "while it was measured"
        with watched.waiting("a batch, to see how fast they come"):
            return next_batch(batches, workload, when)

    with watched.closing(_upstream(workload, config, shards)) as batches:
        sample = load()  # Starts threads, fills caches.
        # Threads that began together end together: what they made while the sample was
        # awaited comes in no time, and so do the others of every so many batches.
        together = max(1, batches.held)
        up = time_calls(
            load,
            window_s=BUDGET_S,
            settle_calls=batches.held,
            least=LEAST_CALLS,
            most=math.ceil(most / together) * together,
            stride=together,
        )
    # An update that uses a part of a batch is fed by a part of that time.
    parts = BatchGrowth.of(config).parts(0)
    return max(all_gather(statistics.mean(up))) / parts, sample


def next_batch(iterator: Iterator[Batch], workload: Workload, when: str) -> Batch:
    """Returns the next training batch.

    Args:
      iterator: Over the training data.
      workload: Whose data it is.
      when: Ends the sentence "the data ended ..." of the error.

    Raises:
      ValueError: There is none.
    """
    batch = next(iterator, None)
    if batch is None:
        raise data_ended(workload, when)
    return batch


def data_ended(workload: Workload, when: str) -> ValueError:
    """Returns the error of training data that ended; see `next_batch`."""
    return ValueError(
        f"the training data of workload {workload.name!r} ended {when}; "
        "it must repeat without end"
    )


def unechoed(config: Config) -> EchoSpec:
    """Returns the echo of factor 1 in the place of the config's echo.

    Args:
      config: A checked training config.
    """
    is_of_batches = config.echo.after == "batch"
    return EchoSpec(batch_size=1 if is_of_batches else config.batch_size)
