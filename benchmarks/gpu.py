"""Figures for an accelerator; with ``--small`` they run anywhere, as a check."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp

import echo_jax as ej
from benchmarks import tasks
from benchmarks.device import Exchange, make_feed
from benchmarks.harness import Result, drive
from echo_jax.echo.stores.device import default_mesh
from echo_jax.training.compiled import several_updates
from echo_jax.training.dispatch import fastest
from echo_jax.training.xla.flops import peak_flops_per_s, program_flops

__all__ = ["h1", "h3", "h5", "h6", "h7"]

_FACTOR = 4
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
    steps = 4 if small else 40
    state, update = tasks.training(task)
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
    constant = buffer.put(constant)
    states = {"fed": state, "held": jax.tree.map(jnp.copy, state)}

    def from_buffer() -> Any:
        inputs = feed.next()
        states["fed"] = fed(states["fed"], feed.arrays, inputs)
        return _some_of(states["fed"])

    def from_one_batch() -> Any:
        states["held"] = held(states["held"], constant)
        return _some_of(states["held"])

    ratios = []
    with closing(feed):
        for _ in range(3 if small else 8):
            both = [drive(call, steps) for call in (from_one_batch, from_buffer)]
            ratios.append(both[0] / both[1])
    return Result(
        id_,
        title,
        statistics.median(ratios[1:]),
        goal,
        "x",
        "one constant batch in accelerator memory",
        ratios[1:],
        f"{jnp.dtype(task.model.dtype).name} on {jax.devices()[0].device_kind}; "
        f"e={_FACTOR}{_SHRUNK if small else ''}",
    )


def _some_of(state: Any) -> jax.Array:
    """A little of a state, to wait for."""
    return jax.tree.leaves(state)[0].ravel()[:1]


def h7(*, small: bool = False) -> list[Result]:
    """Model FLOP utilisation of a step on one held batch."""
    peak = peak_flops_per_s(default_mesh())
    results = []
    for name, task, make, batch in (
        ("ResNet-50, 224 px", tasks.resnet_50(small=small), tasks.images, 256),
        ("ResNet-32, CIFAR-10", tasks.cifar(small=small), tasks.images, 128),
        ("GPT-2 small", tasks.gpt2(small=small), tasks.tokens, 32),
    ):
        state, update = tasks.training(task)
        rows = 8 if small else batch
        given = jax.device_put(next(make(task, rows)))
        step = jax.jit(update, donate_argnums=0)
        flops = program_flops(step.lower(state, given))
        own = [state]

        def train(own: list[Any] = own, step: Any = step, given: Any = given) -> Any:
            own[0] = step(own[0], given)
            return _some_of(own[0])

        rates = [
            flops / drive(train, 4 if small else 40) for _ in range(3 if small else 8)
        ][1:]
        unit, scale = ("of the peak", peak) if peak else ("TFLOP/s", 1e12)
        results.append(
            Result(
                f"H7-{name.split(',')[0]}",
                f"model FLOP utilisation of {name}, batch {rows}",
                statistics.median(rates) / scale,
                ">= 0",
                unit,
                "the maker's peak in bfloat16" if peak else "none: an unknown device",
                [rate / scale for rate in rates],
                f"on {jax.devices()[0].device_kind}{_SHRUNK if small else ''}",
            )
        )
    return results


def h3(*, small: bool = False) -> Result:
    """CIFAR ResNet-32: steps/s dispatched in the chosen way against a plain loop."""
    batch, group = (8, 2) if small else (128, 8)
    task = tasks.cifar(small=small)
    state, update = tasks.training(task)
    source = tasks.images(task, batch)
    held = [jax.device_put(next(source)) for _ in range(group)]

    def one(state: Any, given: Any) -> tuple[Any, None]:
        return update(state, given), None

    def compiled(num: int, *, scan: bool) -> Callable[[int], None]:
        step = jax.jit(
            lambda state, given: several_updates(one, state, given, scan=scan)[0],
            donate_argnums=0,
        )
        own = [jax.tree.map(jnp.copy, state)]

        def run(groups: int) -> None:
            for _ in range(groups * group // num):
                own[0] = step(own[0], held[:num])
            jax.block_until_ready(own[0])

        return run

    timing = fastest(
        {
            "loop": compiled(1, scan=False),
            "scan": compiled(group, scan=True),
            "unroll": compiled(group, scan=False),
        }
    )
    value = 1 / timing.relative[timing.name]
    relative = ", ".join(f"{name} {x:.3f}" for name, x in timing.relative.items())
    return Result(
        "H3",
        f"steps/s of ResNet-{task.model.depth}, chosen dispatch / a plain loop",
        value,
        ">= 1.5",
        "x",
        "one dispatch for each update",
        [value],
        f"{timing.name} chosen, groups of {group}; seconds relative to the loop: "
        f"{relative}; on {jax.devices()[0].device_kind}",
    )


def h5(*, small: bool = False) -> Result:
    """Insert and draw in a buffer that fills most of the accelerator's memory."""
    num_bytes, batch = (10_000_000, 8) if small else (100_000_000_000, 256)
    task = tasks.resnet_50(small=small)
    source = tasks.images(task, batch)
    item = task.image_size**2 * 3 + 4
    spec = ej.EchoSpec(_FACTOR, num_bytes // item, "spread", batch)
    batch_of_images = next(source)
    exchange = Exchange(spec, batch_of_images, 16)
    buffer = exchange.buffer
    state, update = tasks.training(task)
    held = jax.jit(update, donate_argnums=0)
    constant = buffer.put(batch_of_images)
    states = [state]

    def train() -> Any:
        states[0] = held(states[0], constant)
        return _some_of(states[0])

    def draw() -> Any:
        return exchange()[0]["label"]

    ratios = []
    for _ in range(6):
        both = [drive(call, 8 if small else 30) for call in (train, draw)]
        ratios.append(both[1] / both[0])
    return Result(
        "H5",
        f"insert and draw in a buffer of {buffer.num_bytes / 1e9:.3g} GB / a step",
        statistics.median(ratios[1:]),
        "<= 0.01",
        "x",
        f"a training step of ResNet-50, batch {batch}",
        ratios[1:],
        f"on {jax.devices()[0].device_kind}{_SHRUNK if small else ''}",
    )
