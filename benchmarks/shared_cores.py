"""Predicted and measured times of an update where loader and step share the cores.

``python -m benchmarks.shared_cores CONFIG [--config.FIELD=VALUE ...]`` times the loader
alone, the step alone, and both together at each e, in turns of a second, for three
minutes. As the probe does, it fits the contention to e = 1 to 4, so e = 6 is a
prediction.
"""

import itertools
import os
import statistics
import sys
from contextlib import closing
from typing import Any

import echo_jax as ej
from echo_jax import workloads
from echo_jax.config import RunSpec, load_with_flags
from echo_jax.echo.instrument.measure import BoundedSteps, time_in_turns
from echo_jax.training.compiled import CompiledFunctions
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import unechoed

_FACTORS, _FITTED = (1, 2, 3, 4, 6), (1, 2, 3, 4)


def main(name: str, *flags: str) -> None:
    """Measures a config in turns, and prints a line for each factor."""
    config = RunSpec.of(load_with_flags(name, flags))
    workload = workloads.build(config)
    compiled = CompiledFunctions(config, workload)
    states = [compiled.init(compiled.init_key)]

    def step(batch: Any) -> Any:
        states[0], report = compiled.step_on_batch(states[0], batch)
        return report

    with closing(JoinedBatches([workload.train_dataset(unechoed(config))])) as loader:
        steps = BoundedSteps(step)
        _, times = time_in_turns(loader, steps, _FACTORS, seconds=180, rounds=30)
    up_s, down_s, *both_s = (
        statistics.mean(itertools.chain(*times[key]))
        for key in ("loader alone", "step alone", *_FACTORS)
    )
    mean_s = dict(zip(_FACTORS, both_s, strict=True))
    shared = ej.rates.contention(up_s, down_s, {e: mean_s[e] for e in _FITTED})
    print(f"batch {1e3 * up_s:.1f} ms, step {1e3 * down_s:.1f} ms, c = {shared:.2f}")
    for e in _FACTORS:
        predicted_s = ej.rates.seconds_per_update(up_s, down_s, e, shared)
        rounds_s = [statistics.mean(of) for of in times[e]]
        print(
            f"e = {e}: predicted {1e3 * predicted_s:.1f} ms, measured "
            f"{1e3 * mean_s[e]:.1f} ms ({1e3 * min(rounds_s):.1f} to "
            f"{1e3 * max(rounds_s):.1f}, n = {len(rounds_s)}): "
            f"{predicted_s / mean_s[e] - 1:+.1%}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Threads of the loader are under way.
