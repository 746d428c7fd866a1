"""Which inner-step strategy a run uses: as configured, or by a short timing."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params

from echo_jax.config import Config
from echo_jax.echo.instrument.stopwatch import BoundedSteps
from echo_jax.training.feed import Feed
from echo_jax.training.inner import (
    LOOP,
    Inner,
    Strategy,
    best_group_size,
    fastest,
)
from echo_jax.training.setup import Setup
from echo_jax.training.state import TrainState
from echo_jax.training.step import StepReport

__all__ = [
    "choose_inner",
    "group_size",
    "log_stops",
]

_CLEARLY_SHORTER = 0.97
# Beside a longer step, the time of a dispatch does not show.
_LONG_STEP_S = 0.02
# Compiling takes about 1 ms for each operation, on a CPU core: a bound of seconds.
_MOST_OPERATIONS = 5000

# By the program, the batch and the size of a group.
_CHOSEN: dict[tuple[Any, int, int], tuple[Inner, str]] = {}


def log_stops(config: Config) -> tuple[int, ...]:
    """Returns after how many updates the host wants to see the state."""
    return config.log_every, config.eval_every, config.checkpoint_every


def group_size(config: Config) -> int:
    """Returns how many updates a dispatch of a run has at most.

    Args:
      config: A checked training config.

    Returns:
      1 where nothing but a loop may be used: a config of strategy ``loop``, or an
      adaptive echo, whose draws must not be decided ahead of time.
    """
    if config.inner.strategy == "loop" or config.echo.mode == "adaptive":
        return 1
    return config.inner.updates or best_group_size(config.updates, log_stops(config))


def choose_inner(
    config: Config,
    setup: Setup,
    state: TrainState,
    feed: Feed,
    *,
    step_s: float,
    data_s: float,
) -> tuple[Inner, str]:
    """Chooses how the updates of a run are dispatched.

    With ``inner.strategy="auto"`` the strategies are timed in turn on a copy of the
    state, see `fastest`. A step above 20 ms is not worth it, and what would take long
    to compile is not tried: ``scan`` holds one copy of the update, ``unroll`` one for
    each update of a group. Where updates wait for data, a faster step has nothing to
    give, and groups would make the demand for data uneven. Runs of one program in one
    process, such as the arms of a study, are timed once.

    Args:
      config: A checked training config.
      setup: The run's functions.
      state: Not changed.
      feed: From which nothing is taken; what its arrays hold is lost.
      step_s: Seconds of a step in a loop.
      data_s: Seconds until the upstream has made the data of another update.

    Returns:
      The choice, and a line that says why; none if there was nothing to choose.
    """
    size = group_size(config)
    if size == 1:
        return LOOP, ""
    if config.inner.strategy != "auto":
        return Inner(config.inner.strategy, size), ""
    if jax.process_count() > 1:
        return LOOP, "inner steps: loop; several processes would time them apart"
    if data_s > _CLEARLY_SHORTER * step_s:
        return LOOP, "inner steps: loop; updates wait for data, or nearly"
    key = (setup.program.updates(feed.draw), config.batch_size, size)
    if key not in _CHOSEN:
        _CHOSEN[key] = _timed_choice(setup, state, feed, size, step_s)
    return _CHOSEN[key]


def _timed_choice(
    setup: Setup, state: TrainState, feed: Feed, size: int, step_s: float
) -> tuple[Inner, str]:
    if step_s > _LONG_STEP_S:
        why = f"a step takes {step_s * 1e3:.0f} ms, dispatching it next to nothing"
        return LOOP, f"inner steps: loop; {why}"
    runs = _Runs(setup, setup.program.copy(state), feed, size)
    num_operations = _num_operations(setup.trace(state, feed).jaxpr.jaxpr)
    tried: dict[Strategy, Callable[[int], None]] = {"loop": runs.loop}
    if num_operations <= _MOST_OPERATIONS:
        tried["scan"] = runs.scan
    if num_operations * size <= _MOST_OPERATIONS:
        tried["unroll"] = runs.unroll
    if len(tried) == 1:
        why = f"an update of {num_operations} operations takes too long to compile"
        return LOOP, f"inner steps: loop; {why}"
    timing = fastest(tried)
    rest = ", ".join(f"{x:.2f} {name}" for name, x in timing.relative.items())
    of = f"updates in groups of {size}, relative seconds: {rest}"
    chosen = LOOP if timing.name == "loop" else Inner(timing.name, size)
    return chosen, f"inner steps: {chosen.strategy}; {of}"


class _Runs:
    """Groups of updates on a copy of the state, by every strategy."""

    def __init__(self, setup: Setup, state: TrainState, feed: Feed, size: int):
        self._setup, self._state = setup, state
        self._feed, self._size = feed, size

    def loop(self, groups: int) -> None:
        """Performs so many groups, an update at a time, and waits for them."""
        self._run(groups * self._size, 1, scan=False)

    def unroll(self, groups: int) -> None:
        """Performs so many groups, a group at a time, and waits for them."""
        self._run(groups, self._size, scan=False)

    def scan(self, groups: int) -> None:
        """As `unroll`, but each group is a loop on the device."""
        self._run(groups, self._size, scan=True)

    def _run(self, times: int, num_updates: int, *, scan: bool) -> None:
        def start(inputs: Any) -> StepReport:
            self._state, report = self._setup.update(
                self._state, self._feed, inputs, scan=scan
            )
            return report

        steps = BoundedSteps(start, jax.block_until_ready)
        for _ in range(times):
            steps(self._feed.hold(num_updates))
        jax.block_until_ready(self._state)


def _num_operations(jaxpr: Any) -> int:
    """Counts equations; of those that hold others, the inner ones."""
    total = 0
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        total += sum(map(_num_operations, inner)) if inner else 1
    return total
