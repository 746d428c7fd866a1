"""Figures for an accelerator; with ``--small`` they run anywhere, as a check."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import echo_jax as ej
from benchmarks import tasks
from benchmarks.device import Exchange, make_feed
from benchmarks.harness import Result, drive, paired, seconds
from echo_jax.echo.stores.device import default_mesh, jitted_write
from echo_jax.training.compiled import several_updates
from echo_jax.training.xla import peak_flops_per_s, program_flops

_FACTOR = 4
# A step takes about 0.1 s; the first round does not count.
_STEPS, _ROUNDS = 20, 6
# Bytes of memory that H5 leaves to a training step, which needs 12 GB.
_FOR_THE_STEP = 25_000_000_000
_SHRUNK = "; a network shrunk to a check"


def h1(*, small: bool = False) -> Result:
    """ResNet-50 fed from the accelerator's buffer against one constant batch."""
    task, batch = tasks.resnet_50(small=small), 8 if small else 256
    title = f"steps/s of ResNet-50 fed from the buffer / on one held batch of {batch}"
    return _fed("H1", title, task, tasks.images(task, batch), ">= 0.99", small=small)


def h6(*, small: bool = False) -> Result:
    """GPT-2 small fed from the accelerator's buffer against one constant batch."""
    task, batch = tasks.gpt2(small=small), 8 if small else 32
    title = f"tokens/s of GPT-2 small fed from the buffer / on one batch of {batch}"
    return _fed("H6", title, task, tasks.tokens(task, batch), ">= 0.995", small=small)


def _fed(
    id_: str, title: str, task: Any, source: Iterator[Any], goal: str, *, small: bool
) -> Result:
    steps = 4 if small else _STEPS
    state, update = _training(task)
    constant = next(source)
    batch = len(jax.tree.leaves(constant)[0])
    spec = ej.EchoSpec(_FACTOR, 8 * batch, "spread", batch)
    feed = make_feed(spec, source, prefetch=2)
    buffer = feed.buffer

    def echoed(state: Any, arrays: Any, inputs: Any) -> Any:
        (drawn,) = buffer.draw(arrays, inputs)
        return update(state, drawn)

    fed = jax.jit(echoed, donate_argnums=0)
    held = jax.jit(update, donate_argnums=0)
    constant = jax.device_put(constant, buffer.sharding)
    states = {"fed": state, "held": jax.tree.map(jnp.copy, state)}

    def from_buffer() -> Any:
        inputs = feed.take()
        states["fed"] = fed(states["fed"], feed.arrays, inputs)
        return _some_of(states["fed"])

    def from_one_batch() -> Any:
        states["held"] = held(states["held"], constant)
        return _some_of(states["held"])

    ratios, held_s = [], []
    with closing(feed):
        for _ in range(3 if small else _ROUNDS):
            both = [drive(call, steps) for call in (from_one_batch, from_buffer)]
            ratios.append(both[0] / both[1])
            held_s.append(both[0])
    return Result(
        id_,
        title,
        statistics.median(ratios[1:]),
        goal,
        "x",
        "one constant batch in accelerator memory",
        ratios[1:],
        f"{jnp.dtype(task.model.dtype).name} on {jax.devices()[0].device_kind}; "
        f"e={_FACTOR}; {1e3 * statistics.median(held_s[1:]):.3g} ms a step on the held "
        f"batch{_SHRUNK if small else ''}",
    )


def _training(task: Any) -> tuple[Any, tasks.Update]:
    """Returns a state that lies on a mesh as an update leaves it, and the update.

    Else the second update would compile the program again.
    """
    state, update = tasks.training(task)
    return jax.device_put(state, NamedSharding(default_mesh(), P())), update


def _some_of(state: Any) -> jax.Array:
    """A little of a state, to wait for."""
    return jax.tree.leaves(state)[0].ravel()[:1]


def h7(*, small: bool = False) -> Iterator[Result]:
    """Model FLOP utilisation of a step on one held batch."""
    mesh = default_mesh()
    peak = peak_flops_per_s(mesh)
    for name, task, make, batch in (
        ("ResNet-50, 224 px", tasks.resnet_50(small=small), tasks.images, 256),
        ("ResNet-32, CIFAR-10", tasks.cifar(small=small), tasks.images, 128),
        ("GPT-2 small", tasks.gpt2(small=small), tasks.tokens, 32),
    ):
        state, update = _training(task)
        rows = 8 if small else batch
        # Placed as by a buffer: H1, H5 and H6 compile the same program.
        given = jax.device_put(next(make(task, rows)), NamedSharding(mesh, P("data")))
        step = jax.jit(update, donate_argnums=0)
        flops = program_flops(step.lower(state, given))
        if flops is None:
            raise RuntimeError("XLA counts no operations: let JAX_PLATFORMS have cpu")
        own = [state]

        def train(own: list[Any] = own, step: Any = step, given: Any = given) -> Any:
            own[0] = step(own[0], given)
            return _some_of(own[0])

        rates = [
            flops / drive(train, 4 if small else _STEPS)
            for _ in range(3 if small else _ROUNDS)
        ][1:]
        median = statistics.median(rates)
        unit, scale = ("of the peak", peak) if peak else ("TFLOP/s", 1e12)
        yield Result(
            f"H7-{name.split(',')[0]}",
            f"model FLOP utilisation of {name}, batch {rows}",
            median / scale,
            ">= 0",
            unit,
            "the maker's peak in bfloat16" if peak else "none: an unknown device",
            [rate / scale for rate in rates],
            f"on {jax.devices()[0].device_kind}; {1e3 * flops / median:.3g} ms a step"
            f"{_SHRUNK if small else ''}",
        )


