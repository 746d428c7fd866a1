"""Where arrays live: the mesh, their layout on it, and how they get there and back."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

_Arrays = TypeVar("_Arrays")

# Both axes split the batch; fsdp also splits parameters and optimizer state.
_AXES = ("data", "fsdp")


def make_mesh(
    data: int, fsdp: int, batch_size: int, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Lays out devices as (data, fsdp); data=-1 takes all that fsdp leaves."""
    devices = jax.devices() if devices is None else list(devices)
    if data == -1:
        data = len(devices) // fsdp
    if not 1 <= data * fsdp <= len(devices):
        raise ValueError(
            f"config.mesh.data={data} times config.mesh.fsdp={fsdp} does not fit "
            f"{len(devices)} devices; set --config.mesh.data=-1 --config.mesh.fsdp=1"
        )
    if jax.process_count() > 1 and data * fsdp != len(devices):
        raise ValueError(
            f"config.mesh.data={data} times config.mesh.fsdp={fsdp} must be the "
            f"{len(devices)} devices of all {jax.process_count()} processes; set "
            "--config.mesh.data=-1"
        )
    if batch_size % (data * fsdp):
        raise ValueError(
            f"config.batch_size={batch_size} is not a multiple of the {data * fsdp} "
            "devices of the mesh; change it, or use fewer devices with "
            "--config.mesh.data=1"
        )
    # Explicit axes, the default, break optax's integer-label cross-entropy.
    axis_types = (AxisType.Auto,) * len(_AXES)
    if jax.process_count() > 1:
        # The rows that one process makes are adjacent in the batch.
        by_process = sorted(devices, key=lambda d: (d.process_index, d.id))
        return Mesh(np.array(by_process).reshape(data, fsdp), _AXES, axis_types)
    return jax.make_mesh(
        (data, fsdp), _AXES, axis_types=axis_types, devices=devices[: data * fsdp]
    )


def idle_on_one_device(config: Any, mesh: Mesh) -> str:
    """Names the field that has no effect on one device; "" if there is none."""
    local, statistics = config.local, config.batch.statistics
    if mesh.size > 1:
        return ""
    # One replica with an outer optimizer still trains differently.
    if local.sync_schedule != "none" and local.outer == "mean":
        field = f"local.sync_schedule={local.sync_schedule!r}"
    elif statistics != "all":
        field = f"batch.statistics={statistics!r}"
    else:
        return ""
    fix = "on a CPU, JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 before the command makes "
    fix += "virtual ones"
    if jax.device_count() > 1:
        fix = f"{jax.device_count()} devices are here: set --config.mesh.data=-1"
    return f"config.{field} changes nothing on 1 device; {fix}"


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(_AXES))


def group_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of stacked batches of several updates, [K, B, ...]."""
    return NamedSharding(mesh, PartitionSpec(None, _AXES))


def param_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns the shardings of parameters, or of an optimizer state of their shapes."""
    # Split along the largest axis that fsdp divides, the first of equal ones. With
    # fsdp=4, [12, 16] becomes [12, 4] per device, and [3] is not split.
    size = mesh.shape["fsdp"]

    def sharding(x: Any) -> NamedSharding:
        axes = [i for i, length in enumerate(x.shape) if length % size == 0]
        if size == 1 or not axes:
            return replicated(mesh)
        axis = max(axes, key=lambda i: (x.shape[i], -i))
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    return jax.tree.map(sharding, tree)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Starts the transfer of this process' rows of a batch to the devices."""
    # On a CPU the result may share memory with the batch, so nobody may write to
    # either afterwards: a step never donates its batch.
    return put(batch, batch_sharding(mesh))


def put(tree: Any, sharding: Any) -> Any:
    """Starts the transfer of host arrays, each process' part, to all devices."""
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)

    def send(x: Any, sharding: Sharding) -> jax.Array:
        if isinstance(x, jax.Array):  # It is on the devices already.
            return x
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    # One sharding may apply to a whole subtree.
    shardings = jax.tree.map(lambda s, t: jax.tree.map(lambda _: s, t), sharding, tree)
    return jax.tree.map(send, tree, shardings)


def call_with_host_arrays(function: Callable[..., _Arrays], *args: Any) -> _Arrays:
    """Calls a jax function whose arguments may be arrays of the host."""
    # Arrays that cross with the call take less time than `put`.
    with jax.transfer_guard_host_to_device("allow"):
        return function(*args)


def replicate(make: Callable[[], _Arrays], sharding: Sharding) -> _Arrays:
    """Returns the pytree of a pure function on all devices, replicated."""
    if jax.process_count() == 1:
        return jax.device_put(call_with_host_arrays(make), sharding)
    return jax.jit(make, out_shardings=sharding)()


def fetch_global(array: jax.Array) -> np.ndarray:
    """Returns a whole array on the host; all processes have to call it."""
    if jax.process_count() == 1 or array.is_fully_replicated:
        return np.asarray(jax.device_get(array))
    return multihost_utils.process_allgather(array, tiled=True)
