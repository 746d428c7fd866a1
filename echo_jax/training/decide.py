"""Decisions at the start of a run: shards, threads, echo factor, and dispatch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.echo import echo_spec, largest_factor, leaves_factor_open
from echo_jax.echo.instrument.rates import advised_factor
from echo_jax.echo.shard import DataShard
from echo_jax.echo.spec import AdaptiveSpec, StochasticSpec
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.dispatch import LOOP, Dispatch, choose_dispatch
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
      threads: Concurrent reads.
      sample: A batch of the data upstream of the feed, on the host.
    """

    shards: Sequence[DataShard]
    feed: Feed
    dispatch: Dispatch
    factor: float
    threads: int
    rates: Rates
    sample: Batch

    def chosen(self) -> dict[str, Any]:
        """Returns the measured decisions, for ``environment.json``."""
        return {
            "echo_factor": self.factor,
            "dispatch": asdict(self.dispatch),
            "threads": self.threads,
        }


# A resumed run keeps the decisions in `before`, the host's part of its checkpoint. The
# threads alone are chosen again: they change no result, and the machine may differ.
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
    """Measures the rates, makes the open decisions, and compiles the programs."""
    num_shards = config.data.shards or jax.process_count()
    shards = own_shards(len(before["data"]) if before else num_shards)
    loader = measure_loader(
        workload, config, shards=shards, watchdog=watchdog, note=note
    )
    t_up_s = loader.t_up_s
    opened = partial(
        open_feed,
        config,
        loader.workload,
        compiled.mesh,
        sample=loader.sample,
        shards=shards,
        num_lanes=before["num_lanes"] if before else 0,
        note=note,
    )
    is_open = leaves_factor_open(config) and not before
    factor = before["factor"] if before else largest_factor(config)
    feed = opened(factor=factor)
    t_down_s = measure_step(compiled, state, feed)
    if before:
        dispatch, why = Dispatch(**before["dispatch"]), ""
    else:
        dispatch, why = choose_dispatch(
            config,
            compiled,
            state,
            feed,
            step_s=t_down_s,
            data_s=t_up_s / _most_updates(config, t_up_s / t_down_s),
        )
    if why:
        note(why)
    if dispatch != LOOP:
        t_down_s = measure_step(compiled, state, feed, dispatch=dispatch)
    rates = Rates(t_up_s=t_up_s, t_down_s=t_down_s)
    if is_open:
        # Free the buffer of the old feed first.
        feed.close()
        del feed
        factor = _advised(config, rates, note)
        feed = opened(factor=factor)
        for each in {LOOP, dispatch}:
            measure_step(compiled, state, feed, dispatch=each)  # Compiles.
    if isinstance(feed, GrowingFeed):
        # Compile each batch size now, because later this would stop the training.
        for held in feed.hold_sizes():
            jax.block_until_ready(compiled.step(compiled.copy(state), feed, held))
    return Decided(shards, feed, dispatch, factor, loader.threads, rates, loader.sample)


def _most_updates(config: Config, ratio: float) -> float:
    """Returns the maximum number of updates that use one fresh batch."""
    if config.data.hold_batch:
        return math.inf
    spec = echo_spec(config)
    if isinstance(spec, AdaptiveSpec):
        return spec.cap
    if isinstance(spec, StochasticSpec):
        ends = (spec.load.start, spec.load.end)
        return max(v if spec.load.quantity == "e" else 1 / v for v in ends)
    factor = largest_factor(config)
    return advised_factor(ratio, factor) if leaves_factor_open(config) else factor


def _advised(config: Config, rates: Rates, note: Callable[[str], None]) -> float:
    """Returns the echo factor that the rates advise."""
    # The measurement is not exact to more digits.
    factor = round(advised_factor(rates.ratio, config.echo.cap), 2)
    note(
        f"echo factor {factor:g}: a fresh batch takes {rates.ratio:.2f} times as long "
        f"as a step, and the cap is {config.echo.cap}"
    )
    return factor
