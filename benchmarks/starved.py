"""Trainers that wait for their input: what echoing on the accelerator recovers."""

import functools
import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import echo_jax as ej
from benchmarks.device import make_feed
from benchmarks.harness import Result, drive

_BATCH = 32


def _batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    image = rng.normal(size=(_BATCH, 256)).astype(np.float32)
    return {"image": image, "label": np.zeros(_BATCH, np.int32)}


def _producer(t_up_s: float, *, bursty: bool = False) -> Iterator[dict[str, Any]]:
    """A storage that answers every so many seconds, simulated by sleeping."""
    batch = _batch()
    for number in itertools.count(1):
        # Nine short waits and a long one, with the same mean.
        of_mean = (6.4 if number % 10 == 0 else 0.4) if bursty else 1.0
        time.sleep(of_mean * t_up_s)
        yield {name: rows.copy() for name, rows in batch.items()}


# Width and number of products of a step, by the cores that XLA runs it on; of about
# 5 ms, if it is not long. One core of two is the nearest to an accelerator, which
# leaves the host its own; on all of them a draw's host work takes its time from it.
_STEPS = {
    "one core": (96, 200),
    "one core, long": (96, 1000),  # about 25 ms
    "all cores": (448, 6),
}


def _update(weights: jax.Array, batch: dict[str, jax.Array], count: int) -> jax.Array:
    """A step of some products, which leave the weights finite."""
    seen = 1e-6 * batch["image"].mean()

    def product(_: int, weights: jax.Array) -> jax.Array:
        return jnp.tanh(weights @ weights.T) + seen

    return jax.lax.fori_loop(0, count, product, weights)


class _Trainer:
    """A tiny model, with one program for every echo factor."""

    def __init__(self, cores: str):
        width, count = _STEPS[cores]
        self.weights = jnp.ones((width, width)) / width
        self._held = jax.device_put(_batch())
        self._update = functools.partial(_update, count=count)
        self._plain = jax.jit(self._update)

    def held_step_s(self, count: int = 40) -> float:
        """t_down: seconds per step on one held batch."""

        def step() -> jax.Array:
            self.weights = self._plain(self.weights, self._held)
            return self.weights

        drive(step, 5)
        return drive(step, count)

    def fed_s(self, batches: Any, count: int) -> float:
        """Seconds per step on batches of an iterator."""

        def step() -> jax.Array:
            self.weights = self._plain(self.weights, next(batches))
            return self.weights

        return drive(step, count)

    def batch_echo_s(self, source: Iterator[Any], fresh: int, factor: int) -> float:
        """Seconds per fresh batch of the plain loop: fetch, then repeat."""

        def step() -> jax.Array:
            if next(turn) == 0:
                self._batch = next(source)
            self.weights = self._plain(self.weights, self._batch)
            return self.weights

        turn = itertools.cycle(range(factor))
        return factor * drive(step, fresh * factor)

    def echoed_s(self, source: Iterator[Any], fresh: int, factor: int) -> float:
        """Seconds per fresh batch with the echo on the accelerator."""
        spec = ej.EchoSpec(factor, 16 * _BATCH, "spread", _BATCH)
        feed = make_feed(spec, source)
        buffer = feed.buffer

        @jax.jit
        def program(weights: jax.Array, arrays: Any, inputs: Any) -> jax.Array:
            (batch,) = buffer.draw(arrays, inputs)
            return self._update(weights, batch)

        def step() -> jax.Array:
            inputs = feed.take()
            self.weights = program(self.weights, feed.arrays, inputs)
            return self.weights

        with closing(feed):
            # Until the buffer is full, and the rate of fresh batches constant.
            while feed.counts.fresh < 40 * _BATCH:
                jax.block_until_ready(step())
            return factor * drive(step, fresh * factor)


def p1(fresh: int = 40, repeats: int = 7) -> list[Result]:
    """Ideal over actual time at R = 4 and e = 4."""
    return [
        _ideal("P1", "one core", fresh, repeats),
        _ideal("P1-shared", "all cores", fresh, repeats),
    ]


def _ideal(name: str, cores: str, fresh: int, repeats: int) -> Result:
    trainer = _Trainer(cores)
    ours, peers = [], []
    for _ in range(repeats + 1):
        t_down = trainer.held_step_s()
        source = _producer(4 * t_down)
        t_up = min(_mean_s(source), _mean_s(source))
        echoed = trainer.echoed_s(source, fresh, 4)
        plain = trainer.batch_echo_s(source, fresh, 4)
        ideal = max(t_up, 4 * (t_down + trainer.held_step_s()) / 2)
        ours.append(ideal / echoed)
        peers.append(ideal / plain)
    value, peer = statistics.median(ours[1:]), statistics.median(peers[1:])
    return Result(
        name,
        f"ideal / actual time at constant R=4, e=4, a step on {cores}",
        value,
        ">= 0.985",
        "x",
        f"a Python loop that fetches, then repeats the batch: {peer:.2f}",
        ours[1:],
        f"simulated storage (sleeps); {fresh} fresh batches a repeat; a step of "
        f"{1e3 * t_down:.1f} ms; ideal is max(t_up, e t_down) as measured around each "
        "run",
    )


def _mean_s(source: Iterator[Any], count: int = 8) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(source)
    return (time.perf_counter() - began) / count


