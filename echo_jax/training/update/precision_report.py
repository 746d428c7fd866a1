"""What a config's precision changes in its first updates, against all in float32."""

import copy
import functools
import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.config import Config, default_config
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.training.feeds.loader import next_batch, unechoed
from echo_jax.training.processes.sharding import batch_sharding
from echo_jax.training.trainer import (
    RunInputs,
    TrainState,
    compile_functions,
    train_step,
)
from echo_jax.training.update.gradients import Gradient, gradient_of
from echo_jax.training.update.optim import Optimizer
from echo_jax.training.update.precision import Precision, as_float32
from echo_jax.workloads.base import Batch, Task, Workload

__all__ = ["ComparedUpdate", "PrecisionReport", "all_in_float32", "compare_precision"]

_HEADINGS = (
    "update",
    "loss",
    "in float32",
    "differs by",
    "update by",
    "zero",
    "in float32",
    "not finite",
    "loss scale",
)


@dataclass(frozen=True)
class ComparedUpdate:
    """One update of a config, and of the same in float32.

    Attributes:
      loss: Of the config, before the update.
      loss_in_float32: Of the other.
      update_differs: The norm of the difference of what the two add to their
        parameters, divided by the norm of what is added in float32; NaN where that
        is 0.
      zeros: Which part of the numbers in the config's gradient is 0.
      zeros_in_float32: Of the other's.
      not_finite: Which part of the numbers in the config's gradient is infinite or NaN.
      loss_scale: What the loss was multiplied by; 1 without a loss scale.
      is_skipped: Whether the config skipped the update.
    """

    loss: float
    loss_in_float32: float
    update_differs: float
    zeros: float
    zeros_in_float32: float
    not_finite: float
    loss_scale: float
    is_skipped: bool

    @property
    def loss_differs(self) -> float:
        """The difference of the losses, divided by that in float32."""
        if not self.loss_in_float32:
            return math.nan
        return abs(self.loss - self.loss_in_float32) / abs(self.loss_in_float32)


