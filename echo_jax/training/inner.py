"""Inner steps: several updates for each dispatch, where that is faster.

Starting a program costs tens of microseconds, or more with many arrays. A small
model computes its update in less, so that the device waits for the host. Several
updates in one program share the cost: `unroll` writes them one after the other,
`scan` loops over one copy on the device. Which is fastest depends on model and
backend, and belief is no guide: on a CPU a convolution inside of a scan ran 19
times slower than outside, and a small dense network 4 times faster. So it is timed.

A group of updates is one update to the host, which can neither evaluate, nor save,
nor log inside of it. Groups start at multiples of their size, and updates that no
whole group fits around are dispatched one by one, so that the groups of a run do not
depend on where it was stopped.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp

__all__ = [
    "LOOP",
    "Inner",
    "Strategy",
    "Timing",
    "best_group_size",
    "fastest",
    "several_updates",
]

Strategy = Literal["loop", "unroll", "scan"]
State = TypeVar("State")
Name = TypeVar("Name", bound=str)

# Larger groups gain little more, and are late to react to a signal.
_MOST_UPDATES = 8
_HORIZON = 1000
# What is timed must be long beside the clock and the scheduler, in seconds.
_LEAST_S = 0.01
_ROUNDS = 7
_CLEARLY_FASTER, _HOPELESS = 0.97, 2.0


@dataclass(frozen=True)
class Inner:
    """How the updates of a run are dispatched.

    Attributes:
      strategy: What a group of updates is compiled to.
      updates: Updates in a group; 1 in a loop.
    """

    strategy: Strategy
    updates: int

    def group(self, done: int, *, total: int, stops: Sequence[int]) -> int:
        """Returns how many updates to dispatch next: a whole group, or 1.

        Args:
          done: Updates done.
          total: Updates of the run.
          stops: The host wants the state after every so many updates; 0 never.

        Example:
          >>> inner = Inner("scan", 4)
          >>> [inner.group(done, total=100, stops=[10]) for done in (4, 8, 9, 12)]
          [4, 1, 1, 4]
        """
        end = done + self.updates
        if done % self.updates or end > total:
            return 1
        inside = any(every and (end - 1) // every > done // every for every in stops)
        return 1 if inside else self.updates


LOOP = Inner("loop", 1)
"""One dispatch for each update."""


def best_group_size(total: int, stops: Sequence[int]) -> int:
    """Returns the group size, at most 8, with which a run has the fewest dispatches.

    Args:
      total: Updates of the run.
      stops: See `Inner.group`.

    Example:
      >>> best_group_size(1000, [50, 100]), best_group_size(1000, [1])
      (5, 1)
    """
    horizon = min(total, _HORIZON)

    def dispatches(size: int) -> int:
        return sum(1 for _ in _groups(Inner("scan", size), horizon, total, stops))

    return min(range(1, min(total, _MOST_UPDATES) + 1), key=dispatches)


def _groups(
    inner: Inner, horizon: int, total: int, stops: Sequence[int]
) -> Iterator[int]:
    done = 0
    while done < horizon:
        yield (size := inner.group(done, total=total, stops=stops))
        done += size


def several_updates(
    update: Callable[[State, Any], tuple[State, Any]],
    state: State,
    batches: Sequence[Any],
    *,
    scan: bool,
) -> tuple[State, Any]:
    """Performs updates one after the other; to be traced.

    Args:
      update: ``(state, batch) -> (state, report)``, a pure function.
      state: Before the first of them.
      batches: One for each, with the same shapes.
      scan: Whether to loop over one copy of `update`, instead of writing it so often.

    Returns:
      The last state, and the report of the last update.
    """
    if scan and len(batches) > 1:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
        state, reports = jax.lax.scan(update, state, stacked)
        return state, jax.tree.map(lambda x: x[-1], reports)
    report = None
    for batch in batches:
        state, report = update(state, batch)
    return state, report


@dataclass(frozen=True)
class Timing(Generic[Name]):
    """What `fastest` found.

    Attributes:
      name: Which one is to be used.
      relative: Seconds of every one, relative to the first: the median of all rounds.
    """

    name: Name
    relative: Mapping[Name, float]


def fastest(runs: Mapping[Name, Callable[[int], object]]) -> Timing[Name]:
    """Times functions that do the same work in turn; the first is the one to beat.

    Another one is taken only if it is clearly faster: by more than 3 %, and faster in
    all rounds but one. So a choice never costs anything but its own time: the
    compilations, and about 0.1 s for each function, or seven calls where one takes
    longer than 10 ms.

    Args:
      runs: By name, functions that do the work so many times, and wait for it.

    Example:
      >>> fastest({"slow": lambda n: time.sleep(n / 50), "fast": lambda n: None}).name
      'fast'
    """
    names = list(runs)
    for run in runs.values():
        run(1)  # Compiles.
    baseline = runs[names[0]]
    times = 1
    while (once := _seconds(baseline, times)) < _LEAST_S:
        times *= 2 if once <= 0 else max(2, min(1000, round(_LEAST_S / once)))
    ratios: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(_ROUNDS):
        # A convolution in a scan may take 19 times as long: once is enough to know.
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
