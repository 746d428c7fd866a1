"""The buffer of a device echo: slots in accelerator memory, and pure functions."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.default_spec import free_on
from echo_jax.echo.stores.slot_layout import (
    SlotLayout,
    as_host_batch,
    check_integers,
    layout_of,
)

__all__ = [
    "Augment",
    "EchoBuffer",
    "StepInput",
    "default_mesh",
    "jitted_put",
    "jitted_write",
]

# A pure function of a batch and a key for every example.
Augment = Callable[[Any, jax.Array], Any]
# Positions in `StepInput.uses`.
_SLOT, _REPEAT, _KEYS = 0, 1, slice(2, 4)


class StepInput(NamedTuple):
    """The input of a jitted step from the host for K batches, as one array.

    Attributes:
      uses: Integers of every use, ``int32[K, 2, B]`` or ``int32[K, 4, B]``, lane after
        lane. They are the slot in its lane and the number of the use of its item. With
        augmentation they include the two words of the use's random key, which follow
        from (seed, fresh index, repeat).
    """

    uses: Any

    @property
    def slot(self) -> Any:
        """The slot of every row in its lane, ``int32[K, B]``."""
        return self.uses[:, _SLOT]

    @property
    def repeat(self) -> Any:
        """The number of the use of its item for every row, ``int32[K, B]``."""
        return self.uses[:, _REPEAT]

    def with_repeat(self, repeat: np.ndarray) -> "StepInput":
        """Returns a copy with other repeats, ``int32[K, B]``."""
        uses = self.uses.copy()
        uses[:, _REPEAT] = repeat
        return StepInput(uses)


@dataclass(frozen=True)
class EchoBuffer:
    """The layout of a buffer in accelerator memory, and its operations.

    It holds no arrays: `init` makes them, and the methods take and return them. So it
    is hashable, and its methods are pure functions to be traced.

    Attributes:
      structure: Structure of an item, a ``PyTreeDef``.
      items: Shape and dtype of every leaf of an item.
      num_slots: Slots of each lane.
      num_lanes: Lanes, G; a multiple of the devices.
      mesh: The devices, with automatic or explicit axes.
      rows: Rows of every host batch, in this process.
      tiled: Whether slots are whole tiles of memory, as on TPUs; see `SlotLayout`.
      in_turn: Whether a lane's rows are written one after another, as on CPUs: there a
        scatter by jax 0.12 takes seven times as long.
      axes: The axes over which lanes are spread; all if there are none. Devices along
        the other axes hold equal copies.

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
    rows: int
    tiled: bool = False
    in_turn: bool = False
    axes: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        batch: Any,
        *,
        num_slots: int,
        num_lanes: int = 0,
        mesh: Mesh | None = None,
        axes: tuple[str, ...] = (),
    ) -> "EchoBuffer":
        """Lays out a buffer for the examples of a batch.

        Args:
          batch: A host batch: a pytree of arrays with a leading axis.
          num_slots: Slots of each lane, from `Plan.num_slots`.
          num_lanes: Lanes; 0 for one per shard.
          mesh: The devices; all of this process by default.
          axes: The axes of the mesh over which lanes are spread; all by default.

        Raises:
          ValueError: A leaf is not an array that a device can hold, the leaves disagree
            on the rows or have none, or the lanes are not a multiple of the shards.
        """
        mesh = mesh or default_mesh()
        structure, rows, items = layout_of(as_host_batch(batch))
        platform = mesh.devices.flat[0].platform
        buffer = cls(
            structure,
            items,
            num_slots,
            num_lanes,
            mesh,
            rows,
            tiled=platform == "tpu",
            in_turn=platform == "cpu",
            axes=axes,
        )
        shards = buffer.num_shards
        if num_lanes % shards:
            raise ValueError(
                f"num_lanes={num_lanes} is not a multiple of {shards}, the shards of a "
                f"batch; use {math.ceil(num_lanes / shards) * shards}"
            )
        return buffer if num_lanes else replace(buffer, num_lanes=shards)

    @property
    def bytes_per_item(self) -> int:
        """Bytes of an item in the buffer."""
        return sum(layout.num_bytes for layout in self._layouts)

    @property
    def _layouts(self) -> list[SlotLayout]:
        return [SlotLayout.of(item, tiled=self.tiled) for item in self.items]

    def _each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Calls a function for every leaf, with its layout as the first argument."""
        layouts = jax.tree.unflatten(self.structure, self._layouts)
        return jax.tree.map(function, layouts, *trees)

    @property
    def capacity(self) -> int:
        """Items in all lanes."""
        return self.num_slots * self.num_lanes

    @property
    def num_bytes(self) -> int:
        """Bytes of all lanes."""
        return self.capacity * self.bytes_per_item

    @property
    def num_shards(self) -> int:
        """Parts of the lanes and of a batch, each on a device of its own."""
        axes = self.axes or self.mesh.axis_names
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def __str__(self) -> str:
        each = self.num_bytes // self.num_shards
        return (
            f"echo buffer: {self.capacity:,} items of {self.bytes_per_item:,} bytes, "
            f"{_in_units(self.num_bytes)} in {self.num_lanes} lanes, "
            f"{_in_units(each)} on each of {self.mesh.size} devices"
        )

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of host batches, batches and slots along their first axis."""
        return NamedSharding(self.mesh, self._rows)

    @property
    def input_sharding(self) -> NamedSharding:
        """The sharding of a `StepInput`: a device gets the integers of its lanes.

        The call of a jitted function transfers the input implicitly. Under a transfer
        guard, give ``jax.device_put(inputs, buffer.input_sharding)``.
        """
        return NamedSharding(self.mesh, PartitionSpec(None, None, *self._rows))

    @property
    def _rows(self) -> PartitionSpec:
        names: Any = self.axes or self.mesh.axis_names
        # Not a tuple of one name: equal, but another key of jit's cache.
        return PartitionSpec(names if len(names) > 1 else names[0])

    def check_memory(self) -> None:
        """Checks that the buffer fits into the free memory of every device.

        Raises:
          ValueError: It does not fit; the message has both sizes and the fix.
        """
        each = self.num_bytes // self.num_shards
        for device in self.mesh.local_devices:
            free = free_on(device, self.mesh.size)
            if free is not None and each > free:
                most = int(free * 0.8) * self.num_shards
                raise ValueError(
                    f"an {self} does not fit: {device} has {_in_units(free)} free. "
                    f"Use buffer_bytes={most} or less, or a buffer of at most "
                    f"{most // self.bytes_per_item} items"
                )

    def init(self) -> Any:
        """Allocates the slots if they fit.

        Returns:
          The slots that `zeros` makes.

        Raises:
          ValueError: The buffer does not fit into the free memory of a device.
        """
        self.check_memory()
        return _allocator(self)()

    def zeros(self) -> Any:
        """Returns empty slots; to be traced.

        Returns:
          A tree of the item's structure, with the array of `SlotLayout.zeros` for every
          leaf.
        """
        return self._each(lambda layout: layout.zeros(self.num_lanes, self.num_slots))

    def put(self, batch: Any) -> Any:
        """Starts the transfer of a host batch to the devices.

        A transfer reads the batch's memory later, and on CPU keeps it: nobody may write
        into the batch afterwards. If jax has 64 bits turned off, floats of 64 bits
        become floats of 32, as in all of jax. Integers are then sent in 32 bits if all
        of them fit.

        Args:
          batch: A batch of the structure that the buffer was laid out for.

        Returns:
          The batch on the devices, split by `sharding`.

        Raises:
          ValueError: It has another number of rows, other leaves, shapes or dtypes, or
            an integer that does not fit.
        """
        return jax.device_put(self.checked(batch), self.sharding)

    def is_known(self, batch: Any) -> bool:
        """Returns whether a batch is of arrays in host memory that `put` can send."""
        leaves, structure = jax.tree.flatten(batch)
        return structure == self.structure and all(
            type(leaf) is np.ndarray
            and leaf.dtype == item.dtype
            and leaf.shape == (self.rows, *item.shape)
            for leaf, item in zip(leaves, self.items, strict=True)
        )

    def checked(self, batch: Any) -> Any:
        """Returns a host batch that `put` can send; raises ValueError like it."""
        batch = as_host_batch(batch)
        self.check(batch, self.rows)
        check_integers(batch)
        return batch

    def check(self, batch: Any, expected: int) -> None:
        """Raises ValueError unless a batch has these rows, of items like the first."""
        structure, rows, items = layout_of(batch)
        if structure != self.structure or items != self.items:
            raise ValueError(
                f"a batch has examples of {jax.tree.unflatten(structure, items)}, the "
                "first one had "
                f"{jax.tree.unflatten(self.structure, self.items)}; pad or crop before "
                "the echo"
            )
        if rows != expected:
            raise ValueError(
                f"a batch has {rows} rows, the first one had {expected}; a device "
                "echo needs batches of one size: leave the last, smaller one out in "
                "the loader (drop_remainder=True, or drop_last=True), or pad it"
            )

    def write(self, arrays: Any, host_batch: Any, write_slots: Any) -> Any:
        """Scatters a host batch into slots; to be traced, with donated arrays.

        Args:
          arrays: The slots, from `init`.
          host_batch: Leaves ``[U, ...]``.
          write_slots: ``int32[G, U/G]``; slots out of range are dropped.

        Returns:
          The updated slots.
        """
        write = self._on_devices(self.write_lanes)
        return write(arrays, host_batch, self.split_rows(write_slots))

    def read(self, arrays: Any, read_slots: Any) -> Any:
        """Gathers a batch; to be traced.

        Args:
          arrays: The slots, from `init`.
          read_slots: ``int32[B]``, lane after lane, all in range.

        Returns:
          Leaves ``[B, ...]``, lane after lane.
        """
        return self._on_devices(self.read_lanes)(arrays, self.split_rows(read_slots))

    def write_lanes(self, arrays: Any, rows: Any, slots: jax.Array) -> Any:
        """Does what `write` does, on the lanes of one device."""
        # Slots must be unique, including those that are dropped.
        beyond = self.num_slots + jnp.arange(slots.shape[1], dtype=slots.dtype)
        slots = jnp.where(slots < self.num_slots, slots, beyond)

        def leaf(layout: SlotLayout, array: jax.Array, rows: jax.Array) -> jax.Array:
            rows = rows.reshape(slots.shape + rows.shape[1:])
            if self.in_turn and len(slots) == 1:
                return _written_in_turn(array[0], rows[0], slots[0])[None]
            return jax.vmap(layout.write)(array, rows, slots)

        return self._each(leaf, arrays, rows)

    def read_lanes(self, arrays: Any, slots: jax.Array) -> Any:
        """Does what `read` does, on the lanes of one device."""

        def leaf(layout: SlotLayout, array: jax.Array) -> jax.Array:
            rows = jax.vmap(layout.read)(array, slots.reshape(array.shape[0], -1))
            # An explicit size, because -1 is ambiguous if a leaf has no elements.
            return rows.reshape((slots.size, *rows.shape[2:]))

        return self._each(leaf, arrays)

    def draw(
        self, arrays: Any, inputs: StepInput, augment: Augment | None = None
    ) -> list[Any]:
        """Makes all batches of an input; to be traced.

        Args:
          arrays: `DeviceFeed.arrays` of the feed that made the input.
          inputs: From `DeviceFeed.next`.
          augment: A pure function ``(batch, keys) -> batch``; the feed must make keys.

        Returns:
          K batches, each with leaves ``[B, ...]``.
        """
        batches = []
        for number in range(inputs.uses.shape[0]):
            uses = inputs.uses[number]
            batch = self.read(arrays, uses[_SLOT])
            if augment is not None:
                batch = augment(batch, self.keys(self.split_rows(uses[_KEYS].T)))
            batches.append(batch)
        return batches

    def keys(self, words: Any) -> jax.Array:
        """Returns the random keys of uses from their words, ``int32[B, 2]``."""
        words = jax.lax.bitcast_convert_type(words, jnp.uint32)
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def split_rows(self, rows: Any) -> jax.Array:
        """Splits an array over the devices in the same way as batches; to be traced.

        Only a mesh of explicit axes needs it. There, arrays that are used together row
        by row, such as a batch and the keys of its uses, must be split alike.

        Args:
          rows: An array whose first axis is one of lanes, or of rows of a batch.

        Returns:
          The split array.
        """
        rows = jnp.asarray(rows)
        if AxisType.Explicit in self.mesh.axis_types:
            rows = jax.sharding.reshard(rows, self.sharding)
        return rows

    def _on_devices(self, local: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a function on every device's own lanes, without communication."""
        rows = self._rows
        return jax.shard_map(local, mesh=self.mesh, in_specs=rows, out_specs=rows)


def _written_in_turn(lane: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Does what `SlotLayout.write` does, row by row."""
    flat = rows.reshape(slots.size, *lane.shape[1:])

    def put(k: Any, lane: jax.Array) -> jax.Array:
        def into(lane: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(lane, flat[k], slots[k], 0)

        return jax.lax.cond(slots[k] < len(lane), into, lambda lane: lane, lane)

    return jax.lax.fori_loop(0, slots.size, put, lane)


# Caches by value, because jit's own is by the identity of a function: buffers of one
# layout compile once.
@functools.lru_cache(maxsize=8)
def _allocator(buffer: EchoBuffer) -> Callable[[], Any]:
    return jax.jit(buffer.zeros, out_shardings=buffer.sharding)


@functools.lru_cache(maxsize=8)
def jitted_put(buffer: EchoBuffer) -> Callable[[Any], Any]:
    """Returns a function that sends a batch that `EchoBuffer.is_known`."""
    if buffer.mesh.size > 1:
        return partial(jax.device_put, device=buffer.sharding)
    if buffer.mesh.devices.flat[0].platform == "cpu":
        return lambda batch: batch  # `write` reads the host's memory itself.
    # To one device, the call of a function takes a quarter of the time.
    return jax.jit(lambda batch: batch, out_shardings=buffer.sharding)


@functools.lru_cache(maxsize=8)
def jitted_write(buffer: EchoBuffer) -> Callable[[Any, Any, Any], Any]:
    """Returns `EchoBuffer.write` compiled, with donated arrays."""
    return jax.jit(buffer.write, donate_argnums=0, out_shardings=buffer.sharding)


def default_mesh(most: int | None = None) -> Mesh:
    """Returns a mesh of this process' devices along one axis, ``data``."""
    devices = jax.local_devices()[:most]
    return jax.make_mesh(
        (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
    )


def _in_units(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} GB"
