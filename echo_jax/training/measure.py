"""The start of a run: its feed, and the seconds per fresh batch and per step."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.echo.instrument.measure import MAX_IN_FLIGHT, BoundedSteps, time_calls
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed
from echo_jax.training.feeds.growing import GrowingFeed
from echo_jax.training.feeds.loader import (
    BUDGET_S,
    LEAST_CALLS,
    QUICK_CALLS,
    Loader,
    measure_loader,
)
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.processes.distributed import broadcast_from_first, own_shards
from echo_jax.training.processes.stop import Watchdog
from echo_jax.workloads.base import Batch, Workload

_TOGETHER_CALLS = 8


@dataclass(frozen=True)
class Rates:
    """The two speeds of a run.

    Attributes:
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      t_down_s: Seconds per training step on a held input. A batch in host memory is
        sent to the devices in this time, but not made in it.
    """

    t_up_s: float
    t_down_s: float

    @property
    def ratio(self) -> float:
        """R of the paper: above 1 the trainer waits for its input."""
        return self.t_up_s / self.t_down_s


class Decided(NamedTuple):
    """The decisions at the start of a run, and the feed that was made for them."""

    shards: Sequence[DataShard]  # Those that this process reads.
    feed: Feed  # Not started: its threads would disturb the measurements.
    rates: Rates
    sample: Batch  # A batch of the data upstream of the feed, on the host.


def decide(
    config: RunSpec,
    workload: Workload,
    compiled: CompiledFunctions,
    state: Any,
    *,
    before: Mapping[str, Any] | None,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> Decided:
    """Measures the rates, opens the feed, and compiles; `before` is a checkpoint's."""
    num_shards = config.data.shards or jax.process_count()
    shards = own_shards(len(before["data"]) if before else num_shards)
    loader = measure_loader(workload, config, shards=shards, watchdog=watchdog)
    feed = open_feed(
        config,
        loader.workload,
        compiled.mesh,
        sample=loader.sample,
        shards=shards,
        num_lanes=before["num_lanes"] if before else 0,
        note=note,
    )
    t_down_s = measure_step(compiled, state, feed)
    if (steps := config.dispatch.steps) > 1:
        t_down_s = measure_step(compiled, state, feed, num_updates=steps)
    if isinstance(feed, GrowingFeed):
        # Compile each batch size now, because later this would stop the training.
        for held in feed.hold_sizes():
            jax.block_until_ready(compiled.step(compiled.copy(state), feed, held))
    rates = Rates(t_up_s=loader.t_up_s, t_down_s=t_down_s)
    return Decided(shards, feed, rates, loader.sample)


def held_feed(compiled: CompiledFunctions, config: RunSpec, loader: Loader) -> Feed:
    """Opens a feed for `Feed.hold` alone."""
    return open_feed(config, loader.workload, compiled.mesh, sample=loader.sample)


def measure_step(
    compiled: CompiledFunctions,
    state: Any,
    feed: Feed,
    *,
    num_updates: int = 1,
    most: int = QUICK_CALLS,
) -> float:
    """Returns the median seconds per step on a held input; compiles the step."""
    state = compiled.copy(state)

    def step(inputs: Any) -> Any:
        nonlocal state
        state, report = compiled.step(state, feed, inputs)
        return report

    steps = BoundedSteps(step)
    steps(feed.hold(num_updates))  # Compiles.
    steps.finish()
    # All processes must make the same number of steps, or some would wait forever.
    alone = jax.process_count() == 1
    # As many steps are in flight as in training.
    for _ in range(MAX_IN_FLIGHT):
        steps(feed.hold(num_updates))
    down = time_calls(
        lambda: steps(feed.hold(num_updates)),
        window_s=BUDGET_S,
        least=LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    # The median, because another process may have disturbed some steps.
    return broadcast_from_first(statistics.median(down) / num_updates)
