"""Measures a loader and a step, alone and together.

The probe is differential (after DS-Analyzer, Mohan et al. 2021): the loader is timed
without a step, the step without a loader, then both together. They take turns, so that
a machine that becomes slower affects all. Times are means, as throughput is.
"""

import contextlib
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from echo_jax.echo.echo import echo
from echo_jax.echo.instrument.advice import OptionNames, ProbeReport, StageTime, advised
from echo_jax.echo.instrument.rates import (
    advised_factor,
    contention,
    ratio_interval,
    step_times,
)
from echo_jax.echo.schedule import exact_fraction
from echo_jax.echo.spec import EchoSpec
from echo_jax.echo.tree import flatten

OnProgress = Callable[[str, float], None]

MAX_IN_FLIGHT = 2
"""Dispatches that may be under way whenever a loop waits, in training as here.

They hide the host's work. With more, a host that runs ahead would be mistaken for a
fast device, and collectives of many queued steps can hang on few CPU cores."""

# Types of values that are computed when a step returns them.
_COMPUTED = (np.ndarray, np.generic, bool, int, float, complex)


def wait_for(output: Any) -> None:
    """Waits for all arrays in the output of a step; raises TypeError without any."""
    leaves = [leaf for _, leaf in flatten(output)]
    arrays = [leaf for leaf in leaves if hasattr(leaf, "block_until_ready")]
    if not arrays and not any(isinstance(leaf, _COMPUTED) for leaf in leaves):
        raise TypeError(
            f"the step returned a {type(output).__name__}, which says nothing about "
            "when the update is done; return the loss, or another array it computes"
        )
    for array in arrays:
        array.block_until_ready()


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
        self.finish(MAX_IN_FLIGHT)

    def finish(self, but: int = 0) -> None:
        """Waits for all updates but the last."""
        while len(self._in_flight) > but:
            self._wait(self._in_flight.popleft())


def time_calls(
    call: Callable[[], Any],
    *,
    window_s: float,
    least: int = 2,
    most: int = 10_000,
    stride: int = 1,
) -> list[float]:
    """Returns the seconds of every call in a window."""
    # The window ends with a call, at a moment that does not depend on later ones, so
    # its expected time is its expected number of calls times the mean call, also if
    # calls differ widely (Wald). The window holds whole cycles of `stride` calls,
    # unless that takes more than twice its time.
    ends = [time.perf_counter()]
    while True:
        call()
        ends.append(time.perf_counter())
        calls, elapsed_s = len(ends) - 1, ends[-1] - ends[0]
        is_aligned = calls % stride == 0 or elapsed_s >= 2 * window_s
        if calls >= most or (calls >= least and elapsed_s >= window_s and is_aligned):
            return [end - before for before, end in itertools.pairwise(ends)]


def endless(upstream: Iterable[Any]) -> Generator[Any, None, None]:
    """Yields the items of an iterable again and again; an iterator must not end."""
    taken = 0
    while True:
        before, iterator = taken, iter(upstream)
        try:
            for item in iterator:
                taken += 1
                yield item
        finally:
            # The caller's iterator is not closed here, and cannot start again.
            if iterator is not upstream:
                getattr(iterator, "close", tuple)()
        if iterator is upstream:
            raise ValueError(
                f"the upstream, an iterator, ended after {taken} batches; give the "
                "iterable that it is from, which can be started again"
            )
        if taken == before:
            raise ValueError("the upstream is empty; give an iterable of batches")


# The least number of rounds, even where they take longer than the given time.
_LEAST_ROUNDS = 3
# The part of the time that stages take, and the uncounted part of a measurement, in
# which a loader's buffers run empty or full again.
_STAGES, _SETTLE = 0.1, 0.3


