"""A draw on devices: in a step, under a scan, and as called, beside its peers."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import echo_jax as ej
from benchmarks.device import host_batches, in_turns, make_feed
from benchmarks.harness import Result
from echo_jax.echo.device import DeviceFeed

_FACTOR = 4
_STEPS = 64
_SCANNED = 16


def draws() -> list[Result]:
    """Microseconds of a draw in the step, under a scan, and as called, and of peers."""
    import flashbax

    rows, factor, capacity = 32, _FACTOR, 4096
    batch, spec = (
        next(host_batches(rows)),
        ej.EchoSpec(factor, capacity, "spread", rows),
    )
    once, many = (
        make_feed(spec, host_batches(rows), max_batches=count, seed=None)
        for count in (1, _SCANNED)
    )
    called = ej.device.echo_batches(host_batches(rows), spec, num_lanes=1)

    def used(batch: Any) -> tuple[jax.Array, Any]:
        return batch["label"].sum(), batch

    def drawn(feed: DeviceFeed, arrays: Any, uses: Any) -> Any:
        return used(feed.buffer.draw(arrays, uses[None])[0])

    step = jax.jit(lambda arrays, inputs: drawn(once, arrays, inputs[0]))
    scan = jax.jit(
        lambda arrays, inputs: jax.lax.scan(
            lambda none, uses: (none, drawn(many, arrays, uses)), None, inputs
        )
    )
    gather = jax.jit(lambda slots, at: used(jax.tree.map(lambda x: x[at], slots)))
    plain = jax.tree.map(
        lambda x: jnp.asarray(np.resize(x, (capacity, *x.shape[1:]))), batch
    )
    picks = np.random.default_rng(0).integers(0, capacity, (_STEPS, rows), np.int32)
    peer = flashbax.make_item_buffer(
        max_length=capacity, min_length=1, sample_batch_size=rows, add_batches=True
    )

    def sampled(state: Any, part: Any, key: jax.Array) -> tuple[Any, Any]:
        state = peer.add(state, part)
        return state, used(peer.sample(state, key).experience)

    sample = jax.jit(sampled, donate_argnums=0)
    part = jax.device_put(jax.tree.map(lambda x: x[: rows // factor], batch))
    holder = [peer.init(jax.tree.map(lambda x: x[0], part))]
    keys = list(jax.random.split(jax.random.key(0), _STEPS))

    def flashbax_all() -> None:
        for key in keys:
            holder[0], found = sample(holder[0], part, key)
            jax.block_until_ready(found)

    def each(draw: Callable[[], Any], count: int = _STEPS) -> Callable[[], None]:
        def all_of_them() -> None:
            for _ in range(count):
                jax.block_until_ready(draw())

        return all_of_them

    def fed(feed: DeviceFeed, program: Any, count: int) -> Any:
        inputs = feed.take(count)
        return program(feed.arrays, inputs)

    turn = itertools.cycle(picks)
    own, scanned = (_OwnStep(spec, host_batches(rows), used) for _ in range(2))
    calls = {
        "gather": each(lambda: gather(plain, next(turn))),
        "flashbax": flashbax_all,
        "step": each(lambda: fed(once, step, 1)),
        "scan": each(lambda: fed(many, scan, _SCANNED), _STEPS // _SCANNED),
        "called": each(lambda: next(called)),
        "own": each(own.step),
        "own-scan": each(scanned.scan, _STEPS // _SCANNED),
    }
    while min(x.counts.fresh for x in (once, many, called)) < capacity:
        for name in ("step", "scan", "called", "own", "own-scan"):
            calls[name]()
    while not peer.can_sample(holder[0]):
        flashbax_all()
    times = in_turns(calls, 25)
    goals = {"step": "<= 70", "scan": "<= 50", "called": "<= 110"}
    goals |= {"own": "<= 70", "own-scan": "<= 50"}
    title = "a draw of 32 of 4096 CIFAR-shaped items, e=4, {}"
    words = {
        "gather": "a raw gather from a device array, in a step",
        "flashbax": "flashbax, insert and sample in a step",
        "step": "in a step, by a feed that reads ahead",
        "scan": f"in a scan over {_SCANNED} batches, by such a feed",
        "called": "of ej.device.echo_batches as called",
        "own": "in a step, by ej.device.StepEcho",
        "own-scan": f"in a scan over {_SCANNED} batches, by ej.device.StepEcho",
    }
    planned = f"; planned beforehand, in {1e6 * own.plan_s:.1f} us a draw"
    return [
        Result(
            f"draws-{name}",
            title.format(words[name]),
            1e6 * statistics.median(values) / _STEPS,
            goals.get(name, ">= 0"),
            "us",
            "the others of these lines",
            [1e6 * value / _STEPS for value in values],
            "an absolute time; every draw is waited for"
            + planned * name.startswith("own"),
        )
        for name, values in times.items()
    ]


class _OwnStep:
    """A user's loop with `ej.device.StepEcho`, which reads in its own thread."""

    def __init__(
        self, spec: ej.EchoSpec, loader: Iterator[Any], used: Callable[[Any], Any]
    ):
        first = next(loader)
        echo = ej.device.StepEcho.of(first, spec)
        began = time.perf_counter()
        integers, taken, _ = echo.decide(num_host_batches=4096)
        self.plan_s = (time.perf_counter() - began) / len(taken)
        self._loader, self._arrays = loader, echo.init()
        self._fresh = _stacked([first])
        self._steps = zip(integers, taken.tolist(), strict=True)

        @functools.partial(jax.jit, donate_argnums=0)
        def program(arrays: Any, fresh: Any, integers: Any) -> Any:
            arrays = echo.write(arrays, fresh, integers)
            return arrays, used(echo.read(arrays, integers))

        @functools.partial(jax.jit, donate_argnums=0)
        def scanned(arrays: Any, fresh: Any, *inputs: Any) -> Any:
            def one(arrays: Any, each: Any) -> Any:
                arrays = echo.write(arrays, fresh, *each)
                return arrays, used(echo.read(arrays, each[0]))

            return jax.lax.scan(one, arrays, inputs)

        self._program, self._scanned = program, scanned

    def step(self) -> Any:
        integers, taken = next(self._steps)
        if taken:
            self._fresh = _stacked([next(self._loader) for _ in range(taken)])
        self._arrays, found = self._program(self._arrays, self._fresh, integers)
        return found

    def scan(self) -> Any:
        steps = itertools.islice(self._steps, _SCANNED)
        integers, taken = map(np.array, zip(*steps, strict=True))
        # One more than there are at most, so that every stack has as many.
        read = [next(self._loader) for _ in range(taken.sum())]
        read += read[-1:] * (_SCANNED // _FACTOR + 1 - len(read))
        inputs = integers, np.cumsum(taken, dtype=np.int32) - taken.astype(np.int32)
        self._arrays, found = self._scanned(self._arrays, _stacked(read), *inputs)
        return found


def _stacked(batches: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
