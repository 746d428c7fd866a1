"""The gradient of a batch, split over the devices by XLA or by hand.

XLA splits the program of one device, and a sum has the type of its terms. So models
that compute in bfloat16 sum the gradients of matrices in bfloat16. Split by hand, with
`jax.shard_map`, each device has its own gradient. The device can accumulate it over
parts of its share. The gradients are then averaged in the type that the config names.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from echo_jax.config.run import RunSpec
from echo_jax.models.batch_norm import (
    merged_statistics,
    statistics_of_batch,
    statistics_over,
)
from echo_jax.training.update.loss_scale import unscale
from echo_jax.training.update.noise import NoiseScale, noise_of_parts
from echo_jax.workloads.base import Batch, Sums, Task, Variables


class Computed(NamedTuple):
    """The results of an update's batch."""

    # The mean loss's; in float32 if the loss was scaled or the batch was cut in parts.
    gradient: Any
    losses: jax.Array  # The loss of every example, float32[B].
    model_state: Variables  # The collections other than the parameters.
    metrics: Sums
    noise: NoiseScale | None  # None if the gradient is not a mean of several.


Gradient = Callable[[Task, Variables, Batch, jax.Array, jax.Array | None], Computed]
"""``(task, variables, batch, key, factor) -> computed``, a pure function."""


# The loss is multiplied by `factor`, and the gradient is divided by it in float32. If
# `averages` is false, batch norm keeps the statistics of this batch alone.
def whole_gradient(
    task: Task,
    variables: Variables,
    batch: Batch,
    key: jax.Array,
    factor: jax.Array | None,
    *,
    averages: bool = True,
) -> Computed:
    """Computes the gradient of a batch in one piece, which XLA may split."""
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def mean_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Variables, Sums]]:
        losses, model_state, metrics = task.loss(
            {"params": params, **others}, batch, key
        )
        loss = losses.mean()
        scaled = loss if factor is None else loss * factor
        return scaled, (losses, model_state, metrics)

    with contextlib.nullcontext() if averages else statistics_of_batch():
        gradient, aux = jax.grad(mean_loss, has_aux=True)(variables["params"])
    return Computed(unscale(gradient, factor), *aux, noise=None)


# A single object, so that equal runs share a compilation.
_UNAVERAGED: Gradient = functools.partial(whole_gradient, averages=False)


# The model draws random numbers for each device and part, so fewer devices
# draw others. Each part of a batch moves the same averages of batch norm, which are
# then merged. So momentum counts once for each update: see `merged_statistics`.
@dataclass(frozen=True)
class SplitGradient:
    """Computes the gradient of every device's share, and averages them once; hashable.

    Attributes:
      micro: Gradient accumulation steps, each on consecutive examples of a share.
      reduce: The type in which gradients are averaged over the devices.
      over_devices: Whether batch norm takes statistics over all devices. Otherwise each
        device takes its own, and nothing is sent until the end.
      averages: Whether batch norm keeps moving averages.
    """

    mesh: Mesh
    micro: int = 1
    reduce: str = "float32"
    over_devices: bool = True
    averages: bool = True

    def __call__(
        self,
        task: Task,
        variables: Variables,
        batch: Batch,
        key: jax.Array,
        factor: jax.Array | None,
    ) -> Computed:
        axes = self.mesh.axis_names
        split, whole = PartitionSpec(axes), PartitionSpec()

        def of_share(
            variables: Variables, share: Batch, key: jax.Array, factor: Any
        ) -> Computed:
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
            with statistics_over(axes if self.over_devices else ()):
                found = self._accumulated(task, variables, share, key, factor)
            return self._averaged(variables, *found)

        specs: Any = (whole, split, whole, whole, whole)
        return jax.shard_map(
            of_share,
            mesh=self.mesh,
            in_specs=(whole, split, whole, whole),
            out_specs=Computed(*specs),
            # With the check, jax would sum gradients itself, in a type that it chooses.
            check_vma=False,
        )(variables, batch, key, factor)

    def _accumulated(
        self,
        task: Task,
        variables: Variables,
        share: Batch,
        key: jax.Array,
        factor: jax.Array | None,
    ) -> tuple[Computed, Variables, jax.Array]:
        """Returns a share's results, its kept part of the state, and a squared norm."""
        gradient = _and_what_is_kept(
            functools.partial(whole_gradient, averages=self.averages)
        )
        if self.micro == 1:
            computed, kept = gradient(task, variables, share, key, factor)
            return computed, kept, squared_norm(computed.gradient)
        parts = jax.tree.map(
            lambda x: x.reshape(self.micro, len(x) // self.micro, *x.shape[1:]), share
        )

        # The noise needs the mean of the squared norms of the parts.
        def add(total: Any, part: Any) -> tuple[Any, Any]:
            number, batch = part
            part_key = jax.random.fold_in(key, number)
            computed, kept = gradient(task, variables, batch, part_key, factor)
            new = computed.gradient
            total = jax.tree.map(lambda a, b: a + b.astype(jnp.float32), total, new)
            metrics = jax.tree.map(jnp.float32, computed.metrics)
            state, square = computed.model_state, squared_norm(new)
            return total, (computed.losses, metrics, state, kept, square)

        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), variables["params"]
        )
        total, of_parts = jax.lax.scan(add, zeros, (jnp.arange(self.micro), parts))
        losses, metrics, states, kept, squares = of_parts
        kept = jax.tree.map(mean_of_parts, kept)
        computed = Computed(
            jax.tree.map(lambda total: total / self.micro, total),
            losses.reshape(-1),
            merged_statistics(states, mean_of_parts, variables, kept),
            jax.tree.map(lambda x: x.sum(axis=0), metrics),
            noise=None,
        )
        return computed, kept, squares.mean()

    def _averaged(
        self, before: Variables, computed: Computed, kept: Variables, square: jax.Array
    ) -> Computed:
        """Returns the results over all devices; each keeps its own losses."""
        # A single device sends nothing.
        axes = self.mesh.axis_names if self.mesh.size > 1 else ()
        reduce = jnp.dtype(self.reduce)

        def average(x: jax.Array) -> jax.Array:
            if not _is_float(x):
                return x
            # Divide first, because a sum in float16 might overflow.
            part = (x / self.mesh.size).astype(reduce)
            return jax.lax.psum(part, axes).astype(x.dtype)

        gradient = jax.tree.map(average, computed.gradient)
        parts = self.mesh.size * self.micro
        mean = functools.partial(mean_over_devices, axes=axes)
        noise = None
        if parts > 1:
            size = len(computed.losses) // self.micro
            square = jax.lax.pmean(square, axes)
            noise = noise_of_parts(square, squared_norm(gradient), size, parts)
        return Computed(
            gradient,
            computed.losses,
            merged_statistics(computed.model_state, mean, before, kept),
            jax.lax.psum(jax.tree.map(jnp.float32, computed.metrics), axes),
            noise,
        )


