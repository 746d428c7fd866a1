"""Measures a loader and a step, alone and together, and while a run trains.

A loader is timed by taking batches from it, a step by waiting for its output. Both are
calls that `time_calls` repeats. The probe needs only an iterable of batches and a step.
It is differential (after DS-Analyzer, Mohan et al. 2021): the loader is timed without a
step, the step without a loader, then both together. These take turns, so that a machine
that becomes slower affects all of them. The times are means, because throughput follows
from means.
"""

import dataclasses
import functools
import itertools
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echo_jax.echo.echo import echo
from echo_jax.echo.instrument.advice import (
    MeasuredRun,
    OptionNames,
    ProbeReport,
    StageTime,
    advise,
    how_to_echo,
)
from echo_jax.echo.instrument.rates import (
    StepTimes,
    advised_factor,
    contention,
    ratio_interval,
    step_times,
)
from echo_jax.echo.schedule import exact_fraction
from echo_jax.echo.spec import EchoSpec
from echo_jax.echo.tree import flatten

__all__ = [
    "MAX_IN_FLIGHT",
    "UNSEEN",
    "BoundedSteps",
    "FreshTime",
    "bounds_of_all",
    "probe",
    "time_calls",
    "wait_for",
    "within",
]

Now = Callable[[], float]
OnProgress = Callable[[str, float], None]

MAX_IN_FLIGHT = 2
"""Dispatches that may be under way whenever a loop waits, in training as here.

Enough to hide the host's work. With more, a host that runs ahead would be mistaken
for a fast device, and collectives of many queued steps can hang on few CPU cores."""

# Types of values that are computed when a step returns them.
_COMPUTED = (np.ndarray, np.generic, bool, int, float, complex)


def wait_for(output: Any) -> None:
    """Waits for all arrays in the output of a step; raises TypeError without any."""
    leaves = _leaves(output)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "block_until_ready")]
    if not arrays and not any(isinstance(leaf, _COMPUTED) for leaf in leaves):
        raise TypeError(
            f"the step returned a {type(output).__name__}, which says nothing about "
            "when the update is done; return the loss, or another array that the "
            "update computes"
        )
    for array in arrays:
        array.block_until_ready()


def _leaves(tree: Any) -> list[Any]:
    """Returns the leaves; dataclasses count as containers (flax states are such)."""
    leaves = []
    for _, leaf in flatten(tree):
        if hasattr(leaf, "block_until_ready") or not dataclasses.is_dataclass(leaf):
            leaves.append(leaf)
        else:
            fields = dataclasses.fields(leaf)
            leaves += _leaves([getattr(leaf, field.name) for field in fields])
    return leaves


class BoundedSteps:
    """Performs updates with at most two of them in flight."""

    def __init__(
        self, step: Callable[[Any], Any], wait: Callable[[Any], None] = wait_for
    ):
        self._step, self._wait = step, wait
        self._in_flight: deque[Any] = deque()

    def __call__(self, batch: Any) -> None:
        """Starts an update, and waits for the one before the last."""
        self._in_flight.append(self._step(batch))
        if len(self._in_flight) > MAX_IN_FLIGHT:
            self._wait(self._in_flight.popleft())

    def finish(self) -> None:
        """Waits for all updates."""
        while self._in_flight:
            self._wait(self._in_flight.popleft())


