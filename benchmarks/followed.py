"""Adaptive decisions of two processes: those of the first one, or each its own.

``python -m benchmarks.followed`` starts two processes with a device each. Their loaders
sleep for times of their own, with a mean of two steps; a step sleeps and sums a batch
over both. "Each" is an echo on the process's own device, without any agreement.
"""

import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import echo_jax as ej
from echo_jax.echo.processes import Placement

_STEP_S, _RATIO, _ROWS, _UPDATES, _REPEATS = 0.02, 2.0, 128, 250, 3
_KINDS = ("constant", "exponential", "bursty")


def _loader(kind: str, seed: int) -> Iterator[dict[str, np.ndarray]]:
    rng = np.random.default_rng([seed, jax.process_index()])
    draw = {
        "constant": lambda: 1.0,
        "exponential": rng.exponential,
        "bursty": lambda: 0.4 if rng.random() < 0.9 else 6.4,
    }[kind]
    while True:
        time.sleep(_STEP_S * _RATIO * draw())
        yield {"x": np.zeros((_ROWS // 2, 64), np.float32)}


def _measure(who: str, kind: str, seed: int) -> tuple[float, float]:
    """Returns seconds of an update, and the fresh share of the examples."""
    mesh = jax.make_mesh((2,), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    place, loader = Placement.of(sharding), _loader(kind, seed)
    if who == "first":
        spec = ej.AdaptiveSpec(4, 64 * _ROWS, _ROWS)
        echo = ej.device.echo_batches(loader, spec, sharding=sharding)
    else:
        echo = ej.device.echo_batches(
            loader, ej.AdaptiveSpec(4, 32 * _ROWS, _ROWS // 2)
        )

    def updates(count: int) -> None:
        for _ in range(count):
            batch: Any = next(echo)
            batch = batch if who == "first" else place.joined(batch)
            time.sleep(_STEP_S)
            total(batch).block_until_ready()

    total = jax.jit(lambda batch: batch["x"].sum())
    with echo:
        updates(20)
        before, began = echo.counts, time.perf_counter()
        updates(_UPDATES)
        took_s, after = time.perf_counter() - began, echo.counts
    share = (after.fresh - before.fresh) / (after.uses - before.uses)
    return took_s / _UPDATES, share


def _child(process: int, port: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", 2, process)
    for kind in _KINDS:
        pairs = [
            (_measure("first", kind, seed), _measure("each", kind, seed))
            for seed in range(_REPEATS)
        ]
        if process == 0:
            slower = [first[0] / each[0] for first, each in pairs]
            first, each = (
                " ".join(f"{pair[who][1]:.2f}" for pair in pairs) for who in (0, 1)
            )
            print(
                f"{kind}: fresh share {first} (first), {each} (each); an update "
                f"takes {statistics.median(slower):.3f} times as long "
                f"({min(slower):.3f} to {max(slower):.3f}, n = {_REPEATS})",
                flush=True,
            )


def main() -> None:
    """Starts both processes, and waits for them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.followed", str(process), port],
            env={**os.environ, **own},
        )
        for process in range(2)
    ]
    sys.exit(max(process.wait() for process in started))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _child(int(sys.argv[1]), sys.argv[2])
    else:
        main()