def time_in_turns(
    loader: Iterator[Any],
    steps: BoundedSteps,
    factors: Sequence[float],
    *,
    seconds: float,
    rounds: int = 5,
    tell: OnProgress = lambda what, done: None,
) -> tuple[Any, dict[str | float, list[list[float]]]]:
    """Returns a batch, and the seconds of every call by round: both alone, and by e."""
    tell("first step", _STAGES)
    steps(batch := next(loader))
    steps.finish()
    calls: dict[str | float, Callable[[], Any]] = {"loader alone": lambda: next(loader)}
    for factor in factors:
        source = loader if factor == 1 else echo(loader, EchoSpec(factor))
        calls[factor] = lambda source=source: steps(next(source))
    calls["step alone"] = lambda: steps(batch)
    times: dict[str | float, list[list[float]]] = {key: [] for key in calls}
    share, started = (1 - _STAGES) / rounds / len(calls), time.perf_counter()
    for number in range(rounds):
        if number >= _LEAST_ROUNDS and time.perf_counter() - started > seconds:
            break
        # The step changes places, so that a steady drift cancels.
        order = ["step alone", *calls][:-1] if number % 2 else calls
        for at, key in enumerate(order, number * len(calls)):
            what = key if isinstance(key, str) else f"both, echo factor {key:g}"
            tell(what, _STAGES + at * share)
            call, settle_s = calls[key], _SETTLE * share * seconds
            time_calls(call, window_s=settle_s, least=MAX_IN_FLIGHT)
            stride = 1 if isinstance(key, str) else exact_fraction(key).numerator
            window_s = share * seconds - settle_s
            times[key].append(time_calls(call, window_s=window_s, stride=stride))
            steps.finish()
    return batch, times


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
) -> ProbeReport:
    """Measures how starved a trainer is, and advises a remedy.

    It trains while it measures: pass copies of everything that must not change.

    Args:
      upstream: The batches as the trainer gets them, pytrees of arrays. An iterable
        that ends is started again.
      step: Makes one update, ``step(batch) -> output``, or with a ``state``
        ``step(state, batch) -> (state, output, ...)``. The probe waits for the output,
        so the update must compute it, as it does the loss. A batch is used several
        times, so the step must not donate it.
      state: The first state. The step may donate it.
      seconds: How long to measure, without compiling. Allow at least 100 times the
        loader's time per batch.
      max_uses: The largest factor to advise. It is measured, and one between 2 and it.
      stages: The stages of the loader for one batch, as functions without arguments by
        name, in order. They are timed one by one in this thread, so that the advice can
        name the one to make faster.
      wait: Waits for the output of a step, as ``jax.block_until_ready`` does.
      options: Names of the trainer's settings, for the advice.
      on_progress: Called with the next measurement, and the part done, from 0 to 1.

    Returns:
      The report; print it.

    Raises:
      ValueError: The upstream is empty, or an iterator that ended.
      TypeError: The output of the step cannot be waited for.

    Example:
      A jitted step that returns the parameters and the loss is probed by
      ``ej.probe(batches, train_step, state=params)``, and any other as a function:

      >>> import numpy as np
      >>> batches = [{"x": np.ones((8, 4))}] * 10
      >>> report = probe(batches, lambda batch: batch["x"].sum(), seconds=0.2)
      >>> report.batch_size, report.batch_bytes
      (8, 256)
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0; 20 is a good choice")

    def update(batch: Any) -> Any:
        nonlocal state
        try:
            result = step(batch) if state is None else step(state, batch)
        except ValueError as error:
            if "read-only" not in str(error):
                raise
            raise ValueError(
                "the step writes into its batch, which an echo uses several times. "
                "Have it write into a copy, such as np.array(batch)."
            ) from error
        if state is None:
            return result
        if not (isinstance(result, tuple) and len(result) > 1):
            raise TypeError(
                "with a state, the step must return (state, output), because a donated "
                f"state cannot be waited for; it returned a {type(result).__name__}"
            )
        state, *output = result
        return output

    started, stages = time.perf_counter(), stages or {}
    tell = on_progress or (lambda what, done: None)
    stage_times: list[StageTime] = []
    for number, (name, call) in enumerate(stages.items()):
        tell(f"stage {name}", _STAGES * number / len(stages))
        call()  # Excludes work that is done once, such as opening files.
        began_s = time.thread_time()
        calls = time_calls(call, window_s=_STAGES * seconds / len(stages))
        computed_s = (time.thread_time() - began_s) / len(calls)
        wall_s = statistics.mean(calls)
        # The two clocks differ a little.
        stage_times.append(StageTime(name, wall_s, min(computed_s, wall_s)))
    steps = BoundedSteps(update, wait or wait_for)
    most = max(2, max_uses)
    # Near the balance of loader and step, updates take longer than the model says.
    factors = sorted({1, 2, 1 + most // 2, most})
    with contextlib.closing(endless(upstream)) as loader:
        batch, times = time_in_turns(loader, steps, factors, seconds=seconds, tell=tell)
    # A mean, not a median: a bursty storage is slow in its mean.
    mean_s = {key: statistics.mean(itertools.chain(*of)) for key, of in times.items()}
    measured_s = {factor: mean_s[factor] for factor in factors}
    alone = step_times(times["step alone"])
    t_up_s, t_down_s = mean_s["loader alone"], alone.mean_s
    low, high = ratio_interval(times["loader alone"], alone)
    shared = contention(t_up_s, t_down_s, measured_s)
    size, num_bytes = _size(batch)
    report = ProbeReport(
        t_up_s=t_up_s,
        t_down_s=t_down_s,
        steps=alone,
        contention=shared,
        ratio_low=low,
        ratio_high=high,
        batch_size=size,
        batch_bytes=num_bytes,
        stages=tuple(stage_times),
        measured_s=measured_s,
        advised_factor=round(advised_factor(t_up_s / t_down_s, max_uses, shared), 1),
        seconds=time.perf_counter() - started,
    )
    return advised(report, options or OptionNames())


def _size(batch: Any) -> tuple[int, int]:
    """Returns the number of examples of a batch, 0 if unknown, and its bytes."""
    leaves = [leaf for _, leaf in flatten(batch) if hasattr(leaf, "shape")]
    lengths = {int(leaf.shape[0]) if leaf.shape else 0 for leaf in leaves}
    num_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in leaves)
    return lengths.pop() if len(lengths) == 1 else 0, num_bytes
