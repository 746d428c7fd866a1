"""Sums on the devices between two logged rows, their means, and what is not finite.

Reading a loss costs a transfer, so it is not read at every update. Losses and task
metrics are summed on the devices, in arrays whose shapes do not depend on the task.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from echo_jax.training.update.noise import NoiseScale
from echo_jax.workloads.base import Sums

REPEAT_BUCKETS = 8
"""Losses are kept apart for repeats 0 to 6; bucket 7 is repeat 7 and all later."""

MAX_METRICS = 16
"""Metrics that a task may return beside its losses. The state has room for so many, so
that its structure, and with it a checkpoint's, depends on no task."""


class LossWindow(struct.PyTreeNode):
    """Losses since the last logged update, by repeat index."""

    # Summed losses of the examples per bucket, ``float32[REPEAT_BUCKETS]``.
    loss: jax.Array
    count: jax.Array  # Examples per bucket, ``int32[REPEAT_BUCKETS]``.

    @classmethod
    def empty(cls) -> "LossWindow":
        return cls(
            loss=jnp.zeros(REPEAT_BUCKETS, jnp.float32),
            count=jnp.zeros(REPEAT_BUCKETS, jnp.int32),
        )

    def add(self, losses: jax.Array, repeat: jax.Array) -> "LossWindow":
        """Returns the window with a batch added: float32[B] and int32[B]."""
        bucket = jnp.minimum(repeat, REPEAT_BUCKETS - 1)
        # A comparison and a sum, not a scatter: the order of the sum is then the same
        # on every backend and in every run.
        mine = bucket[:, None] == jnp.arange(REPEAT_BUCKETS)[None, :]
        # float32 counts are exact below 16 million examples. Devices sum them together
        # with the gradients, but would need a second sum for integers.
        count = mine.sum(axis=0, dtype=jnp.float32).astype(jnp.int32)
        return LossWindow(
            loss=self.loss + jnp.where(mine, losses[:, None], 0.0).sum(axis=0),
            count=self.count + count,
        )

    def mean(self) -> float:
        """Returns the mean loss of all examples, on the host; NaN without examples."""
        # The count is 0 if all updates of the window were skipped.
        count = self.count.sum()
        return float(self.loss.sum() / count) if count else math.nan

    def mean_by_repeat(self) -> dict[str, float]:
        """Returns the mean loss of each bucket that has examples, by column name."""
        last = REPEAT_BUCKETS - 1
        return {
            f"loss_repeat_{i}{'_and_later' if i == last else ''}": float(
                self.loss[i] / self.count[i]
            )
            for i in range(REPEAT_BUCKETS)
            if self.count[i]
        }


class GradientWindow(struct.PyTreeNode):
    """Gradients since the last logged update, before they are clipped."""

    updates: jax.Array  # Number of gradients, ``float32[]``.
    square: jax.Array  # Sum of their squared norms, ``float32[]``.
    noise: NoiseScale  # Sums of the estimates of their noise, each ``float32[]``.

    @classmethod
    def empty(cls) -> "GradientWindow":
        zero = jnp.zeros((), jnp.float32)
        return cls(zero, zero, NoiseScale(zero, zero))

    def add(self, square: jax.Array, noise: NoiseScale | None) -> "GradientWindow":
        """Returns the window with a gradient added, by its squared norm."""
        if noise is not None:
            noise = NoiseScale(*map(jnp.add, self.noise, noise))
        return GradientWindow(
            self.updates + 1, self.square + square, noise or self.noise
        )

    def row(self) -> dict[str, float]:
        """Returns the root mean square norm, and the noise scale if it is known."""
        if not self.updates:
            return {"gradient_norm": math.nan}
        row = {"gradient_norm": math.sqrt(self.square / self.updates)}
        # A ratio of the mean estimates; NaN where that makes no sense.
        scale = NoiseScale(*map(float, self.noise)).examples
        return row if math.isnan(scale) else {**row, "noise_scale": scale}


def stacked_metrics(metrics: Sums) -> jax.Array:
    """Returns a task's sums and counts by sorted name, float32[MAX_METRICS, 2]."""
    if len(metrics) > MAX_METRICS:
        raise ValueError(
            f"Task.loss returned {len(metrics)} metrics, and there is room for "
            f"{MAX_METRICS}; return fewer"
        )
    if "s" in metrics:
        raise ValueError(
            "Task.loss returned a metric named 's', but train_s are the seconds of "
            "training in a row; give it another name"
        )
    rows = [jnp.stack([*map(jnp.float32, metrics[name])]) for name in sorted(metrics)]
    rows += [jnp.zeros(2)] * (MAX_METRICS - len(rows))
    return jax.lax.stop_gradient(jnp.stack(rows))


def named_metrics(sums: jax.Array, metrics: Sums) -> Sums:
    """Returns stacked sums and counts by the names in `metrics`."""
    return {name: (sums[i, 0], sums[i, 1]) for i, name in enumerate(sorted(metrics))}


def metric_means(metrics: Mapping[str, tuple]) -> dict[str, float]:
    """Returns each mean on the host as ``train_METRIC``; NaN where the count is 0."""
    return {
        f"train_{name}": float(total) / float(count) if count else math.nan
        for name, (total, count) in metrics.items()
    }


class NonFiniteLossError(FloatingPointError):
    """A run went to NaN or infinity; no such state was saved.

    Attributes:
      update: The first update whose loss is not finite. If all losses are finite: the
        update after which the state is not. With a loss scale: the last update that
        was skipped.
    """

    def __init__(
        self, what: str, update: int, saved: int | None, *, scale: float | None = None
    ):
        self.update = update
        said = f"{what} {update} is not finite"
        fix = "a lower --config.optim.lr or --config.optim.clip_norm=1.0"
        if scale is not None:
            said += ", as of those before it that were skipped, and the loss scale is "
            said += f"down to {scale:g}"
            fix = "--config.precision.compute=bfloat16, a lower --config.optim.lr or, "
            fix += "of a static scale, a lower --config.precision.init"
        if saved is not None:
            said += f"; the last checkpoint, of update {saved}, is finite"
        super().__init__(f"{said}; use another --workdir with {fix}")


def is_finite(state: Any) -> jax.Array:
    """Returns whether all floats of a pytree are finite, ``bool[]``; to be jitted."""
    floats = [
        x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    return jnp.all(jnp.array([jnp.isfinite(x).all() for x in floats]))
