"""How starved a trainer is: seconds per fresh batch against seconds per step."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config_echo import largest_factor
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT, BoundedSteps, time_calls
from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.dispatch import LOOP, Dispatch
from echo_jax.training.distributed import all_gather, broadcast_from_first
from echo_jax.training.feed import Feed, JoinedBatches
from echo_jax.training.feeds import open_feed
from echo_jax.training.watchdog import Watchdog
from echo_jax.workloads.base import Batch, Workload

__all__ = [
    "Rates",
    "data_ended",
    "measure_loader",
    "measure_rates",
    "measure_step",
    "next_batch",
    "unechoed",
]

# For the loader, and for the step. A training run starts with a quick look.
_BUDGET_S = 2.0
_LEAST_CALLS, _QUICK_CALLS = 3, 20
_TOGETHER_CALLS = 8


@dataclass(frozen=True)
class Rates:
    """The two speeds of a run.

    Attributes:
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      t_down_s: Seconds per training step with its input held. With an echo on the
        host that is a batch in host memory: its transfer to the devices is part of a
        step, making it is not. With one on the devices it is what they hold.
    """

    t_up_s: float
    t_down_s: float

    @property
    def ratio(self) -> float:
        """R of the paper: above 1 the trainer waits for its input."""
        return self.t_up_s / self.t_down_s


def measure_rates(
    compiled: CompiledFunctions,
    state: Any,
    workload: Workload,
    config: Config,
    *,
    most: int = _QUICK_CALLS,
    watchdog: Watchdog | None = None,
) -> Rates:
    """Measures the loader alone, then the step alone; compiles the step.

    Args:
      compiled: The run's functions.
      state: Not changed: steps run on a copy.
      workload: Makes the pipeline.
      config: The run's config. If it leaves the echo factor open, the largest that
        may be chosen takes its place, which only a buffer's size may depend on.
      most: Batches, and steps, to measure at most; two seconds' worth otherwise.
      watchdog: See `measure_loader`.

    Returns:
      The rates.
    """
    t_up_s, sample = measure_loader(workload, config, most=most, watchdog=watchdog)
    factor = largest_factor(config)
    feed = open_feed(config, workload, compiled.mesh, factor=factor, sample=sample)
    with closing(feed):
        t_down_s = measure_step(compiled, state, feed, most=most)
    return Rates(t_up_s=t_up_s, t_down_s=t_down_s)


def measure_loader(
    workload: Workload,
    config: Config,
    *,
    shards: Sequence[DataShard] = (SINGLE,),
    most: int = _QUICK_CALLS,
    watchdog: Watchdog | None = None,
) -> tuple[float, Batch]:
    """Measures the pipeline up to the echo alone.

    It is a pipeline of its own without echoing, thrown away afterwards.

    Args:
      workload: Makes the pipeline.
      config: The run's config.
      shards: Of the data, that this process makes.
      most: Batches to measure at most.
      watchdog: Looks after the wait for each of them.

    Returns:
      Seconds per fresh batch, t_up: a mean, for a bursty storage is slow in its mean;
      of several processes, that of the slowest, for which all others wait. And its
      first batch, in host memory.
    """
    if config.echo.where == "device":
        datasets = [workload.fresh_dataset(shard) for shard in shards]
    else:
        spec = unechoed(config)
        datasets = [workload.train_dataset(spec, shard) for shard in shards]

    watched = watchdog or Watchdog()

    def load() -> Batch:
        when = "while it was measured"
        with watched.waiting("a batch, to see how fast they come"):
            return next_batch(batches, workload, when)

    with watched.closing(JoinedBatches(datasets)) as batches:
        sample = load()  # Starts threads, fills caches.
        up = time_calls(load, window_s=_BUDGET_S, least=_LEAST_CALLS, most=most)
    return max(all_gather(statistics.mean(up))), sample


def measure_step(
    compiled: CompiledFunctions,
    state: Any,
    feed: Feed,
    *,
    dispatch: Dispatch = LOOP,
    most: int = _QUICK_CALLS,
) -> float:
    """Measures a training step with its input held; compiles it.

    Args:
      compiled: The run's functions.
      state: Not changed: steps run on a copy.
      feed: From which nothing is taken.
      dispatch: How updates are dispatched: a step of a group is its part of the time.
      most: Dispatches to measure at most.

    Returns:
      Seconds per step, t_down: a median, for a step that something else disturbed
      says nothing.
    """
    state = compiled.copy(state)

    def step(num_updates: int) -> Any:
        nonlocal state
        state, report = compiled.step(
            state, feed, feed.hold(num_updates), scan=dispatch.mode == "scan"
        )
        return report

    steps = BoundedSteps(step)
    steps(dispatch.steps)  # Compiles.
    steps.finish()
    # Processes that made different numbers of steps would wait for each other.
    alone = jax.process_count() == 1
    down = time_calls(
        lambda: steps(dispatch.steps),
        # So that as many steps are in flight as in training.
        settle_calls=MAX_IN_FLIGHT,
        window_s=_BUDGET_S,
        least=_LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    return broadcast_from_first(statistics.median(down) / dispatch.steps)


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
