"""Predicted and measured times of an update where loader and step share the cores.

``python -m benchmarks.shared_cores CONFIG [--config.FIELD=VALUE ...]`` times the loader
alone, the step alone, and both together at e = 1 to 4, in short turns. It fits the
contention to e = 1 and 2.
"""

import itertools
import os
import statistics
import sys
from collections.abc import Callable
from contextlib import closing
from typing import Any

import echo_jax as ej
from echo_jax import workloads
from echo_jax.config import load_with_flags
from echo_jax.echo.instrument.measure import BoundedSteps, time_calls
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import unechoed
from echo_jax.training.trainer import compile_functions

_ROUNDS, _WINDOW_S = 10, 1.2
_FACTORS = (1, 2, 3, 4)


def main(name: str, *flags: str) -> None:
    """Measures a config in turns, and prints a line for each factor."""
    config = load_with_flags(name, flags)
    workload = workloads.build(config)
    compiled = compile_functions(config, workload)
    states = [compiled.init(compiled.init_key)]

    def step(batch: Any) -> Any:
        states[0], report = compiled.step_on_batch(states[0], batch)
        return report

    with closing(JoinedBatches([workload.train_dataset(unechoed(config))])) as loader:
        steps = BoundedSteps(step)
        steps(held := next(loader))
        steps.finish()
        sources = {1: loader, **{e: ej.echo(loader, ej.EchoSpec(e)) for e in (2, 3, 4)}}
        calls: dict[Any, Callable[[], Any]] = {
            "up": lambda: next(loader),
            "down": lambda: steps(held),
        }
        for factor, source in sources.items():
            calls[factor] = lambda source=source: steps(next(source))
        times: dict[Any, list[float]] = {key: [] for key in calls}
        for number, key in itertools.product(range(_ROUNDS), calls):
            key = key if number % 2 else [*calls][::-1][[*calls].index(key)]
            stride = key if key in _FACTORS else 1
            window = {"settle_calls": 4, "window_s": _WINDOW_S, "stride": stride}
            times[key].append(statistics.mean(time_calls(calls[key], **window)))
            steps.finish()
    mean = {key: statistics.mean(found) for key, found in times.items()}
    up_s, down_s = mean["up"], mean["down"]
    shared = ej.rates.contention(up_s, down_s, {e: mean[e] for e in (1, 2)})
    print(f"batch {1e3 * up_s:.1f} ms, step {1e3 * down_s:.1f} ms, c = {shared:.2f}")
    for e in _FACTORS:
        predicted_s = ej.rates.seconds_per_update(up_s, down_s, e, shared)
        least, most = 1e3 * min(times[e]), 1e3 * max(times[e])
        print(
            f"e = {e}: predicted {1e3 * predicted_s:.1f} ms, measured "
            f"{1e3 * mean[e]:.1f} ms ({least:.1f} to {most:.1f}, n = {_ROUNDS}): "
            f"{predicted_s / mean[e] - 1:+.1%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Threads of the loader are under way.
