"""The gradient of a batch: as XLA splits it over the devices, or split by hand.

Left to XLA, the program is that of one device, and sums come out in the type of what
is summed: models that compute in bfloat16 sum the gradients of matrices in bfloat16.
Split by hand, with `jax.shard_map`, each device has a gradient of its own, which can be
accumulated over micro-batches, and is then averaged in the type that is asked for.
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

from echo_jax.config import Config
from echo_jax.config.batch import BatchGrowth
from echo_jax.models.batch_norm import (
    merged_statistics,
    statistics_of_batch,
    statistics_over,
)
from echo_jax.training.cost_model import NoiseScale, noise_of_parts
from echo_jax.training.update.loss_scale import scale, unscale
from echo_jax.workloads.base import Batch, Sums, Task, Variables

__all__ = [
    "Computed",
    "Gradient",
    "SplitGradient",
    "examples_at_once",
    "gradient_of",
    "mean_of_parts",
    "mean_over_devices",
    "squared_norm",
    "whole_gradient",
]


class Computed(NamedTuple):
    """What an update computes of a batch.

    Attributes:
      gradient: Of the mean loss, a tree like the parameters: of their types, or in
        float32 where the loss was scaled, or the batch was computed in parts.
      losses: Of every example, ``float32[B]``.
      model_state: The collections other than the parameters, after the step.
      metrics: See `echo_jax.workloads.base.Task.loss`.
      noise: Of the gradient, where it is the mean of several; None where it is of one.
    """

    gradient: Any
    losses: jax.Array
    model_state: Variables
    metrics: Sums
    noise: NoiseScale | None


Gradient = Callable[[Task, Variables, Batch, jax.Array, jax.Array | None], Computed]
"""``(task, variables, batch, key, factor) -> computed``, a pure function."""


def whole_gradient(
    task: Task,
    variables: Variables,
    batch: Batch,
    key: jax.Array,
    factor: jax.Array | None,
    *,
    averages: bool = True,
) -> Computed:
    """Computes the gradient of a batch as one: what XLA splits, or a single device.

    Args:
      task: Model and loss.
      variables: All collections.
      batch: Without the echo's tags.
      key: Randomness of this update.
      factor: What the loss is multiplied by while its gradient is computed, which is
        then divided by it, in float32; None for nothing.
      averages: Whether batch norm keeps moving averages of its statistics, or those of
        this batch alone.
    """
    others = {name: tree for name, tree in variables.items() if name != "params"}

    def mean_loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, Variables, Sums]]:
        losses, model_state, metrics = task.loss(
            {"params": params, **others}, batch, key
        )
        return scale(losses.mean(), factor), (losses, model_state, metrics)

    with contextlib.nullcontext() if averages else statistics_of_batch():
        gradient, aux = jax.grad(mean_loss, has_aux=True)(variables["params"])
    return Computed(unscale(gradient, factor), *aux, noise=None)


# One object, so that equal runs share a compilation.
_UNAVERAGED: Gradient = functools.partial(whole_gradient, averages=False)


@dataclass(frozen=True)
class SplitGradient:
    """Computes the gradient of every device's share, and averages them once.

    What is random in the model is drawn for each device and micro-batch, so that it
    is not what fewer devices draw. Hashable, so that equal ones share a compilation.

    Attributes:
      mesh: The devices; parameters are whole on each of them.
      micro: Micro-batches that a device computes one after the other, to need memory
        for one; consecutive examples of its share.
      reduce: The type in which gradients are averaged over the devices.
      over_devices: Whether batch norm takes the statistics of a micro-batch over all
        devices. Otherwise it takes each device's own, and nothing is sent until the
        end.
      averages: Whether batch norm keeps moving averages. In both cases what it keeps
        is of all examples of the batch: each part moves the same averages, which are
        then merged, so that momentum counts once an update: see `merged_statistics`.

    Example:
      >>> gradient = SplitGradient(jax.make_mesh((8, 1), ("data", "fsdp")), micro=4)
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
        """See `Gradient`."""
        axes = self.mesh.axis_names
        split, whole = PartitionSpec(axes), PartitionSpec()

        def of_share(
            variables: Variables,
            share: Batch,
            key: jax.Array,
            factor: jax.Array | None,
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
            # With it, jax would sum gradients by itself, in a type of its own choice.
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
        """Returns what is computed of a device's share, with the mean gradient.

        And what each part keeps of the state before it; and the mean of the squared
        norms of the gradients that it is the mean of.
        """
        gradient = _and_what_is_kept(
            functools.partial(whole_gradient, averages=self.averages)
        )
        if self.micro == 1:
            computed, kept = gradient(task, variables, share, key, factor)
            return computed, kept, squared_norm(computed.gradient)
        parts = jax.tree.map(
            lambda x: x.reshape(self.micro, len(x) // self.micro, *x.shape[1:]), share
        )

        def add(total: Any, part: Any) -> tuple[Any, Any]:
            number, batch = part
            part_key = jax.random.fold_in(key, number)
            computed, kept = gradient(task, variables, batch, part_key, factor)
            total = jax.tree.map(
                lambda total, new: total + new.astype(jnp.float32),
                total,
                computed.gradient,
            )
            metrics = jax.tree.map(jnp.float32, computed.metrics)
            square = squared_norm(computed.gradient)
            found = computed.losses, metrics, computed.model_state, kept, square
            return total, found

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
        """Returns what is the same on all devices, but for the losses."""
        # One device has nothing to send.
        axes = self.mesh.axis_names if self.mesh.size > 1 else ()
        reduce = jnp.dtype(self.reduce)

        def average(x: jax.Array) -> jax.Array:
            if not _is_float(x):
                return x
            # Divided before: a sum of float16 might overflow.
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


def _and_what_is_kept(
    gradient: Gradient,
) -> Callable[..., tuple[Computed, Variables]]:
    """Returns a function that also says how much of a model's state stays in it.

    That is the momentum of a moving average, of whatever norm: the derivative of an
    average by what it was before. Norms in training read nothing else of the state, so
    that it is computed beside the gradient by a few constants.
    """

    def wrapped(
        task: Task,
        variables: Variables,
        batch: Batch,
        key: jax.Array,
        factor: jax.Array | None,
    ) -> tuple[Computed, Variables]:
        params = {"params": variables["params"]}
        state = {name: tree for name, tree in variables.items() if name != "params"}
        computed, change = jax.jvp(
            lambda state: gradient(task, {**params, **state}, batch, key, factor),
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
    """Returns the mean over axes of a mesh; of integers, which are equal, any."""
    return jax.lax.pmean(x, axes) if _is_float(x) else x


def mean_of_parts(x: jax.Array) -> jax.Array:
    """Returns the mean over the leading axis; of integers, which count, the last."""
    return x.mean(axis=0) if _is_float(x) else x[-1]


def examples_at_once(config: Config, mesh: Mesh) -> int:
    """Returns how many examples the smallest call of the model in training sees.

    Args:
      config: A checked training config.
      mesh: Its devices.

    Raises:
      ValueError: The share of a device cannot be cut into so many micro-batches.
    """
    smallest = config.batch_size // BatchGrowth.of(config).parts(0)
    if _is_split_by_xla(config) and config.local.schedule == "none":
        return smallest
    share, micro = smallest // mesh.size, config.batch.micro
    if share % micro:
        raise ValueError(
            f"config.batch.micro={micro} does not divide the {share} examples that "
            f"each of {mesh.size} devices has of a batch of {smallest}; set "
            f"--config.batch.micro={math.gcd(share, micro)}"
        )
    return share // micro


def _is_split_by_xla(config: Config) -> bool:
    batch, reduce = config.batch, config.precision.reduce
    return batch.micro == 1 and batch.statistics == "all" and reduce == "auto"


def gradient_of(config: Config, mesh: Mesh) -> Gradient:
    """Returns how a run computes the gradient of a batch.

    Args:
      config: A checked training config.
      mesh: Its devices.

    Raises:
      ValueError: The share of a device cannot be cut into so many micro-batches.
    """
    batch, reduce = config.batch, config.precision.reduce
    averages = batch.norm != "last"
    if _is_split_by_xla(config):
        return whole_gradient if averages else _UNAVERAGED
    examples_at_once(config, mesh)
    return SplitGradient(
        mesh,
        batch.micro,
        "float32" if reduce == "auto" else reduce,
        batch.statistics == "all",
        averages,
    )
