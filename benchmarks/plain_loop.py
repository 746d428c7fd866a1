"""The README's plain JAX loop, on a loader whose batches come in bursts."""

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import echo_jax as ej
from benchmarks.harness import Result
from benchmarks.simulation import service_times

_ROWS, _WIDTH = 32, 512
_SECONDS, _ROUNDS = 4.0, 5
_RATIO, _FACTOR = 3.6, 4
_CAP = 8  # as docs/choose-an-echo.md says of an adaptive echo: twice R


@jax.jit
def _step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    """A step of a few milliseconds."""
    for _ in range(16):
        weights = weights - 1e-3 * jnp.tanh(batch.T @ (batch @ weights))
    return weights


def _step_s() -> float:
    weights, batch = jnp.eye(_WIDTH), jnp.ones((_ROWS, _WIDTH))
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        weights = _step(weights, batch).block_until_ready()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[5:])


def _loader(service_s: np.ndarray) -> Iterator[np.ndarray]:
    """Batches that each take a given time; the storage is simulated: it sleeps."""
    rng = np.random.default_rng(0)
    for seconds in service_s.tolist():
        time.sleep(seconds)
        yield rng.normal(size=(_ROWS, _WIDTH)).astype(np.float32)


def _prefetched(loader: Iterator[Any], depth: int = 2) -> Iterator[Any]:
    """What a loader with a thread of its own does."""
    batches: queue.Queue[Any] = queue.Queue(depth)
    stop = threading.Event()

    def read() -> None:
        for batch in loader:
            batches.put(batch)
            if stop.is_set():
                return

    threading.Thread(target=read, daemon=True).start()
    try:
        while True:
            yield batches.get()
    finally:
        stop.set()
        while not batches.empty():
            batches.get()


def _train(batches: Iterator[Any]) -> int:
    """Trains for some seconds; returns how many updates were done."""
    weights, updates = jnp.eye(_WIDTH), 0
    end = time.perf_counter() + _SECONDS
    for batch in batches:
        weights = _step(weights, batch).block_until_ready()
        updates += 1
        if time.perf_counter() > end:
            break
    return updates


def plain_loop() -> list[Result]:
    """Updates in the same time: no echo, a fixed one, and an adaptive one."""
    step_s = _step_s()
    sizes: dict[str, Any] = {"buffer": 128 * _ROWS, "batch_size": _ROWS}
    arms: dict[str, Callable[[Iterator[Any]], Iterator[Any]]] = {
        "none": _prefetched,
        "fixed": lambda loader: ej.echo_batches(
            _prefetched(loader), ej.EchoSpec(_FACTOR, order="spread", **sizes)
        ),
        "adaptive": lambda loader: ej.echo_batches(
            loader, ej.AdaptiveSpec(_CAP, **sizes)
        ),
    }
    updates: dict[str, list[int]] = {name: [] for name in arms}
    for number in range(_ROUNDS):
        service = service_times("bursty", _RATIO * step_s, 4000, seed=number)
        for name, echoed in arms.items():
            with closing(echoed(_loader(service))) as batches:  # pyright: ignore
                updates[name].append(_train(batches))
    return [
        _result("loop-none", "no echo, 2 batches prefetched", "none", updates, step_s),
        _result("loop-fixed", f"fixed e={_FACTOR}, spread", "fixed", updates, step_s),
    ]


def _result(
    name: str, peer: str, arm: str, updates: dict[str, list[int]], step_s: float
) -> Result:
    pairs = zip(updates["adaptive"], updates[arm], strict=True)
    ratios = [ours / theirs for ours, theirs in pairs]
    most = _SECONDS / step_s / statistics.median(updates[arm])
    return Result(
        name,
        "updates of a plain JAX loop in the same time, adaptive echo on the host",
        statistics.median(ratios),
        ">= 1",
        "x",
        peer,
        ratios,
        f"a step of {step_s * 1e3:.1f} ms; simulated storage, in bursts, mean R="
        f"{_RATIO}; cap {_CAP}, buffer of 128 batches; never waiting would be "
        f"{most:.2f}x",
    )