def time_calls(
    call: Callable[[], Any],
    *,
    window_s: float,
    settle_s: float = 0.0,
    settle_calls: int = 0,
    least: int = 2,
    most: int = 10_000,
    stride: int = 1,
    now: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Returns the seconds of every call in a window, from end to end."""
    # First come uncounted calls, then the calls of the window. Both end with a call, at
    # a moment that does not depend on later ones. So the expected time of a window is
    # its expected number of calls times the mean call, also if calls differ widely
    # (Wald's identity). For calls that differ in a cycle of `stride`, the window holds
    # whole cycles, unless that takes more than twice its time.
    start = now()
    settled = 0
    while settled < settle_calls or (now() - start < settle_s and settled < most):
        call()
        settled += 1
    ends = [now()]
    while True:
        call()
        ends.append(now())
        calls, elapsed_s = len(ends) - 1, ends[-1] - ends[0]
        if calls < least:
            continue
        is_aligned = calls % stride == 0 or elapsed_s >= 2 * window_s
        if calls >= most or (elapsed_s >= window_s and is_aligned):
            return [end - before for before, end in itertools.pairwise(ends)]


def endless(upstream: Iterable[Any]) -> Generator[Any, None, None]:
    """Yields the items of an iterable again and again; an iterator must not end."""
    iterator, taken = iter(upstream), 0
    # The caller's iterator is not closed here, and cannot start again.
    owned = iterator is not upstream
    while True:
        before = taken
        try:
            for item in iterator:
                taken += 1
                yield item
        finally:
            if owned and hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]
        if not owned:
            raise ValueError(
                f"the upstream, an iterator, ended after {taken} batches; give the "
                "iterable that it is from, which can be started again"
            )
        if taken == before:
            raise ValueError("the upstream is empty; give an iterable of batches")
        iterator = iter(upstream)


UNSEEN = (0.0, math.inf)
"""Bounds on a time of which nothing was seen."""


class FreshTime:
    """Bounds on the seconds that a pipeline takes for a fresh batch, its t_up.

    While its consumer waits, the pipeline works at full speed; in between it may work
    ahead, or have no room. So a batch takes at least the waiting time, and at most all
    time. In a starved run the bounds meet. The first element is left out, because
    threads start and caches fill before it.
    """

    def __init__(
        self,
        *,
        elements_per_batch: float,
        held: int,
        now: Callable[[], float] = time.perf_counter,
    ):
        """``held`` is the most elements that the pipeline has in progress or ready."""
        self.now = now
        self._per_batch, self._held = elements_per_batch, held
        # Elements, the seconds waited for them, and all seconds. They are one tuple,
        # because another thread reads it.
        self._seen = (0, 0.0, 0.0)
        self._last_s: float | None = None

    @property
    def held_batches(self) -> int:
        """The most fresh batches that the pipeline has in progress or ready."""
        return math.ceil(self._held / self._per_batch)

    def took(self, began_s: float) -> None:
        """Counts an element that has just come, after a wait since ``began_s``."""
        end_s = self.now()
        if self._last_s is not None:
            elements, waited_s, passed_s = self._seen
            waited_s += end_s - began_s
            passed_s += end_s - self._last_s
            self._seen = (elements + 1, waited_s, passed_s)
        self._last_s = end_s

    def restart(self) -> None:
        """Treats the next element as a first one again."""
        self._last_s = None

    def bounds(self) -> tuple[float, float]:
        """Returns the least and the most seconds that a fresh batch takes."""
        elements, waited_s, passed_s = self._seen
        # The least and the most elements that were made in the time.
        least, most = elements - self._held, elements + self._held
        low_s = waited_s / most if most else 0.0
        high_s = passed_s / least if least > 0 else math.inf
        return low_s * self._per_batch, high_s * self._per_batch


def bounds_of_all(bounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Returns bounds on the time of the slowest of several pipelines."""
    return max(low for low, _ in bounds), max(high for _, high in bounds)


def within(seconds: float, bounds: tuple[float, float]) -> float:
    """Returns an earlier measurement, moved into the bounds."""
    low, high = bounds
    return min(max(seconds, low), high)


# How the time is spent: rounds that measure rates, then rounds of runs with and without
# an echo, whose factor follows from the rates.
_RATE_ROUNDS, _RUN_ROUNDS = 5, 3
# A slow loader gets fewer rounds, if its least number of batches takes longer than the
# available time.
_LEAST_RATE_ROUNDS = 3
# Shares of the time of a single phase; times their rounds they add up to 1.
_STAGES_SHARE, _UP_SHARE, _DOWN_SHARE = 0.1, 0.055, 0.03
_TOGETHER_SHARE, _RUN_SHARE, _ECHO_SHARE = 0.045, 0.035, 0.05
# The step's share once slow steps with an unknown period were seen.
_LONG_DOWN_SHARE = 3 * _DOWN_SHARE

# Less than this may be noise.
_SLOWED = 1.15

# The uncounted part of a phase, in which a loader's buffers run empty or full again.
_SETTLE = 0.3


def probe(
    upstream: Iterable[Any],
    step: Callable[..., Any],
    *,
    state: Any = None,
    seconds: float = 20.0,
    max_uses: float = 4,
    stages: Mapping[str, Callable[[], Any]] | None = None,
    wait: Callable[[Any], None] | None = None,
    options: OptionNames | None = None,
    on_progress: OnProgress | None = None,
    now: Now = time.perf_counter,
    cpu_now: Now = time.thread_time,
) -> ProbeReport:
    """Measures how starved a trainer is, and advises a remedy.

    It trains while it measures: pass copies of everything that must not change.

    Args:
      upstream: The batches as the trainer gets them, pytrees of arrays. An iterable
        that ends is started again; an iterator must not end.
      step: Makes one update, ``step(batch) -> output``, or with a ``state``
        ``step(state, batch) -> (state, output, ...)``. The update must compute the
        output, such as the loss, because the probe waits for it. A batch is used
        several times, so the step must not donate it.
      state: The first state. The step may donate it.
      seconds: How long to measure, without compiling. Allow at least 100 times the
        loader's time per batch. Slow steps that come less often than once in a
        fifteenth of it may not be seen.
      max_uses: The largest factor to advise.
      stages: The stages of the loader for one batch, as functions without arguments by
        name, in order. Then the advice can name the stage to make faster. They are
        timed one by one in this thread, in addition to the loader's own work.
      wait: Waits for the output of a step; None handles dicts, lists, tuples and
        dataclasses of arrays. ``jax.block_until_ready`` handles all pytrees.
      options: Names of the trainer's settings, for the advice.
      on_progress: Called with the name of the next measurement, and the part that is
        done, from 0 to 1.
      now: The clock, in seconds; for tests.
      cpu_now: The CPU time of this thread, in seconds; for tests.

    Returns:
      The report; print it.

    Raises:
      ValueError: The upstream is empty, or an iterator that ended.
      TypeError: The output of the step cannot be waited for.

    Example:
      A plain JAX loop, whose jitted step returns the parameters and the loss, is
      probed by ``print(ej.probe(batches, train_step, state=params))``. Any other
      loop needs only a function:

      >>> import time
      >>> import numpy as np
      >>> batches = [{"x": np.ones((8, 4))}] * 10
      >>> def step(batch):
      ...     time.sleep(0.002)
      ...     return batch["x"].sum()
      >>> report = probe(batches, step, seconds=0.2)
      >>> report.batch_size, report.batch_bytes, report.is_starved
      (8, 256, False)
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0; 20 is a good choice")
    started = now()
    tell = on_progress or (lambda what, done: None)
    stage_times = _time_stages(stages or {}, seconds, tell, now, cpu_now)
    loader = endless(upstream)
    try:
        steps = BoundedSteps(_stateless(step, state), wait or wait_for)
        bench = _Bench(loader, steps, seconds, tell, now)
        bench.measure_rates()
        # A run of factor 2 or more shows whether loader and step share cores.
        bench.measure_runs(max(round(advised_factor(bench.ratio, max_uses), 1), 2.0))
    finally:
        loader.close()
    steps_alone = bench.step_times
    low, high = ratio_interval(bench.ups, bench.downs)
    batch_size, batch_bytes = _size(bench.batch)
    together = {run.factor: run.seconds_per_update for run in bench.runs}
    t_up_s, t_down_s = bench.t_up_s, steps_alone.mean_s
    # A step on the loader's cores slows it down too, so that an update without an echo
    # takes longer than each alone, up to both in turns.
    fresh_s = min(together[1.0], t_up_s + t_down_s)
    if fresh_s < _SLOWED * max(t_up_s, t_down_s):
        fresh_s = t_up_s
    shared = contention(fresh_s, t_down_s, together)
    report = ProbeReport(
        t_up_s=t_up_s,
        t_down_s=t_down_s,
        t_up_together_s=fresh_s,
        contention=shared,
        observed_s=bench.runs[0].seconds_per_update,
        ratio_low=low,
        ratio_high=high,
        rounds=len(bench.ups),
        steps_timed=steps_alone.timed,
        slow_steps=steps_alone.slow,
        batch_size=batch_size,
        batch_bytes=batch_bytes,
        stages=stage_times,
        runs=bench.runs,
        advised_factor=round(advised_factor(fresh_s / t_down_s, max_uses, shared), 1),
        advice=(),
        how="",
        seconds=now() - started,
    )
    options = options or OptionNames()
    return dataclasses.replace(
        report,
        advice=advise(report, options, cores=_cores()),
        how=how_to_echo(report, options),
    )


class _Bench:
    """A loader and a step, and their measurements."""

    def __init__(
        self,
        loader: Iterator[Any],
        steps: BoundedSteps,
        seconds: float,
        tell: OnProgress,
        now: Now,
    ):
        self._loader, self._steps, self._now = loader, steps, now
        self._seconds, self._tell = seconds, tell
        self._together: list[float] = []
        self._done = _STAGES_SHARE
        # Seconds of single calls of the loader and of the step alone, for each round.
        self.ups: list[list[float]] = []
        self.downs: list[list[float]] = []
        self.runs: tuple[MeasuredRun, ...] = ()
        tell("first step", self._done)
        self.batch = next(loader)
        steps(self.batch)
        steps.finish()
        self._started = now()

    # A mean, not a median: a bursty storage is slow in its mean.
    @property
    def t_up_s(self) -> float:
        return statistics.mean(itertools.chain.from_iterable(self.ups))

    @property
    def step_times(self) -> StepTimes:
        return step_times(self.downs)

    @property
    def ratio(self) -> float:
        return self.t_up_s / self.step_times.mean_s

    def measure_rates(self) -> None:
        """Measures the loader, both, and the step, in turns."""
        end = self._started + self._seconds * (1 - _RUN_ROUNDS * _RUN_SHARE)
        for done in range(_RATE_ROUNDS):
            if done >= _LEAST_RATE_ROUNDS and self._now() > end:
                return
            # Both together follow the loader alone, which leaves buffers empty, if the
            # loader is the slower side. Otherwise they follow the step alone, which
            # lets them fill.
            is_fed = done > 0 and self.ratio < 1
            phases = [self._up, self._down, self._both]
            if not is_fed:
                phases = [self._up, self._both, self._down]
            if done % 2:
                # Loader and step swap places, so that a steady drift cancels.
                at = phases.index(self._down)
                phases = phases[at:] + phases[:at]
            for phase in phases:
                phase()

    def _up(self) -> None:
        load = functools.partial(next, self._loader)
        self.ups.append(self._time("loader alone", _UP_SHARE, load))

    def _down(self) -> None:
        hold = functools.partial(self._steps, self.batch)
        # More of it for several periods of slow steps.
        slow = self.step_times.slow if self.downs else None
        share = _DOWN_SHARE if slow is None or slow.period else _LONG_DOWN_SHARE
        self.downs.append(self._time("step alone", share, hold))

    def _both(self, share: float = _TOGETHER_SHARE) -> None:
        train = lambda: self._steps(next(self._loader))  # noqa: E731
        self._together += self._time("both together", share, train)

    def measure_runs(self, factor: float) -> None:
        """Measures short runs without an echo and with one, in turns."""
        spec = EchoSpec(factor)
        echoed = echo(self._loader, spec)
        # After this many uses the echo is at a fresh batch again.
        cycle = exact_fraction(factor).numerator
        what = f"echo factor {factor:g}"
        seconds = []
        for done in range(_RUN_ROUNDS):
            if done and self._now() - self._started > self._seconds:
                break
            self._both(_RUN_SHARE)
            seconds += self._time(
                what, _ECHO_SHARE, lambda: self._steps(next(echoed)), cycle=cycle
            )
        self.runs = (
            MeasuredRun(1.0, len(self._together), statistics.mean(self._together)),
            MeasuredRun(float(factor), len(seconds), statistics.mean(seconds)),
        )

    def _time(
        self, what: str, share: float, call: Callable[[], Any], *, cycle: int = 1
    ) -> list[float]:
        """Times one phase, and then waits for all its updates."""
        self._tell(what, min(self._done, 1.0))
        self._done += share
        seconds = time_calls(
            call,
            settle_s=_SETTLE * share * self._seconds,
            settle_calls=MAX_IN_FLIGHT,
            window_s=(1 - _SETTLE) * share * self._seconds,
            stride=cycle,
            now=self._now,
        )
        self._steps.finish()
        return seconds


def _stateless(step: Callable[..., Any], state: Any) -> Callable[[Any], Any]:
    """Returns the step as a function of the batch alone."""
    if state is None:
        return step

    def advance(batch: Any) -> Any:
        nonlocal state
        result = step(state, batch)
        if not (isinstance(result, tuple) and len(result) > 1):
            raise TypeError(
                "with a state, the step must return (state, output): the new state "
                "may be donated to the next step, so it cannot be waited for; it "
                f"returned a {type(result).__name__}"
            )
        state, *output = result
        return output

    return advance


def _time_stages(
    stages: Mapping[str, Callable[[], Any]],
    seconds: float,
    tell: OnProgress,
    now: Now,
    cpu_now: Now,
) -> tuple[StageTime, ...]:
    """Times the stages of a loader, one after the other."""
    times = []
    for number, (name, call) in enumerate(stages.items()):
        tell(f"stage {name}", number / len(stages) * _STAGES_SHARE)
        call()  # Excludes work that is done once, such as opening files.
        computed_s = cpu_now()
        window_s = _STAGES_SHARE * seconds / len(stages)
        calls = time_calls(call, window_s=window_s, now=now)
        computed_s = (cpu_now() - computed_s) / len(calls)
        times.append(StageTime(name, statistics.mean(calls), computed_s))
    return tuple(times)


def _size(batch: Any) -> tuple[int, int]:
    """Returns the number of examples of a batch, 0 if unknown, and its bytes."""
    leaves = [leaf for _, leaf in flatten(batch) if hasattr(leaf, "shape")]
    lengths = {int(leaf.shape[0]) if leaf.shape else 0 for leaf in leaves}
    num_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves)
    return lengths.pop() if len(lengths) == 1 else 0, num_bytes


def _cores() -> int:
    """Returns how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