@dataclass(frozen=True)
class PrecisionReport:
    """The first updates of a config, and of the same in float32; print it.

    Both begin with the same parameters and see the same batches; each goes on from
    where its own updates have led.

    Attributes:
      name: The precision of the config, in words.
      updates: The compared updates, in order.
    """

    name: str
    updates: tuple[ComparedUpdate, ...]

    @property
    def skipped_updates(self) -> int:
        """How many updates the config skipped."""
        return sum(each.is_skipped for each in self.updates)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [_HEADINGS]
        for number, each in enumerate(self.updates, start=1):
            skipped = " skipped" if each.is_skipped else ""
            rows.append(
                (
                    f"{number}",
                    f"{each.loss:.5g}",
                    f"{each.loss_in_float32:.5g}",
                    f"{each.loss_differs:.1e}",
                    f"{each.update_differs:.1e}",
                    f"{each.zeros:.2%}",
                    f"{each.zeros_in_float32:.2%}",
                    f"{each.not_finite:.2%}",
                    f"{each.loss_scale:g}{skipped}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.rjust(n) for cell, n in zip(row, widths, strict=True))
            for row in rows
        ]
        total = len(self.updates)
        return "\n".join(
            [
                f"{self.name}, beside the same in float32. Relative differences of the "
                "loss and of",
                "the update; zeros, and what is not finite, in the gradient.",
                *lines,
                f"skipped updates: {self.skipped_updates} of {total}",
            ]
        )


def all_in_float32(config: Config) -> Config:
    """Returns a config with the precision that one has by default.

    Args:
      config: A checked training config.

    Raises:
      ValueError: It has that already.
    """
    plain = copy.deepcopy(config)
    plain.precision.update(default_config().precision)
    if plain.precision == config.precision:
        raise ValueError(
            "this config is all in float32, with which it would be compared; set "
            "--config.precision.compute=float16, or bfloat16"
        )
    return plain


def compare_precision(
    config: Config, workload: Workload, plain: Workload, *, updates: int
) -> PrecisionReport:
    """Trains the first updates of a config, and the same in float32.

    Args:
      config: A checked training config.
      workload: Made from it.
      plain: Made from `all_in_float32` of it.
      updates: How many.

    Returns:
      The report. The batches are those without an echo.

    Raises:
      ValueError: The config does not fit the devices, or the data ended.
    """
    arm = _Arm(config, workload)
    reference = _Arm(all_in_float32(config), plain)
    compared = []
    dataset = workload.train_dataset(unechoed(config))
    with closing(JoinedBatches([dataset])) as batches:
        for number in range(updates):
            batch = next_batch(batches, workload, f"after {number} updates")
            compared.append(_compared(arm.update(batch), reference.update(batch)))
    precision = config.precision
    name = (
        f"Computed in {precision.compute}, stored in {precision.params}, loss scale "
        f"{precision.loss_scale}"
    )
    return PrecisionReport(name, tuple(compared))


class _Seen(NamedTuple):
    """What an update did.

    Attributes:
      loss: Before it, ``float32[]``.
      added: To the parameters, in float32.
      zeros: Which part of the gradient is 0, ``float32[]``.
      not_finite: Which is NaN or infinite, ``float32[]``.
      scale: Of the loss; None without one.
      skipped: Updates that were skipped by then, less those before, ``int32[]``.
    """

    loss: jax.Array
    added: Any
    zeros: jax.Array
    not_finite: jax.Array
    scale: jax.Array | None
    skipped: jax.Array | int


class _Arm:
    """A config in training; it is compiled at the first update."""

    def __init__(self, config: Config, workload: Workload):
        compiled = compile_functions(config, workload)
        self._state = compiled.init(compiled.init_key)
        self._run, self._sharding = compiled.run, batch_sharding(compiled.mesh)
        gradient = gradient_of(config, compiled.mesh)
        step = functools.partial(
            train_step,
            task=workload.task,
            optimizer=Optimizer.from_config(config),
            precision=Precision.from_config(config),
            gradient=gradient,
        )
        seen = functools.partial(_seen_update, step, gradient, workload.task)
        self._step = jax.jit(seen)

    def update(self, batch: Batch) -> _Seen:
        """Trains on a host batch with the echo's tags."""
        arrays = {name: x for name, x in batch.items() if name != "fresh_index"}
        arrays = jax.device_put(arrays, self._sharding)
        self._state, seen = self._step(self._state, arrays, self._run)
        return seen


def _seen_update(
    step: Any,
    gradient: Gradient,
    task: Task,
    state: TrainState,
    batch: Batch,
    run: RunInputs,
) -> tuple[TrainState, _Seen]:
    """Performs an update, and looks at the gradient that it goes by."""
    scaler = state.loss_scale
    factor = None if scaler is None else scaler.factor(run.loss_scale)
    found = gradient(
        task,
        {"params": state.params, **state.model_state},
        {name: x for name, x in batch.items() if name != "repeat"},
        jax.random.fold_in(run.key, state.update),
        factor,
    )
    new, _ = step(state, batch, run)
    added = jax.tree.map(jnp.subtract, *map(as_float32, (new.params, state.params)))
    skipped = 0
    if scaler is not None:
        skipped = new.loss_scale.skipped_updates - scaler.skipped_updates
    return new, _Seen(
        loss=found.losses.mean(),
        added=added,
        zeros=_share(lambda x: x == 0, found.gradient),
        not_finite=_share(lambda x: ~jnp.isfinite(x), found.gradient),
        scale=factor,
        skipped=skipped,
    )


def _share(holds: Callable[[jax.Array], jax.Array], tree: Any) -> jax.Array:
    """Returns of which part of the numbers in a tree something holds."""
    leaves = jax.tree.leaves(tree)
    count = sum(holds(x).sum(dtype=jnp.float32) for x in leaves)
    return jnp.float32(count) / sum(x.size for x in leaves)


@jax.jit
def _distances(added: Any, reference: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the norms of a difference, and of what is differed from."""
    difference = jax.tree.map(jnp.subtract, added, reference)
    return _norm(difference), _norm(reference)


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum((x**2).sum() for x in jax.tree.leaves(tree)))


def _compared(seen: _Seen, reference: _Seen) -> ComparedUpdate:
    distances = _distances(seen.added, reference.added)
    difference, size = map(float, jax.device_get(distances))
    seen, reference = jax.device_get([x._replace(added=()) for x in (seen, reference)])
    return ComparedUpdate(
        loss=float(seen.loss),
        loss_in_float32=float(reference.loss),
        update_differs=difference / size if size else math.nan,
        zeros=float(seen.zeros),
        zeros_in_float32=float(reference.zeros),
        not_finite=float(seen.not_finite),
        loss_scale=1.0 if seen.scale is None else float(seen.scale),
        is_skipped=bool(seen.skipped),
    )
