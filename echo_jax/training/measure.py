"""Measures the seconds per fresh batch and the seconds per training step of a run."""

import statistics
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT, BoundedSteps, time_calls
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed
from echo_jax.training.feeds.loader import (
    BUDGET_S,
    LEAST_CALLS,
    QUICK_CALLS,
    Loader,
    measure_loader,
)
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.processes.distributed import broadcast_from_first
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.workloads.base import Workload

__all__ = ["Rates", "held_feed", "measure_rates", "measure_step"]

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


def measure_rates(
    compiled: CompiledFunctions,
    state: Any,
    workload: Workload,
    config: Config,
    *,
    most: int = QUICK_CALLS,
    watchdog: Watchdog | None = None,
) -> Rates:
    """Measures the loader, then the step; compiles the step."""
    loader = measure_loader(workload, config, most=most, watchdog=watchdog)
    with closing(held_feed(compiled, config, loader)) as feed:
        t_down_s = measure_step(compiled, state, feed, most=most)
    return Rates(t_up_s=loader.t_up_s, t_down_s=t_down_s)


def held_feed(compiled: CompiledFunctions, config: Config, loader: Loader) -> Feed:
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
    down = time_calls(
        lambda: steps(feed.hold(num_updates)),
        # As many steps are in flight as in training.
        settle_calls=MAX_IN_FLIGHT,
        window_s=BUDGET_S,
        least=LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    # The median, because another process may have disturbed some steps.
    return broadcast_from_first(statistics.median(down) / num_updates)
