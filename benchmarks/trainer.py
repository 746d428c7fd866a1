"""What echo_jax costs a trainer that is not starved, and what it asks of a user."""

import difflib
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Result, paired, seconds

_LOOPS = Path(__file__).parent / "loops"
_UPDATES = 25
_STRETCHES = 20


def p9() -> list[Result]:
    """Seconds per update, with 8 updates in a dispatch, against the plain loop."""
    from benchmarks import dispatch_models

    goals = {"tiny": "<= 0.33", "leaves": "<= 1.0"}
    return [
        _dispatched(name, dispatch_models.MODELS[name](), goal)
        for name, goal in goals.items()
    ]


def _dispatched(name: str, model: Any, goal: str) -> Result:
    loop, scan = model.runs(size=8)
    # Long enough for the clock, and in turn: the speed of a shared machine drifts.
    for run in (loop, scan):
        run(1)  # Compiles.
    times = max(1, round(0.1 / seconds(lambda: loop(1))))
    work = [partial(seconds, partial(run, times)) for run in (loop, scan)]
    repeats = paired(*work, repeats=7)[1]
    return Result(
        f"P9-{name}",
        f"seconds per update, {model.about}: dispatch.steps=8 / plain loop",
        statistics.median(repeats),
        goal,
        "x",
        "a loop that calls a jitted update, two in flight",
        repeats,
    )


def p17() -> Result:
    """Steps per second with an echo of factor 1, against the plain loop."""
    import grain
    import jax
    import jax.numpy as jnp
    import numpy as np
    from grain.experimental import ThreadPrefetchIterDataset

    import echo_jax as ej

    @jax.jit
    def step(weights, batch):
        for _ in range(24):
            weights = weights + 1e-6 * jnp.tanh(weights @ (batch.T @ batch))
        return weights

    # Elements are whole batches: making one takes far less than a step, R << 1.
    images = np.random.default_rng(0).normal(size=(64, 64, 256)).astype(np.float32)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    dataset = grain.MapDataset.source(images).shuffle(0).repeat()
    dataset = dataset.to_iter_dataset(options)
    start = jnp.zeros((512, 256))

    def batches(stage: grain.IterDataset):
        return iter(ThreadPrefetchIterDataset(stage, prefetch_buffer_size=4))

    def train(iterator) -> float:
        weights = step(start, next(iterator))
        weights.block_until_ready()
        began = time.perf_counter()
        for _ in range(_UPDATES):
            before = weights
            weights = step(weights, next(iterator))
            before.block_until_ready()  # one step in flight
        weights.block_until_ready()
        return time.perf_counter() - began

    plain = batches(dataset)
    echoed = batches(ej.grain.echo(dataset, ej.EchoSpec(factor=1)))
    # Short stretches in turn: the speed of a shared machine drifts.
    pairs = [(train(plain), train(echoed)) for _ in range(1 + 7 * _STRETCHES)][1:]
    repeats = []
    for at in range(0, len(pairs), _STRETCHES):
        part = pairs[at : at + _STRETCHES]
        repeats.append(sum(p for p, _ in part) / sum(e for _, e in part))
    return Result(
        "P17",
        "step rate when not starved: with an echo of factor 1 / plain",
        statistics.median(repeats),
        ">= 0.995",
        "x",
        "Grain with a prefetching thread + a jitted step",
        repeats,
        f"{_STRETCHES} stretches of {_UPDATES} steps of about 5 ms a repeat, in turn",
    )


def _run(script: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, str(_LOOPS / script)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=None,
    )
    return time.perf_counter() - began


def p19() -> Result:
    """Seconds from the start of the process to the end of its first step."""
    ratio, repeats = paired(lambda: _run("plain.py"), lambda: _run("echoed.py"))
    ratio, repeats = 1 / ratio, [1 / repeat for repeat in repeats]
    return Result(
        "P19",
        "time from process start to first step: with echo_jax / plain",
        ratio,
        "<= 1.1",
        "x",
        "benchmarks/loops/plain.py",
        repeats,
    )


def p20() -> Result:
    """Lines that differ between the plain loop and the echoed one."""
    plain, echoed = (
        (_LOOPS / name).read_text().splitlines()[1:]
        for name in ("plain.py", "echoed.py")
    )
    added = [
        line
        for line in difflib.unified_diff(plain, echoed, n=0)
        if line.startswith("+") and not line.startswith("+++") and line.strip("+ ")
    ]
    return Result(
        "P20",
        "lines that a user adds to a plain JAX loop or changes in it",
        len(added),
        "<= 3",
        "lines",
        "benchmarks/loops/plain.py against echoed.py",
        [len(added)],
    )


def import_time() -> Result:
    """Seconds that ``import echo_jax`` takes beyond NumPy's import."""
    script = (
        "import time, numpy; t = time.perf_counter(); import echo_jax;"
        "print(time.perf_counter() - t)"
    )
    repeats = [
        float(subprocess.check_output([sys.executable, "-c", script])) for _ in range(6)
    ][1:]
    return Result(
        "import",
        "import echo_jax beyond NumPy's own import",
        sorted(repeats)[len(repeats) // 2],
        "<= 0.5",
        "s",
        "none: an absolute time, of this machine",
        repeats,
    )
