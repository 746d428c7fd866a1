"""Where arrays live: the mesh, and how state and batches are laid out on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from echo_jax.training.processes.distributed import put

__all__ = [
    "abstract",
    "batch_sharding",
    "group_sharding",
    "idle_on_one_device",
    "make_mesh",
    "param_shardings",
    "put_batch",
    "replicated",
    "several_devices",
]

_AXES = ("data", "fsdp")


def make_mesh(
    data: int, fsdp: int, batch_size: int, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """Lays devices out as ``(data, fsdp)``.

    Both axes split the batch; ``fsdp`` also splits parameters and optimizer state.

    Args:
      data: Size of the axis; -1 takes all devices that `fsdp` leaves.
      fsdp: Size of the axis.
      batch_size: Examples per update over all devices.
      devices: To be laid out; by default all that are here.

    Returns:
      A mesh over the first ``data * fsdp`` devices.

    Raises:
      ValueError: There are too few devices, or they do not divide the batch.
    """
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
        # The rows of a batch that a process makes lie one after another.
        by_process = sorted(devices, key=lambda d: (d.process_index, d.id))
        return Mesh(np.array(by_process).reshape(data, fsdp), _AXES, axis_types)
    return jax.make_mesh(
        (data, fsdp), _AXES, axis_types=axis_types, devices=devices[: data * fsdp]
    )


def several_devices(num_devices: int) -> str:
    """Says how an update gets several devices, where it has one of those here.

    Args:
      num_devices: Those that are here.
    """
    if num_devices > 1:
        return f"{num_devices} devices are here: set --config.mesh.data=-1"
    return (
        "on a CPU, JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 before the command makes "
        "virtual ones"
    )


def idle_on_one_device(config: Any, mesh: Mesh) -> str:
    """Says which field asks for several devices where there is one; "" if none does.

    Args:
      config: A checked training config.
      mesh: Its devices.
    """
    local, statistics = config.local, config.batch.statistics
    if mesh.size > 1:
        return ""
    # One replica with an outer optimizer still trains differently.
    if local.schedule != "none" and local.outer == "mean":
        field = f"local.schedule={local.schedule!r}"
    elif statistics != "all":
        field = f"batch.statistics={statistics!r}"
    else:
        return ""
    fix = several_devices(jax.device_count())
    return f"config.{field} changes nothing on 1 device; {fix}"


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of what is replicated: every device holds all of it."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of a batch: its leading axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(_AXES))


def group_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batches of several updates, stacked."""
    return NamedSharding(mesh, PartitionSpec(None, _AXES))


def abstract(tree: Any, sharding: NamedSharding) -> Any:
    """Returns what stands for arrays where a program is only lowered.

    Args:
      tree: Arrays, or anything with a shape and a type.
      sharding: How all of them lie on the devices.
    """

    def stand_in(x: Any) -> jax.ShapeDtypeStruct:
        # As it becomes where 64 bits are turned off.
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        weak = getattr(x, "weak_type", False)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(stand_in, tree)


def param_shardings(tree: Any, mesh: Mesh) -> Any:
    """Returns how parameters, or an optimizer's state of their shapes, are split.

    An array is split over ``fsdp`` along its largest axis that ``fsdp`` divides,
    the first of equal ones; if there is none, every device holds it whole.

    Args:
      tree: Arrays, or anything with a shape.
      mesh: From `make_mesh`.

    Returns:
      A tree of the same structure with a `NamedSharding` in each place.

    Example:
      With ``fsdp=4``, a ``[12, 16]`` array is split into ``[12, 4]`` per device,
      and a ``[3]`` array is not split.
    """
    size = mesh.shape["fsdp"]

    def sharding(x: Any) -> NamedSharding:
        axes = [i for i, length in enumerate(x.shape) if length % size == 0]
        if size == 1 or not axes:
            return replicated(mesh)
        axis = max(axes, key=lambda i: (x.shape[i], -i))
        return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))

    return jax.tree.map(sharding, tree)


def put_batch(batch: dict[str, np.ndarray], mesh: Mesh) -> dict[str, jax.Array]:
    """Starts the transfer of a host batch to the devices.

    On a CPU the result may share memory with the batch, so neither may be written
    to afterwards: a step never donates its batch.

    Args:
      batch: Arrays with a leading axis that the devices divide; of several
        processes, this one's rows.
      mesh: From `make_mesh`.

    Returns:
      The batch, sharded over all devices.
    """
    return put(batch, batch_sharding(mesh))
