"""Measures the seconds per fresh batch and the seconds per training step of a run."""

import statistics
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import jax

from echo_jax.config import Config
from echo_jax.config.echo import largest_factor
from echo_jax.echo.instrument.stopwatch import MAX_IN_FLIGHT, BoundedSteps, time_calls
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.dispatch import LOOP, Dispatch
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
    note: Callable[[str], Any] = lambda line: None,
) -> Rates:
    """Measures the loader, then the step; compiles the step."""
    loader = measure_loader(workload, config, most=most, watchdog=watchdog, note=note)
    with closing(held_feed(compiled, config, loader)) as feed:
        t_down_s = measure_step(compiled, state, feed, most=most)
    return Rates(t_up_s=loader.t_up_s, t_down_s=t_down_s)


def held_feed(compiled: CompiledFunctions, config: Config, loader: Loader) -> Feed:
    """Opens a feed for `Feed.hold` alone."""
    # If the config leaves the factor open, the largest one is used here. It can only
    # change the size of a buffer.
    return open_feed(
        config,
        loader.workload,
        compiled.mesh,
        factor=largest_factor(config),
        sample=loader.sample,
    )


def measure_step(
    compiled: CompiledFunctions,
    state: Any,
    feed: Feed,
    *,
    dispatch: Dispatch = LOOP,
    most: int = QUICK_CALLS,
) -> float:
    """Returns the median seconds per step on a held input; compiles the step."""
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
    # All processes must make the same number of steps, or some would wait forever.
    alone = jax.process_count() == 1
    down = time_calls(
        lambda: steps(dispatch.steps),
        # As many steps are in flight as in training.
        settle_calls=MAX_IN_FLIGHT,
        window_s=BUDGET_S,
        least=LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    # The median, because another process may have disturbed some steps.
    return broadcast_from_first(statistics.median(down) / dispatch.steps)
