"""The buffer of a device echo: slots in accelerator memory, and pure functions."""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

__all__ = ["DrawInput", "EchoBuffer", "default_mesh", "jitted_write"]


class DrawInput(NamedTuple):
    """What the jitted function gets from the host for K draws.

    Attributes:
      chunk: Fresh rows, on the devices, leaves ``[U, ...]``. Where nothing fresh is
        taken it is the chunk before, written nowhere, so one program does for both.
      write_slots: Where its rows go, ``int32[G, U/G]``.
      read_slots: What every draw reads, ``int32[K, G, B/G]``.
      repeat: Which use of its item every row is, ``int32[K, B]``.
      key_data: The random key of every use, ``uint32[K, B, 2]``, derived from
        (seed, fresh index, repeat).
    """

    chunk: Any
    write_slots: Any
    read_slots: Any
    repeat: Any
    key_data: Any


@dataclass(frozen=True)
class EchoBuffer:
    """The layout of a buffer in accelerator memory, and what is done with it.

    It holds no arrays: these are made by `init`, and passed in and out. So it is
    hashable, and its methods are pure functions to be traced.

    Attributes:
      structure: Of an item, a ``PyTreeDef``.
      items: Shape and dtype of every leaf of an item.
      num_slots: Slots of each lane.
      num_lanes: Lanes, G; a multiple of the devices.
      mesh: The devices. Lanes are spread over all of its axes.

    Example:
      >>> batch = {"image": np.zeros((8, 32, 32, 3), np.uint8)}
      >>> buffer = EchoBuffer.of(batch, num_slots=100, num_lanes=jax.device_count())
      >>> buffer.bytes_per_item
      3072
    """

    structure: Any
    items: tuple[jax.ShapeDtypeStruct, ...]
    num_slots: int
    num_lanes: int
    mesh: Mesh

    @classmethod
    def of(
        cls, batch: Any, *, num_slots: int, num_lanes: int = 0, mesh: Mesh | None = None
    ) -> "EchoBuffer":
        """Lays out a buffer for the examples of a batch.

        Args:
          batch: A host batch: a pytree of arrays with a leading axis.
          num_slots: Slots of each lane, as `DrawPlan.num_slots` says.
          num_lanes: Lanes; 0 for one per device.
          mesh: The devices; all of this process by default.

        Raises:
          ValueError: A leaf is no array of numbers, or the lanes are no multiple of
            the devices.
        """
        mesh = mesh or default_mesh()
        num_lanes = num_lanes or mesh.size
        if num_lanes % mesh.size:
            raise ValueError(
                f"num_lanes={num_lanes} is not a multiple of the {mesh.size} devices; "
                f"use {math.ceil(num_lanes / mesh.size) * mesh.size}"
            )
        leaves, structure = jax.tree.flatten(batch)
        for leaf in leaves:
            if np.ndim(leaf) == 0 or np.dtype(leaf.dtype).hasobject:
                raise ValueError(
                    "a device echo needs batches of arrays of numbers with a leading "
                    f"axis; one leaf is {leaf!r:.80}"
                )
        items = tuple(map(_item_of, leaves))
        return cls(structure, items, num_slots, num_lanes, mesh)

    @property
    def bytes_per_item(self) -> int:
        """Bytes of an item in the buffer."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.items)

    @property
    def capacity(self) -> int:
        """Items in all lanes."""
        return self.num_slots * self.num_lanes

    @property
    def num_bytes(self) -> int:
        """Bytes in all lanes."""
        return self.capacity * self.bytes_per_item

    def __str__(self) -> str:
        each = self.num_bytes // self.mesh.size
        return (
            f"echo buffer: {self.capacity:,} items of {self.bytes_per_item:,} bytes, "
            f"{_in_units(self.num_bytes)} in {self.num_lanes} lanes, "
            f"{_in_units(each)} on each of {self.mesh.size} devices"
        )

    @property
    def sharding(self) -> NamedSharding:
        """Of chunks, batches and slots alike: the leading axis over all devices."""
        return NamedSharding(self.mesh, self._rows)

    @property
    def _rows(self) -> PartitionSpec:
        names: Any = self.mesh.axis_names
        # Not a tuple of one name: equal, but another key of jit's cache.
        return PartitionSpec(names if len(names) > 1 else names[0])

    def check_memory(self) -> None:
        """Refuses a buffer that does not fit into what is free.

        Raises:
          ValueError: With both sizes and the fix.
        """
        each = self.num_bytes // self.mesh.size
        for device in self.mesh.local_devices:
            free = _free_bytes(device, self.mesh.size)
            if free is not None and each > free:
                raise ValueError(
                    f"an {self} does not fit: {device} has {_in_units(free)} free. "
                    f"Use buffer_bytes={int(free * 0.8) * self.mesh.size} or less, or "
                    f"a buffer of at most "
                    f"{int(free * 0.8) * self.mesh.size // self.bytes_per_item} items"
                )

    def init(self) -> Any:
        """Allocates the slots, unless they do not fit.

        Returns:
          The item's structure with arrays ``[G, num_slots, ...]``.

        Raises:
          ValueError: See `check_memory`.
        """
        self.check_memory()
        return _allocator(self)()

    def put(self, batch: Any) -> Any:
        """Starts the transfer of a host batch to the devices.

        Args:
          batch: Of the structure that the buffer was laid out for.

        Raises:
          ValueError: It has other leaves, shapes or dtypes.
        """
        leaves, structure = jax.tree.flatten(batch)
        items = tuple(map(_item_of, leaves))
        if structure != self.structure or items != self.items:
            raise ValueError(
                f"a batch has examples of {jax.tree.unflatten(structure, items)}, the "
                "first one had "
                f"{jax.tree.unflatten(self.structure, self.items)}; pad or crop before "
                "the echo"
            )
        return jax.device_put(batch, self.sharding)

    def write(self, arrays: Any, chunk: Any, write_slots: Any) -> Any:
        """Scatters a chunk into slots; to be traced, with donated arrays.

        Args:
          arrays: From `init`.
          chunk: Leaves ``[U, ...]``.
          write_slots: ``int32[G, U/G]``; those out of range are dropped.

        Returns:
          The arrays.
        """

        def lane(array: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
            # Unique as promised, those that are dropped too.
            beyond = self.num_slots + jnp.arange(slots.size, dtype=slots.dtype)
            slots = jnp.where(slots < self.num_slots, slots, beyond)
            return array.at[slots].set(rows, mode="drop", unique_indices=True)

        def local(arrays: Any, chunk: Any, slots: jax.Array) -> Any:
            rows = jax.tree.map(lambda x: x.reshape(slots.shape + x.shape[1:]), chunk)
            return jax.tree.map(lambda a, r: jax.vmap(lane)(a, r, slots), arrays, rows)

        return self._on_devices(local)(arrays, chunk, jnp.asarray(write_slots))

    def read(self, arrays: Any, read_slots: Any) -> Any:
        """Gathers a batch; to be traced.

        Args:
          arrays: From `init`.
          read_slots: ``int32[G, B/G]``, all in range.

        Returns:
          Leaves ``[B, ...]``, lane after lane.
        """

        def lane(array: jax.Array, slots: jax.Array) -> jax.Array:
            return array.at[slots].get(mode="promise_in_bounds")

        def local(arrays: Any, slots: jax.Array) -> Any:
            rows = jax.tree.map(lambda a: jax.vmap(lane)(a, slots), arrays)
            return jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), rows)

        return self._on_devices(local)(arrays, jnp.asarray(read_slots))

    def draw(self, arrays: Any, inputs: DrawInput) -> tuple[Any, list[Any]]:
        """Writes the chunk, then makes all batches; to be traced.

        Give the arrays `sharding` among jit's ``out_shardings``: on one device it is
        otherwise changed to an equal one, for which jit compiles once more.

        Args:
          arrays: From `init`; to be donated.
          inputs: From `DeviceFeed.next`.

        Returns:
          The arrays, and for each draw a batch with leaves ``[B, ...]``.
        """
        arrays = self.write(arrays, inputs.chunk, inputs.write_slots)
        num_draws = inputs.read_slots.shape[0]
        return arrays, [
            self.read(arrays, inputs.read_slots[k]) for k in range(num_draws)
        ]

    def _on_devices(self, local: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a function on every device's own lanes: nothing is communicated."""
        rows = self._rows
        return jax.shard_map(local, mesh=self.mesh, in_specs=rows, out_specs=rows)


