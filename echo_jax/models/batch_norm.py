"""Batch normalisation over virtual batches (Hoffer et al. 2017, section 4).

The trainer controls all batch norms of a model through this module. It sets the devices
over which they take statistics, and whether they keep moving averages.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

_AXES: ContextVar[tuple[str, ...]] = ContextVar("axes", default=())
_KEEPS_AVERAGES: ContextVar[bool] = ContextVar("keeps_averages", default=True)


@contextlib.contextmanager
def statistics_over(axes: tuple[str, ...]) -> Iterator[None]:
    """Makes batch norms traced in a `shard_map` take statistics over all devices."""
    token = _AXES.set(axes)
    try:
        yield
    finally:
        _AXES.reset(token)


def statistics_axes() -> Any:
    """Returns the axes of `statistics_over` as Flax takes them; None without any."""
    return _AXES.get() or None


@contextlib.contextmanager
def statistics_of_batch() -> Iterator[None]:
    """Makes batch norms traced within keep only the last batch's statistics."""
    token = _KEEPS_AVERAGES.set(False)
    try:
        yield
    finally:
        _KEEPS_AVERAGES.reset(token)


def momentum_or_none(momentum: float) -> float:
    """Returns the momentum of running statistics: 0 in `statistics_of_batch`."""
    return momentum if _KEEPS_AVERAGES.get() else 0.0


# `tree` holds the collections without "params", with a leading axis of parts; `mean`
# averages over it. By the law of total variance, the variance of all examples is the
# mean of the variances plus the variance of the means. Moving averages `before` the
# update have moved by a fraction 1 - m towards the examples (m is in `kept`), so the
# variance of their means is divided by 1 - m.
def merged_statistics(
    tree: Any, mean: Callable[[Any], Any], before: Any = None, kept: Any = None
) -> Any:
    """Returns the statistics of all examples from parts of equal size."""

    def of_norm(stats: Any, before: Any, kept: Any) -> Any:
        if before is None:
            before = kept = {"mean": jnp.zeros(())}
        # Norms with momentum 1 have not moved.
        step = jnp.maximum(1 - kept["mean"], 1e-6)
        # Centred on a value that all parts share, to limit rounding errors.
        moved = stats["mean"] - jnp.broadcast_to(before["mean"], stats["mean"].shape)
        square = lax.square(moved) / jnp.broadcast_to(step, moved.shape)
        means, squares = mean(moved), mean(stats["var"] + square)
        var = jnp.maximum(squares - lax.square(means) / step, 0)
        return {"mean": before["mean"] + means, "var": var}

    return map_norms(of_norm, lambda x, *_: mean(x), tree, before, kept)


def map_norms(
    of_norm: Callable[..., Any], of_other: Callable[..., Any], tree: Any, *rest: Any
) -> Any:
    """Maps every ``{"mean", "var"}`` of collections, and every other array."""
    if not isinstance(tree, Mapping):
        return of_other(tree, *rest)
    if set(tree) == {"mean", "var"}:
        return of_norm(tree, *rest)
    return {
        name: map_norms(of_norm, of_other, part, *(x and x[name] for x in rest))
        for name, part in tree.items()
    }


class GhostBatchNorm(nn.Module):
    """Normalises every virtual batch by its own mean and variance.

    A large batch is cut into virtual batches of consecutive examples, so that its
    statistics are as noisy as in a small batch. If a device's share of the batch
    is a multiple of `virtual_batch`, each virtual batch is on one device and the
    devices exchange no statistics. The running statistics follow the whole
    batch: its variance is the mean of the virtual batches' variances plus the variance
    of their means. It is *not* synchronised batch norm unless `virtual_batch` is None.
    Statistics, scale and bias are float32, whatever the type of the computation.

    Attributes:
      virtual_batch: Examples normalised together; None for the whole batch, on all
        devices.
      momentum: The fraction of the running statistics that each update keeps.
      epsilon: Added to the variance.
      scale_init: Initialises the scale; zeros silence a residual branch at the start.
      dtype: The type of the output.

    Example:
      >>> norm = GhostBatchNorm(virtual_batch=32)
      >>> x = jnp.zeros((64, 8, 8, 16))
      >>> variables = norm.init(jax.random.key(0), x, train=False)
      >>> y, updated = norm.apply(variables, x, train=True, mutable=["batch_stats"])
      >>> y.shape, sorted(updated["batch_stats"])
      ((64, 8, 8, 16), ['mean', 'var'])
    """

    virtual_batch: int | None = None
    momentum: float = 0.9
    epsilon: float = 1e-5
    scale_init: nn.initializers.Initializer = nn.initializers.ones
    dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        """Normalises, and updates the running statistics in training.

        Args:
          x: ``[B, ..., C]``; in training B is a multiple of `virtual_batch`.
          train: Whether to use the statistics of `x` (pass
            ``mutable=["batch_stats"]``) or the running ones.

        Returns:
          An array of the same shape, of type `dtype`.

        Raises:
          ValueError: B is not a multiple of `virtual_batch`.
        """
        channels = x.shape[-1]
        zeros, ones = nn.initializers.zeros, nn.initializers.ones
        running_mean, running_var = (
            self.variable("batch_stats", name, start, None, (channels,), jnp.float32)
            for name, start in (("mean", zeros), ("var", ones))
        )
        scale = self.param("scale", self.scale_init, (channels,), jnp.float32)
        bias = self.param("bias", zeros, (channels,), jnp.float32)
        groups = _grouped(x, self.virtual_batch if train else None)
        shape = (1,) * (groups.ndim - 1) + (channels,)
        if train:
            axes = None if self.virtual_batch else statistics_axes()
            mean, var = _moments(groups, None if self.is_initializing() else axes)
            if not self.is_initializing():
                kept = momentum_or_none(self.momentum)
                # Sum over the groups first, so that devices synchronise once.
                moments = mean, var + lax.square(mean)
                means, squares = (x.reshape(-1, channels).mean(axis=0) for x in moments)
                total = jnp.maximum(squares - lax.square(means), 0)
                for running, new in ((running_mean, means), (running_var, total)):
                    running.value = kept * running.value + (1 - kept) * new
        else:
            mean = running_mean.value.reshape(shape)
            var = running_var.value.reshape(shape)
        factor = lax.rsqrt(var + self.epsilon) * scale.reshape(shape)
        y = (groups.astype(jnp.float32) - mean) * factor + bias.reshape(shape)
        return y.astype(self.dtype).reshape(x.shape)


def _grouped(x: jax.Array, virtual_batch: int | None) -> jax.Array:
    """Returns ``[G, B / G, ..., C]``: one group, or one for each virtual batch."""
    if virtual_batch is None:
        return x[None]
    if len(x) % virtual_batch:
        raise ValueError(
            f"a batch of {len(x)} must be a multiple of virtual_batch={virtual_batch}; "
            "change one of them, or use virtual_batch=None"
        )
    return x.reshape(len(x) // virtual_batch, virtual_batch, *x.shape[1:])


def _moments(
    groups: jax.Array, devices: tuple[str, ...] | None
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of every group and channel, ``float32[G, 1.., C]``."""
    groups = groups.astype(jnp.float32)
    axes = tuple(range(1, groups.ndim - 1))
    mean = groups.mean(axis=axes, keepdims=True)
    # One pass over the activations instead of two. float32 is precise enough for this;
    # rounding must not make a variance negative.
    square = lax.square(groups).mean(axis=axes, keepdims=True)
    if devices:
        mean, square = lax.pmean((mean, square), devices)
    return mean, jnp.maximum(square - lax.square(mean), 0)
