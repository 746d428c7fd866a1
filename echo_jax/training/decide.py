"""The start of a run: its data shards, its feed, its rates, and compiled programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.echo.shard import DataShard
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed
from echo_jax.training.feeds.growing import GrowingFeed
from echo_jax.training.feeds.loader import measure_loader
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.measure import Rates, measure_step
from echo_jax.training.processes.distributed import own_shards
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.workloads.base import Batch, Workload

__all__ = ["Decided", "decide"]


@dataclass(frozen=True)
class Decided:
    """The decisions at the start of a run, and the feed that was made for them.

    Attributes:
      shards: The data shards that this process reads.
      feed: Not started yet.
      sample: A batch of the data upstream of the feed, on the host.
    """

    shards: Sequence[DataShard]
    feed: Feed
    rates: Rates
    sample: Batch


# `before` is the host's part of a checkpoint.
# The feed is not started: its threads would disturb the measurements.
def decide(
    config: Config,
    workload: Workload,
    compiled: CompiledFunctions,
    state: Any,
    *,
    before: Mapping[str, Any] | None,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> Decided:
    """Measures the rates, opens the feed, and compiles the programs."""
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