def growth(
    ratio: float = 6.0,
    factors: tuple[int, ...] = (1, 2, 3, 4, 5),
    fresh: int = 30,
    repeats: int = 7,
) -> dict[int, list[float]]:
    """Seconds per fresh batch at each factor, over that at factor 1.

    Args:
      ratio: R, by which the simulated storage is slower than a step.
      factors: Echo factors, from 1 on.
      fresh: Fresh batches of each measurement.
      repeats: Interleaved rounds; one more runs first and does not count.

    Returns:
      For each factor a value per round.
    """
    trainer = _Trainer("one core")
    t_up = ratio * trainer.held_step_s()
    rounds: dict[int, list[float]] = {factor: [] for factor in factors}
    for _ in range(repeats + 1):
        source = _producer(t_up)
        seconds = {e: trainer.echoed_s(source, fresh, e) for e in factors}
        for factor in factors:
            rounds[factor].append(seconds[factor] / seconds[1])
    return {factor: values[1:] for factor, values in rounds.items()}


def p2() -> list[Result]:
    """Growth of seconds per fresh example at R = 6: every echo should be free."""
    paper = {2: 5.6, 3: 11.9, 4: 21.6, 5: 26.4}
    return [
        Result(
            f"P2-e{factor}",
            f"seconds per fresh example at R=6, e={factor} / at e=1",
            statistics.median(values),
            "<= 1.02",
            "x",
            f"Choi et al. 2019, section 3.2: {1 + paper[factor] / 100:.3f}",
            values,
            "simulated storage (sleeps)",
        )
        for factor, values in growth().items()
        if factor > 1
    ]


def no_spec(turns: int = 15) -> list[Result]:
    """A call without a spec: its time, and how busy it keeps short and long steps."""
    return [
        result
        for cores, updates in (("one core", 50), ("one core, long", 20))
        for result in _no_spec(_Trainer(cores), cores, updates, turns)
    ]


def _no_spec(trainer: _Trainer, cores: str, updates: int, turns: int) -> list[Result]:
    step_s = trainer.held_step_s()
    note = f"simulated storage (sleeps); a step takes {1e3 * step_s:.0f} ms"
    found: dict[str, list[float]] = {}
    for ratio in (0.5, 1.0):
        for name, values in _beside_a_loop(trainer, ratio, updates, turns):
            found[f"{name}-{ratio:g}"] = values
    for ratio, bursty in ((4.0, ""), (2.0, "bursty")):
        repeats = turns // 2
        for name, values in _busy(trainer, ratio, bool(bursty), 4 * updates, repeats):
            found[f"{name}-{bursty or '4'}"] = values
    length = "-long" * ("long" in cores)
    peer = "a loop that prefetches 2 batches"
    fed = "time of an update / a loop's", "<= 1.01", "x", peer
    starved = "step busy", ">= 0.98", "of the time", "one held batch"
    results = []
    for key, values in found.items():
        what, *words = fed if key.endswith(("-0.5", "-1")) else starved
        title, middle = f"no spec, echo, {key}: {what}", statistics.median(values)
        result = Result(f"no-spec{length}-{key}", title, middle, *words, values, note)
        results.append(result)
    if not length:
        results += [_epochs(trainer, name, note) for name in _CALLS]
    return results


def _epochs(trainer: _Trainer, name: str, note: str) -> Result:
    """Counts the updates of three epochs of a loader that is never late."""

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            return itertools.islice(_producer(0.5 * step_s), 100)

    step_s, made = trainer.held_step_s(), []
    with closing(_CALLS[name](Loader())) as loop:
        for _ in range(3):
            made.append(0)
            for batch in loop:
                made[-1] += 1
                trainer.weights = trainer._plain(trainer.weights, batch)
                jax.block_until_ready(trainer.weights)
    title = f"no spec, echo, {name}: updates of three epochs / their 300 batches"
    value, each = sum(made) / 300, [count / 100 for count in made]
    goal, peer = ("<= 1.03", "x"), "the loader alone"
    return Result(f"no-spec-epochs-{name}", title, value, *goal, peer, each, note)


_CALLS = {"host": ej.echo_batches, "device": ej.device.echo_batches}


def _beside_a_loop(
    trainer: _Trainer, ratio: float, updates: int, turns: int
) -> Iterator[tuple[str, list[float]]]:
    """Yields times of an update over those of a plain loop, all of them in turns."""
    t_up_s = ratio * trainer.held_step_s()
    took: dict[str, list[float]] = {}
    with ExitStack() as stack:
        loops = {
            name: stack.enter_context(closing(call(_producer(t_up_s))))
            for name, call in {"peer": _prefetched, **_CALLS}.items()
        }
        for loop in loops.values():
            trainer.fed_s(loop, 80)  # Until an echo has filled its buffer.
        for turn in range(turns):
            # The first place goes round, as the machine's speed drifts.
            for name in [*loops, *loops][turn % 3 :][:3]:
                took.setdefault(name, []).append(trainer.fed_s(loops[name], updates))
    for name in _CALLS:
        yield name, [a / b for a, b in zip(took[name], took["peer"], strict=True)]


def _busy(
    trainer: _Trainer, ratio: float, bursty: bool, updates: int, repeats: int
) -> Iterator[tuple[str, list[float]]]:
    """Yields the parts of the time in which the step works."""
    # In a pause the storage would get ahead, so each loop runs alone.
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, call in _CALLS.items():
            before_s = trainer.held_step_s()
            with closing(call(_producer(ratio * before_s, bursty=bursty))) as loop:
                trainer.fed_s(loop, 80)
                took_s = trainer.fed_s(loop, updates)
            held_s = (before_s + trainer.held_step_s()) / 2
            found.setdefault(name, []).append(held_s / took_s)
    yield from found.items()


def _prefetched(source: Iterator[Any]) -> Iterator[Any]:
    """A plain loader that makes and sends two batches ahead in a thread."""
    with ThreadPoolExecutor(1) as pool:
        ahead = deque(pool.submit(_sent, source) for _ in range(2))
        try:
            while True:
                ahead.append(pool.submit(_sent, source))
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _sent(source: Iterator[Any]) -> Any:
    return jax.device_put(next(source))