def h3(*, small: bool = False) -> Result:
    """CIFAR ResNet-32: steps/s with 8 updates in a dispatch against a plain loop."""
    batch, group = (8, 2) if small else (128, 8)
    task = tasks.cifar(small=small)
    state, update = tasks.training(task)
    source = tasks.images(task, batch)
    held = [jax.device_put(next(source)) for _ in range(group)]

    def one(state: Any, given: Any) -> tuple[Any, None]:
        return update(state, given), None

    def compiled(num: int) -> Callable[[int], None]:
        step = jax.jit(
            lambda state, given: several_updates(one, state, given)[0], donate_argnums=0
        )
        own = [jax.tree.map(jnp.copy, state)]

        def run(groups: int) -> None:
            for _ in range(groups * group // num):
                own[0] = step(own[0], held[:num])
            jax.block_until_ready(own[0])

        return run

    loop, scan = compiled(1), compiled(group)
    for run in (loop, scan):
        run(1)  # Compiles.
    times = max(1, round(0.1 / seconds(lambda: loop(1))))
    work = [partial(seconds, partial(run, times)) for run in (scan, loop)]
    repeats = paired(*work, repeats=5)[1]
    return Result(
        "H3",
        f"steps/s of ResNet-{task.model.depth}, {group} updates in a dispatch / a loop",
        statistics.median(repeats),
        ">= 1.5",
        "x",
        "one dispatch for each update",
        repeats,
        f"on {jax.devices()[0].device_kind}",
    )


def h5(*, small: bool = False) -> Result:
    """Insert and draw in a buffer that fills most of the accelerator's memory."""
    num_bytes, batch = (10_000_000, 8) if small else (_large_buffer(), 256)
    task = tasks.resnet_50(small=small)
    source = tasks.images(task, batch)
    item = task.image_size**2 * 3 + 4
    spec = ej.EchoSpec(_FACTOR, num_bytes // item, "spread", batch)
    batch_of_images = next(source)
    exchange = Exchange(spec, batch_of_images, 16)
    buffer = exchange.buffer
    _check_last_slots(exchange, batch_of_images)
    state, update = _training(task)
    held = jax.jit(update, donate_argnums=0)
    constant = jax.device_put(batch_of_images, buffer.sharding)
    states = [state]

    def train() -> Any:
        states[0] = held(states[0], constant)
        return _some_of(states[0])

    def draw() -> Any:
        return exchange()[0]["label"]

    took = {"train": [], "draw": []}
    for _ in range(3 if small else _ROUNDS):
        for name, call in (("train", train), ("draw", draw)):
            took[name].append(drive(call, 8 if small else _STEPS))
    ratios = [a / b for a, b in zip(took["draw"], took["train"], strict=True)]
    step_ms, draw_ms = (1e3 * statistics.median(each[1:]) for each in took.values())
    return Result(
        "H5",
        f"insert and draw in a buffer of {buffer.num_bytes / 1e9:.3g} GB / a step",
        statistics.median(ratios[1:]),
        "<= 0.01",
        "x",
        f"a training step of ResNet-50, batch {batch}",
        ratios[1:],
        f"on {jax.devices()[0].device_kind}; a step of {step_ms:.3g} ms, an "
        f"insert and draw of {draw_ms:.3g} ms; the batch that is inserted is on "
        f"the device{_SHRUNK if small else ''}",
    )


def _large_buffer() -> int:
    """Bytes: 100 GB, or what an accelerator has beside a training step."""
    stats = jax.devices()[0].memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    return min(100_000_000_000, free - _FOR_THE_STEP) if free else 100_000_000_000


def _check_last_slots(exchange: Exchange, batch: Any) -> None:
    """Writes the last slots, which lie beyond 2^31 bytes, and reads them again."""
    buffer = exchange.buffer
    rows = buffer.rows // buffer.num_lanes
    slots = np.arange(buffer.num_slots - rows, buffer.num_slots, dtype=np.int32)
    slots = np.tile(slots, (buffer.num_lanes, 1))
    exchange.arrays = jitted_write(buffer)(exchange.arrays, exchange.batch, slots)
    found = jax.jit(buffer.read)(exchange.arrays, slots.reshape(-1))
    for name, expected in batch.items():
        np.testing.assert_array_equal(found[name], expected)