# This is the momentum of any moving average: the derivative of the average by its old
# value. In training, norms read nothing else of the state, so it costs some constants.
def _and_what_is_kept(gradient: Gradient) -> Callable[..., tuple[Computed, Variables]]:
    """Adds a second result: how much of the model state before an update stays."""

    def wrapped(
        task: Task, variables: Variables, *args: Any
    ) -> tuple[Computed, Variables]:
        params = {"params": variables["params"]}
        state = {name: tree for name, tree in variables.items() if name != "params"}
        computed, change = jax.jvp(
            lambda state: gradient(task, {**params, **state}, *args),
            (state,),
            (jax.tree.map(_tangent, state),),
        )
        return computed, jax.tree.map(
            lambda x, kept: kept if _is_float(x) else jnp.zeros(x.shape),
            computed.model_state,
            change.model_state,
        )

    return wrapped


def _tangent(x: jax.Array) -> Any:
    return jnp.ones_like(x) if _is_float(x) else np.zeros(x.shape, jax.dtypes.float0)


def _is_float(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def squared_norm(tree: Any) -> jax.Array:
    """Returns the sum of the squares of all numbers in a pytree, in float32."""
    return optax.tree.norm(optax.tree.cast(tree, jnp.float32), squared=True)


def mean_over_devices(x: jax.Array, axes: Any) -> jax.Array:
    """Returns the mean over mesh axes; integers are equal there, so unchanged."""
    return jax.lax.pmean(x, axes) if _is_float(x) else x


def mean_of_parts(x: jax.Array) -> jax.Array:
    """Returns the mean over the leading axis; the last of integers, which count."""
    return x.mean(axis=0) if _is_float(x) else x[-1]


def examples_at_once(config: RunSpec, mesh: Mesh) -> int:
    """Returns the number of examples in the model's smallest training call."""
    smallest = config.batch_size // config.batch.parts(0)
    if _is_split_by_xla(config) and config.local.sync_schedule == "none":
        return smallest
    share, micro = smallest // mesh.size, config.batch.accumulation_steps
    if share % micro:
        raise ValueError(
            f"config.batch.accumulation_steps={micro} does not divide the {share} "
            f"examples that each of {mesh.size} devices has of a batch of {smallest}; "
            f"set --config.batch.accumulation_steps={math.gcd(share, micro)}"
        )
    return share // micro


def _is_split_by_xla(config: RunSpec) -> bool:
    batch, reduce = config.batch, config.precision.reduce
    return (
        batch.accumulation_steps == 1 and batch.statistics == "all" and reduce == "auto"
    )


def gradient_of(config: RunSpec, mesh: Mesh) -> Gradient:
    """Returns the function that computes a run's gradient of a batch."""
    batch, reduce = config.batch, config.precision.reduce
    averages = batch.norm != "last"
    if _is_split_by_xla(config):
        return whole_gradient if averages else _UNAVERAGED
    return SplitGradient(
        mesh,
        batch.accumulation_steps,
        "float32" if reduce == "auto" else reduce,
        batch.statistics == "all",
        averages,
    )
