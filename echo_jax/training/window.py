"""What is summed on the devices between two logged rows, and the means in a row.

Reading a loss costs a transfer, so it is not read at every update: losses and a task's
own metrics are summed where they are, in arrays of shapes that depend on no task.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct

from echo_jax.training.cost_model import NoiseScale
from echo_jax.workloads.base import Sums

__all__ = [
    "MAX_METRICS",
    "REPEAT_BUCKETS",
    "GradientWindow",
    "LossWindow",
    "metric_means",
    "named_metrics",
    "stacked_metrics",
]

REPEAT_BUCKETS = 8
"""Losses are kept apart for repeats 0 to 6; bucket 7 is repeat 7 and all later."""

MAX_METRICS = 16
"""Metrics that a task may return beside its losses. The state has room for so many, so
that its structure, and with it a checkpoint's, depends on no task."""


class LossWindow(struct.PyTreeNode):
    """Losses since the last logged update, by repeat index.

    Attributes:
      loss: Summed losses of the examples per bucket, ``float32[REPEAT_BUCKETS]``.
      count: Examples per bucket, ``int32[REPEAT_BUCKETS]``.
    """

    loss: jax.Array
    count: jax.Array

    @classmethod
    def empty(cls) -> "LossWindow":
        """Returns a window with nothing in it."""
        return cls(
            loss=jnp.zeros(REPEAT_BUCKETS, jnp.float32),
            count=jnp.zeros(REPEAT_BUCKETS, jnp.int32),
        )

    def add(self, losses: jax.Array, repeat: jax.Array) -> "LossWindow":
        """Returns the window with a batch added.

        Args:
          losses: The loss of every example, ``float32[B]``.
          repeat: The repeat index of every example, ``int32[B]``.
        """
        bucket = jnp.minimum(repeat, REPEAT_BUCKETS - 1)
        # A comparison and a sum, not a scatter: its order is the same on every
        # backend and in every run.
        mine = bucket[:, None] == jnp.arange(REPEAT_BUCKETS)[None, :]
        # Counted in float32, exactly for less than 16 million examples: devices then
        # sum the counts together with the gradients, and integers apart from them.
        count = mine.sum(axis=0, dtype=jnp.float32).astype(jnp.int32)
        return LossWindow(
            loss=self.loss + jnp.where(mine, losses[:, None], 0.0).sum(axis=0),
            count=self.count + count,
        )

    def mean(self) -> float:
        """Returns the mean loss of all examples; for a window on the host.

        NaN where there are none: a window of updates that were all skipped.
        """
        count = self.count.sum()
        return float(self.loss.sum() / count) if count else math.nan

    def mean_by_repeat(self) -> dict[str, float]:
        """Returns the mean loss of every bucket with examples; see `mean`.

        Example:
          >>> jax.device_get(window).mean_by_repeat()
          {'loss_repeat_0': 2.5, 'loss_repeat_7_and_later': 0.25}
        """
        last = REPEAT_BUCKETS - 1
        return {
            f"loss_repeat_{i}{'_and_later' if i == last else ''}": float(
                self.loss[i] / self.count[i]
            )
            for i in range(REPEAT_BUCKETS)
            if self.count[i]
        }


class GradientWindow(struct.PyTreeNode):
    """Gradients since the last logged update, before they are clipped.

    Attributes:
      updates: How many, ``float32[]``.
      square: Their squared norms, summed, ``float32[]``.
      noise: What was estimated of their noise, summed, each ``float32[]``.
    """

    updates: jax.Array
    square: jax.Array
    noise: NoiseScale

    @classmethod
    def empty(cls) -> "GradientWindow":
        """Returns a window with nothing in it."""
        zero = jnp.zeros((), jnp.float32)
        return cls(zero, zero, NoiseScale(zero, zero))

    def add(self, square: jax.Array, noise: NoiseScale | None) -> "GradientWindow":
        """Returns the window with an update added.

        Args:
          square: The squared norm of its gradient.
          noise: As far as it is known.
        """
        if noise is not None:
            noise = NoiseScale(*map(jnp.add, self.noise, noise))
        return GradientWindow(
            self.updates + 1, self.square + square, noise or self.noise
        )

    def row(self) -> dict[str, float]:
        """Returns the root mean square of the norms, and the noise scale if known.

        For a window on the host. The scale is the ratio of what was estimated on
        average, and nothing where that makes no sense: see `NoiseScale.examples`.
        """
        if not self.updates:
            return {"gradient_norm": math.nan}
        row = {"gradient_norm": math.sqrt(self.square / self.updates)}
        scale = NoiseScale(*map(float, self.noise)).examples
        return row if math.isnan(scale) else {**row, "noise_scale": scale}


def stacked_metrics(metrics: Sums) -> jax.Array:
    """Returns a task's sums and counts as an array of the one shape.

    Args:
      metrics: From `Task.loss`.

    Returns:
      ``float32[MAX_METRICS, 2]``, in the order of the names; 0 where there is none.

    Raises:
      ValueError: They cannot be logged.
    """
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
    """Returns sums and counts by name again; see `stacked_metrics`.

    Args:
      sums: ``float32[MAX_METRICS, 2]``.
      metrics: With the names that were stacked.
    """
    return {name: (sums[i, 0], sums[i, 1]) for i, name in enumerate(sorted(metrics))}


def metric_means(metrics: Mapping[str, tuple]) -> dict[str, float]:
    """Returns the mean of every metric as ``train_METRIC``; NaN where none counted.

    Args:
      metrics: From `named_metrics`, on the host.
    """
    return {
        f"train_{name}": float(total) / float(count) if count else math.nan
        for name, (total, count) in metrics.items()
    }
