"""How starved a trainer is: seconds per fresh batch against seconds per step."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from echo_jax.config import Config, check_config
from echo_jax.training.setup import Setup, make_echo_spec, make_setup, next_batch
from echo_jax.training.state import TrainState
from echo_jax.workloads.base import Batch, Workload

__all__ = ["Rates", "calibrate", "measure_rates"]

_MAX_IN_FLIGHT = 2
_BUDGET_S = 2.0
_MIN_REPEATS, _MAX_REPEATS = 3, 20


@dataclass(frozen=True)
class Rates:
    """The two speeds of a run.

    Attributes:
      t_up_s: Seconds per fresh batch of the input pipeline alone.
      t_down_s: Seconds per training step with the batch held in host memory: the
        transfer to the devices is part of a step, making the batch is not.
    """

    t_up_s: float
    t_down_s: float

    @property
    def ratio(self) -> float:
        """R of the paper: above 1 the trainer waits for its input."""
        return self.t_up_s / self.t_down_s


def calibrate(config: Config, workload: Workload) -> Rates:
    """Measures the rates of a config without training it.

    Args:
      config: A training config.
      workload: Made from this config.

    Returns:
      The rates on this machine, now.
    """
    check_config(config)
    setup = make_setup(config, workload)
    state = setup.program.init(setup.init_key)
    return measure_rates(setup, state, workload, config)


def measure_rates(
    setup: Setup, state: TrainState, workload: Workload, config: Config
) -> Rates:
    """Measures the loader alone, then the step alone; compiles the step.

    The loader is a pipeline of its own with echo factor 1, thrown away afterwards,
    and steps run on a copy of the state: the run itself is not touched.

    Args:
      setup: The run's functions.
      state: Not changed.
      workload: Makes the pipeline.
      config: The run's config.

    Returns:
      The rates. t_up is a mean, for a bursty storage is slow in its mean; t_down is
      a median, for a step that something else disturbed says nothing.
    """
    spec = replace(make_echo_spec(config), factor=1, order="consecutive", buffer=1)
    iterator = iter(workload.train_dataset(spec))

    def load() -> Batch:
        return next_batch(iterator, workload, "while it was measured")

    try:
        batch = load()  # Starts threads, fills caches.
        up = _time_repeats(load)
    finally:
        iterator.close()

    state = setup.program.copy(state)
    state, report = setup.step(state, batch)  # Compiles.
    jax.block_until_ready(report)
    in_flight = deque()

    def step() -> None:
        nonlocal state
        state, report = setup.step(state, batch)
        in_flight.append(report)
        if len(in_flight) > _MAX_IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())

    for _ in range(_MAX_IN_FLIGHT):
        step()
    # From here on as many steps are in flight as in training.
    down = _time_repeats(step)
    jax.block_until_ready(state)
    return Rates(t_up_s=statistics.mean(up), t_down_s=statistics.median(down))


def _time_repeats(call: Callable[[], Any]) -> list[float]:
    """Returns the seconds of each of some calls, within a budget of time."""
    seconds = []
    start = time.perf_counter()
    for done in itertools.count(1):
        before = time.perf_counter()
        call()
        now = time.perf_counter()
        seconds.append(now - before)
        in_budget = now - start < _BUDGET_S and done < _MAX_REPEATS
        if done >= _MIN_REPEATS and not in_budget:
            return seconds
    raise AssertionError("itertools.count ended")
