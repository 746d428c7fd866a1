"""How starved a trainer is: seconds per fresh batch against seconds per step."""

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
    most: int = QUICK_CALLS,
    watchdog: Watchdog | None = None,
    note: Callable[[str], Any] = lambda line: None,
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
      note: See `measure_loader`.

    Returns:
      The rates.
    """
    loader = measure_loader(workload, config, most=most, watchdog=watchdog, note=note)
    with closing(held_feed(compiled, config, loader)) as feed:
        t_down_s = measure_step(compiled, state, feed, most=most)
    return Rates(t_up_s=loader.t_up_s, t_down_s=t_down_s)


def held_feed(compiled: CompiledFunctions, config: Config, loader: Loader) -> Feed:
    """Opens a feed from which nothing is taken; `Feed.hold` gives its input.

    Args:
      compiled: The run's functions.
      config: See `measure_rates`.
      loader: As it was measured.
    """
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
        window_s=BUDGET_S,
        least=LEAST_CALLS if alone else _TOGETHER_CALLS,
        most=most if alone else _TOGETHER_CALLS,
    )
    steps.finish()
    return broadcast_from_first(statistics.median(down) / dispatch.steps)
