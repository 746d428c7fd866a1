"""Dispatch: several updates in one program, where that is faster.

Starting a program costs tens of microseconds, or more with many arrays. A small model
computes its update in less time, so the device waits for the host. Several updates in
one program share the cost: `unroll` writes them one after the other, and `scan` loops
over one copy on the device. The fastest mode depends on the model and the backend, so
it is measured. On a CPU, a convolution inside a scan ran 19 times slower than outside
it, and a small dense network 4 times faster.

To the host a group of updates is one update: it cannot evaluate, save or log inside a
group. Groups start at multiples of their size. Updates around which no whole group
fits are dispatched one by one. So the groups of a run do not depend on where it was
stopped.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import jax
from jax.extend.core import jaxprs_in_params

from echo_jax.config import Config
from echo_jax.config.batch import BatchGrowth
from echo_jax.echo.instrument.stopwatch import BoundedSteps
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import Feed

__all__ = [
    "LOOP",
    "Dispatch",
    "Mode",
    "Timing",
    "best_group_size",
    "choose_dispatch",
    "fastest",
    "group_size",
    "log_stops",
]

Mode = Literal["loop", "unroll", "scan"]
Name = TypeVar("Name", bound=str)

# Larger groups gain little more, and react late to a signal.
_MOST_UPDATES = 8
_HORIZON = 1000
# A timed call must last this many seconds, long against the clock and the scheduler.
_LEAST_S = 0.01
_ROUNDS = 7
_CLEARLY_FASTER, _HOPELESS = 0.97, 2.0
_CLEARLY_SHORTER = 0.97
# With a longer step, in seconds, the time of a dispatch is negligible.
_LONG_STEP_S = 0.02
# Compiling takes about 1 ms per operation on a CPU core, so this is some seconds.
_MOST_OPERATIONS = 5000


@dataclass(frozen=True)
class Dispatch:
    """The mode of dispatch, and the number of updates in a group: 1 in a loop."""

    mode: Mode
    steps: int

    def group(self, done: int, *, total: int, stops: Sequence[int]) -> int:
        """Returns how many updates to dispatch next: a whole group, or 1."""
        # The host needs the state at every multiple of each stop; 0 is never.
        if self.steps == 1:
            return 1
        end = done + self.steps
        if done % self.steps or end > total:
            return 1
        inside = any(every and (end - 1) // every > done // every for every in stops)
        return 1 if inside else self.steps


LOOP = Dispatch("loop", 1)
"""One dispatch for each update."""


def best_group_size(total: int, stops: Sequence[int]) -> int:
    """Returns the group size, at most 8, with the fewest dispatches of a run."""
    horizon = min(total, _HORIZON)

    def dispatches(size: int) -> int:
        return sum(1 for _ in _groups(Dispatch("scan", size), horizon, total, stops))

    return min(range(1, min(total, _MOST_UPDATES) + 1), key=dispatches)


def _groups(
    dispatch: Dispatch, horizon: int, total: int, stops: Sequence[int]
) -> Iterator[int]:
    done = 0
    while done < horizon:
        yield (size := dispatch.group(done, total=total, stops=stops))
        done += size


@dataclass(frozen=True)
class Timing(Generic[Name]):
    """The fastest function, and every function's time relative to the first one's."""

    name: Name
    relative: Mapping[Name, float]


# Another function is chosen only if it is more than 3 % faster, and faster in all but
# one round. So a choice costs only its own time: the compilations, and about 0.1 s for
# each function, or seven calls if a call takes longer than 10 ms. A function is called
# with the number of times that it does its work.
def fastest(runs: Mapping[Name, Callable[[int], object]]) -> Timing[Name]:
    """Times functions that do the same work, in turn. The first is the baseline."""
    names = list(runs)
    for run in runs.values():
        run(1)  # Compiles.
    baseline = runs[names[0]]
    times = 1
    while (once := _seconds(baseline, times)) < _LEAST_S:
        times *= 2 if once <= 0 else max(2, min(1000, round(_LEAST_S / once)))
    ratios: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(_ROUNDS):
        # A convolution in a scan may take 19 times as long: one round is enough.
        alive = [name for name in names if max(ratios[name], default=1) < _HOPELESS]
        seconds = {
            name: _seconds(runs[name], times)
            for name in (alive if turn % 2 else reversed(alive))
        }
        for name in alive:
            ratios[name].append(seconds[name] / seconds[names[0]])
    relative = {name: statistics.median(ratios[name]) for name in names}
    best = names[0]
    for name in names[1:]:
        rarely_slower = sorted(ratios[name])[-2:][0] < 1
        if relative[name] < _CLEARLY_FASTER * relative[best] and rarely_slower:
            best = name
    return Timing(best, relative)


def _seconds(run: Callable[[int], object], times: int) -> float:
    start = time.perf_counter()
    run(times)
    return time.perf_counter() - start


def log_stops(config: Config) -> tuple[int, ...]:
    """Returns the intervals, in updates, after which the host needs the state."""
    return config.log_every, config.eval_every, config.checkpoint_every


def group_size(config: Config) -> int:
    """Returns the maximum number of updates in a dispatch of a run."""
    # An adaptive echo must not decide its draws ahead of time. Batches that grow have
    # several sizes. With local updates, the host chooses the program of each update.
    one_by_one = (
        config.dispatch.mode == "loop"
        or config.echo.mode == "adaptive"
        or bool(BatchGrowth.of(config))
        or config.local.schedule != "none"
    )
    if one_by_one:
        return 1
    return config.dispatch.steps or best_group_size(config.updates, log_stops(config))


# The key is the program, the batch size and the group size.
_CHOSEN: dict[tuple[Any, int, int], tuple[Dispatch, str]] = {}


def choose_dispatch(
    config: Config,
    compiled: CompiledFunctions,
    state: Any,
    feed: Feed,
    *,
    step_s: float,
    data_s: float,
) -> tuple[Dispatch, str]:
    """Returns the dispatch, and its reason; the reason is empty without a choice."""
    size = group_size(config)
    if size == 1:
        return LOOP, ""
    if config.dispatch.mode != "auto":
        return Dispatch(config.dispatch.mode, size), ""
    if jax.process_count() > 1:
        return LOOP, "dispatch: loop; several processes would time them apart"
    # If updates wait for data, a faster step gains nothing, and groups would make the
    # demand for data uneven.
    if data_s > _CLEARLY_SHORTER * step_s:
        return LOOP, "dispatch: loop; updates wait for data, or nearly"
    # Runs of one program in one process, such as the arms of a study, are timed once.
    key = (compiled.program(feed.batching), config.batch_size, size)
    if key not in _CHOSEN:
        _CHOSEN[key] = _timed_choice(compiled, state, feed, size, step_s)
    return _CHOSEN[key]


def _timed_choice(
    compiled: CompiledFunctions, state: Any, feed: Feed, size: int, step_s: float
) -> tuple[Dispatch, str]:
    if step_s > _LONG_STEP_S:
        why = f"a step takes {step_s * 1e3:.0f} ms, dispatching it next to nothing"
        return LOOP, f"dispatch: loop; {why}"
    runs = _Runs(compiled, compiled.copy(state), feed, size)
    num_operations = _num_operations(compiled.trace(state, feed).jaxpr.jaxpr)
    tried: dict[Mode, Callable[[int], None]] = {"loop": runs.loop}
    # A scan compiles one copy of the update, an unrolled group one for each update.
    if num_operations <= _MOST_OPERATIONS:
        tried["scan"] = runs.scan
    if num_operations * size <= _MOST_OPERATIONS:
        tried["unroll"] = runs.unroll
    if len(tried) == 1:
        why = f"an update of {num_operations} operations takes too long to compile"
        return LOOP, f"dispatch: loop; {why}"
    timing = fastest(tried)
    rest = ", ".join(f"{x:.2f} {name}" for name, x in timing.relative.items())
    of = f"updates in groups of {size}, relative seconds: {rest}"
    chosen = LOOP if timing.name == "loop" else Dispatch(timing.name, size)
    return chosen, f"dispatch: {chosen.mode}; {of}"


class _Runs:
    """Performs groups of updates on a copy of the state, in each mode."""

    def __init__(self, compiled: CompiledFunctions, state: Any, feed: Feed, size: int):
        self._compiled, self._state = compiled, state
        self._feed, self._size = feed, size

    def loop(self, groups: int) -> None:
        """Performs groups, one update per dispatch, and waits for them."""
        self._run(groups * self._size, 1, scan=False)

    def unroll(self, groups: int) -> None:
        """Performs groups, one group per dispatch, and waits for them."""
        self._run(groups, self._size, scan=False)

    def scan(self, groups: int) -> None:
        """As `unroll`, but each group is a loop on the device."""
        self._run(groups, self._size, scan=True)

    def _run(self, times: int, num_updates: int, *, scan: bool) -> None:
        def start(inputs: Any) -> Any:
            self._state, report = self._compiled.step(
                self._state, self._feed, inputs, scan=scan
            )
            return report

        steps = BoundedSteps(start, jax.block_until_ready)
        for _ in range(times):
            steps(self._feed.hold(num_updates))
        jax.block_until_ready(self._state)


def _num_operations(jaxpr: Any) -> int:
    """Counts equations; for those that hold others, the inner ones."""
    total = 0
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        total += sum(map(_num_operations, inner)) if inner else 1
    return total