# Caches by value, because jit's own is by the identity of a function: buffers of one
# layout compile once.
@functools.lru_cache(maxsize=8)
def _allocator(buffer: EchoBuffer) -> Callable[[], Any]:
    def zeros() -> Any:
        lead = (buffer.num_lanes, buffer.num_slots)
        arrays = [jnp.zeros(lead + x.shape, x.dtype) for x in buffer.items]
        return jax.tree.unflatten(buffer.structure, arrays)

    return jax.jit(zeros, out_shardings=buffer.sharding)


@functools.lru_cache(maxsize=8)
def jitted_write(buffer: EchoBuffer) -> Callable[[Any, Any, Any], Any]:
    """Returns `EchoBuffer.write` compiled, which takes its arrays away."""
    return jax.jit(buffer.write, donate_argnums=0, out_shardings=buffer.sharding)


def default_mesh() -> Mesh:
    """Returns a mesh of all devices of this process along one axis, ``data``."""
    devices = jax.local_devices()
    return jax.make_mesh(
        (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
    )


def _item_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype, on a device, of a row of an array."""
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)


def _free_bytes(device: Any, num_devices: int) -> int | None:
    """Bytes that a device has left; None where it does not say."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu" or not hasattr(os, "sysconf"):
        return None
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return free // num_devices


def _in_units(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} GB"
