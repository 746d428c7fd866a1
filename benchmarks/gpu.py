"""Figures for an accelerator; with ``--small`` they run anywhere, as a check."""

import statistics
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import optax

import echo_jax as ej
from benchmarks.device import chunks, make_feed
from benchmarks.harness import Result, drive
from echo_jax.models.resnet import ResNet
from echo_jax.training.inner import fastest, several_updates

__all__ = ["h1", "h3", "h5"]

_FACTOR = 4


def _training(model: ResNet, size: int) -> tuple[Any, Callable[..., Any]]:
    """A state, and an update of it on a uint8 batch."""
    variables = dict(
        model.init(jax.random.key(0), jnp.zeros((1, size, size, 3)), train=False)
    )
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = variables, optimizer.init(variables["params"])

    def update(state: Any, batch: dict[str, jax.Array]) -> Any:
        variables, momentum = state
        images = batch["image"].astype(jnp.float32) / 127.5 - 1

        def loss(params: Any) -> tuple[jax.Array, Any]:
            logits, updated = model.apply(
                {**variables, "params": params},
                images,
                train=True,
                mutable=["batch_stats"],
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            )
            return losses.mean(), updated

        grads, updated = jax.grad(loss, has_aux=True)(variables["params"])
        changes, momentum = optimizer.update(grads, momentum)
        params = optax.apply_updates(variables["params"], changes)
        return {"params": params, **updated}, momentum

    return state, update


def h1(*, small: bool = False) -> Result:
    """Training from the accelerator's buffer against training on one batch."""
    size, batch, steps = (32, 8, 4) if small else (224, 256, 40)
    model = ResNet(
        num_classes=10 if small else 1000,
        depth=8 if small else 56,
        width=8 if small else 64,
        dtype=jnp.float32 if small else jnp.bfloat16,
    )
    state, update = _training(model, size)
    spec = ej.EchoSpec(_FACTOR, 8 * batch, "spread", batch)
    feed = make_feed(spec, chunks(batch, (size, size, 3)), prefetch=2)
    buffer = feed.buffer

    def echoed(state: Any, arrays: Any, inputs: Any) -> tuple[Any, Any]:
        arrays, (drawn,) = buffer.draw(arrays, inputs)
        return update(state, drawn), arrays

    fed = jax.jit(echoed, donate_argnums=(0, 1), out_shardings=(None, buffer.sharding))
    held = jax.jit(update, donate_argnums=0)
    constant = buffer.put(next(chunks(batch, (size, size, 3))))
    states = {"fed": state, "held": jax.tree.map(jnp.copy, state)}

    def from_buffer() -> Any:
        inputs = feed.next()
        states["fed"], feed.arrays = fed(states["fed"], feed.arrays, inputs)
        return jax.tree.leaves(states["fed"])[0].ravel()[:1]

    def from_one_batch() -> Any:
        states["held"] = held(states["held"], constant)
        return jax.tree.leaves(states["held"])[0].ravel()[:1]

    ratios = []
    with closing(feed):
        for _ in range(3 if small else 8):
            both = [drive(call, steps) for call in (from_one_batch, from_buffer)]
            ratios.append(both[0] / both[1])
    return Result(
        "H1",
        f"steps/s fed from the buffer / on one held batch, batch {batch}, {size} px",
        statistics.median(ratios[1:]),
        ">= 0.99",
        "x",
        "one constant batch in accelerator memory",
        ratios[1:],
        f"ResNet-{model.depth}, width {model.width}, "
        f"{jnp.dtype(model.dtype).name} on {jax.devices()[0].device_kind}; e={_FACTOR}",
    )


def h3(*, small: bool = False) -> Result:
    """CIFAR ResNet-32: steps/s with the chosen inner steps against a plain loop."""
    size, batch, group = (32, 8, 2) if small else (32, 128, 8)
    model = ResNet(num_classes=10, depth=8 if small else 32, width=8 if small else 16)
    state, update = _training(model, size)
    source = chunks(batch, (size, size, 3))
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
        f"steps/s of ResNet-{model.depth} with the chosen inner steps / a plain loop",
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
    size = 32 if small else 224
    source = chunks(batch, (size, size, 3))
    item = size * size * 3 + 4
    spec = ej.EchoSpec(_FACTOR, num_bytes // item, "spread", batch)
    feed = make_feed(spec, source, prefetch=0)
    buffer = feed.buffer
    step = jax.jit(buffer.draw, donate_argnums=0, out_shardings=buffer.sharding)
    model = ResNet(
        num_classes=10,
        depth=8 if small else 56,
        width=8 if small else 64,
        dtype=jnp.bfloat16,
    )
    state, update = _training(model, size)
    held = jax.jit(update, donate_argnums=0)
    constant = buffer.put(next(source))
    states = [state]

    def train() -> Any:
        states[0] = held(states[0], constant)
        return jax.tree.leaves(states[0])[0].ravel()[:1]

    inputs = [feed.next() for _ in range(16)]
    at = [0]

    def exchange() -> Any:
        given = inputs[at[0] % len(inputs)]
        at[0] += 1
        feed.arrays, batches = step(feed.arrays, given)
        return batches[0]["label"]

    ratios = []
    for _ in range(6):
        both = [drive(call, 8 if small else 30) for call in (train, exchange)]
        ratios.append(both[1] / both[0])
    return Result(
        "H5",
        f"insert and draw in a buffer of {buffer.num_bytes / 1e9:.3g} GB / a step",
        statistics.median(ratios[1:]),
        "<= 0.01",
        "x",
        f"a training step of ResNet-{model.depth} at {size} px, batch {batch}",
        ratios[1:],
        f"on {jax.devices()[0].device_kind}",
    )
