"""The buffer of a device echo: slots in accelerator memory, and pure functions.

Items are flat, so that a slot is contiguous whatever its shape. A TPU stores arrays in
tiles of 8 x 128. A program that reads or writes a few slots first copies all slots to
another layout, unless slots are whole tiles. The rules that avoid this copy were found
by compiling for a TPU v5e and counting the bytes that the program moves: "Compiled for
accelerators" in docs/benchmarks.md.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.default_spec import free_on
from echo_jax.echo.stores.batches import common_rows
from echo_jax.echo.stores.leaves import as_array

_TILE_WIDTH = 128
# In elements. The compiler chooses the layout of smaller leaves, such as labels.
_LEAST_TILED = 32
# With fewer rows, words of 32 bits need no padding to whole tiles.
_LEAST_ROWS = 32
# The compiler splits larger slots by copying all slots to two arrays of half the width.
_MOST_BYTES = 192 * 1024
# With more bytes of a batch at once, the compiler for a v5e runs out of memory when it
# changes the layout of images.
_MOST_AT_ONCE = 8 << 20


@dataclass(frozen=True)
class SlotLayout:
    """The layout of a leaf: a slot is ``parts`` places of a shape."""

    item: jax.ShapeDtypeStruct
    shape: tuple[int, ...]
    parts: int = 1

    @classmethod
    def of(cls, item: jax.ShapeDtypeStruct, *, tiled: bool) -> "SlotLayout":
        """Returns the layout of a leaf; slots are whole tiles if ``tiled``."""
        size, itemsize = math.prod(item.shape), item.dtype.itemsize
        if not tiled or size < _LEAST_TILED:
            return cls(item, (size,) if item.shape else ())
        parts = math.ceil(size * itemsize / _MOST_BYTES)
        rows = math.ceil(size / parts / _TILE_WIDTH)
        if itemsize >= 4 and rows < _LEAST_ROWS:
            return cls(item, (rows * _TILE_WIDTH,), parts)
        if rows > 1:
            rows = 4 if rows <= 4 else 8 * math.ceil(rows / 8)
        return cls(item, (rows, _TILE_WIDTH), parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot."""
        return self.parts * math.prod(self.shape) * self.item.dtype.itemsize

    def zeros(self, num_lanes: int, num_slots: int) -> jax.Array:
        """Returns empty slots, ``[G, num_slots * parts, *shape]``."""
        places = (num_lanes, num_slots * self.parts)
        return jnp.zeros(places + self.shape, self.item.dtype)

    def write(self, array: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
        """Puts ``[n, *item.shape]`` into a lane's slots, ``int32[n]``; to be traced."""
        # Each slot occurs once; slots out of range are dropped.
        size, count = math.prod(self.item.shape), slots.size
        flat = rows.reshape(count, size)
        if missing := self.parts * math.prod(self.shape) - size:
            flat = jnp.pad(flat, ((0, 0), (0, missing)))
        rows = flat.reshape(count * self.parts, *self.shape)
        places = array.at[self._places(slots)]
        return places.set(rows, mode="drop", unique_indices=True)

    def read(self, array: jax.Array, slots: jax.Array) -> jax.Array:
        """Returns the leaves in a lane's slots, ``[n, *item.shape]``; to be traced."""
        # All slots must be in range.
        count = math.ceil(slots.size * self.num_bytes / _MOST_AT_ONCE)
        if count == 1 or len(self.shape) < 2:
            return self._read(array, slots)
        while slots.size % count:
            count += 1
        parts = jax.lax.map(
            lambda some: self._read(array, some), slots.reshape(count, -1)
        )
        return parts.reshape(slots.size, *self.item.shape)

    def _read(self, array: jax.Array, slots: jax.Array) -> jax.Array:
        rows = array.at[self._places(slots)].get(mode="promise_in_bounds")
        flat = rows.reshape(slots.size, self.parts * math.prod(self.shape))
        size = math.prod(self.item.shape)
        return flat[:, :size].reshape(slots.size, *self.item.shape)

    def _places(self, slots: jax.Array) -> jax.Array:
        if self.parts == 1:
            return slots
        parts = jnp.arange(self.parts, dtype=slots.dtype)
        return (slots[:, None] * self.parts + parts[None]).reshape(-1)


def layout_of(batch: Any) -> tuple[Any, Any, int, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns a batch of arrays, its ``PyTreeDef``, rows, and shapes of a row."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(batch)
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]
    # A torch tensor becomes an array in the same memory.
    leaves = [
        leaf if isinstance(leaf, jax.Array) else as_array(path, leaf)
        for path, leaf in named
    ]
    named = [(path, leaf) for (path, _), leaf in zip(named, leaves, strict=True)]
    if not (rows := common_rows(named)):
        raise ValueError("a batch has no rows; leave empty batches out in the loader")
    items = tuple(_item_of(path, leaf) for path, leaf in named)
    return structure.unflatten(leaves), structure, rows, items


def _item_of(path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype, on a device, of a row of an array."""
    dtype = leaf.dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise ValueError(
            f"leaf item{path} has random keys, which a buffer does not hold; give "
            "jax.random.key_data(keys)"
        )
    if not _is_on_devices(np.dtype(dtype)):
        raise ValueError(
            f"leaf item{path} has dtype {dtype}, which devices do not have; give "
            "numbers in the machine's byte order, such as labels instead of names"
        )
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape[1:], dtype)


@functools.lru_cache(maxsize=64)
def _is_on_devices(dtype: np.dtype[Any]) -> bool:
    try:
        jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)))
    except TypeError:
        return False
    return dtype.isnative


def check_integers(batch: Any) -> None:
    """Raises ValueError if integers would wrap around without jax's 64 bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if dtype == leaf.dtype or leaf.dtype.kind not in "iu" or not leaf.size:
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < np.iinfo(dtype).min or most > np.iinfo(dtype).max:
            name = jax.tree_util.keystr(path)
            raise ValueError(
                f"leaf item{name} has the integers {least} to {most}, which do not "
                f"fit {dtype}; set jax_enable_x64, or give them as two leaves of 32 "
                "bits"
            )


# A pure function of a batch and a key for every example.
Augment = Callable[[Any, jax.Array], Any]
# Positions in the integers of a batch; see `DeviceFeed.take`.
_SLOT, _REPEAT, _KEYS = 0, 1, slice(2, 4)


@dataclass(frozen=True)
class EchoBuffer:
    """The layout of a buffer in accelerator memory, and its operations.

    It holds no arrays: `init` makes them. The methods, which may be traced, take and
    return them.
    """

    structure: Any  # of an item, a PyTreeDef
    items: tuple[jax.ShapeDtypeStruct, ...]  # shape and dtype of an item's leaves
    num_slots: int  # of each lane
    num_lanes: int  # G, a multiple of the shards
    rows: int  # of every host batch, in this process
    # Of host batches, batches and slots, along their first axis.
    sharding: NamedSharding
    tiled: bool  # whether slots are whole tiles of memory, as on TPUs

    @classmethod
    def of(
        cls,
        batch: Any,
        *,
        num_slots: int = 1,
        num_lanes: int = 0,
        mesh: Mesh | None = None,
        sharding: NamedSharding | None = None,
    ) -> "EchoBuffer":
        """Lays out a buffer for the examples of a host batch, a pytree of arrays.

        By default it is split over all devices of this process, with a lane for each.
        """
        _, structure, rows, items = layout_of(batch)
        sharding = sharding or split_over(mesh)
        tiled = _platform(sharding) == "tpu"
        buffer = cls(structure, items, num_slots, num_lanes, rows, sharding, tiled)
        return buffer if num_lanes else replace(buffer, num_lanes=buffer.num_shards)

    @property
    def bytes_per_item(self) -> int:
        """Bytes of an item in the buffer."""
        return sum(jax.tree.leaves(self._each(lambda layout: layout.num_bytes)))

    def _each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """Calls a function for every leaf, with its layout as the first argument."""
        layouts = [SlotLayout.of(item, tiled=self.tiled) for item in self.items]
        return jax.tree.map(
            function, jax.tree.unflatten(self.structure, layouts), *trees
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all lanes."""
        return self.num_slots * self.num_lanes * self.bytes_per_item

    @property
    def num_shards(self) -> int:
        """Parts of the lanes and of a batch, each on a device of its own."""
        size = self.sharding.num_devices
        return size // self.sharding.shard_shape((size,))[0]

    def __str__(self) -> str:
        each = self.num_bytes // self.num_shards
        return (
            f"echo buffer: {self.num_slots * self.num_lanes:,} items of "
            f"{self.bytes_per_item:,} bytes, {_in_units(self.num_bytes)} in "
            f"{self.num_lanes} lanes, {_in_units(each)} on each of "
            f"{self.sharding.num_devices} devices"
        )

    @property
    def input_sharding(self) -> NamedSharding:
        """The sharding of a feed's inputs: a device gets the integers of its lanes."""
        spec = PartitionSpec(None, None, *self.sharding.spec)
        return NamedSharding(self.sharding.mesh, spec)

    def init(self) -> Any:
        """Allocates the slots; ValueError if a device lacks the memory."""
        each = self.num_bytes // self.num_shards
        for device in self.sharding.addressable_devices:
            free = free_on(device, self.sharding.num_devices)
            if free is not None and each > free:
                most = int(free * 0.8) * self.num_shards
                raise ValueError(
                    f"an {self} does not fit: {device} has {_in_units(free)} free. "
                    f"Use buffer_bytes={most} or less, or a buffer of at most "
                    f"{most // self.bytes_per_item} items"
                )
        return _allocator(self)()

    def zeros(self) -> Any:
        """Returns empty slots of the layout of every leaf; to be traced."""
        return self._each(lambda layout: layout.zeros(self.num_lanes, self.num_slots))

    def put(self, batch: Any) -> Any:
        """Starts the transfer of a host batch, whose memory it reads later."""
        leaves, structure = jax.tree.flatten(batch)
        if structure == self.structure and all(
            type(leaf) is np.ndarray
            and leaf.dtype == item.dtype
            and leaf.shape == (self.rows, *item.shape)
            for leaf, item in zip(leaves, self.items, strict=True)
        ):
            with jax.transfer_guard_host_to_device("allow"):
                return _sender(self.sharding)(batch)
        # A loader may donate its own arrays later.
        return jax.device_put(self.checked(batch), self.sharding, may_alias=False)

    def checked(self, batch: Any, expected: int = 0) -> Any:
        """Returns a batch as arrays; ValueError if it is not like the first one."""
        batch, structure, rows, items = layout_of(batch)
        expected = expected or self.rows
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
        check_integers(batch)
        return batch

    def write(self, arrays: Any, host_batch: Any, write_slots: Any) -> Any:
        """Returns the slots with a host batch in ``int32[G, U/G]`` of them."""
        # ``arrays`` are donated. Rows whose slots are out of range are dropped.
        write = self._on_devices(self.write_lanes)
        return write(arrays, host_batch, self._split(write_slots))

    def read(self, arrays: Any, read_slots: Any) -> Any:
        """Returns the rows in ``int32[B]`` slots, all in range, lane after lane."""
        return self._on_devices(self.read_lanes)(arrays, self._split(read_slots))

    def write_lanes(self, arrays: Any, rows: Any, slots: jax.Array) -> Any:
        """Does what `write` does, on the lanes of one device."""
        # On CPUs a scatter by jax 0.12 takes ten times as long as row by row.
        if _platform(self.sharding) == "cpu" and not self.tiled and len(slots) == 1:
            return jax.tree.map(partial(_written_in_turn, slots=slots[0]), arrays, rows)
        # Slots must be unique, including those that are dropped.
        beyond = self.num_slots + jnp.arange(slots.shape[1], dtype=slots.dtype)
        slots = jnp.where(slots < self.num_slots, slots, beyond)

        def leaf(layout: SlotLayout, array: jax.Array, rows: jax.Array) -> jax.Array:
            rows = rows.reshape(slots.shape + rows.shape[1:])
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
        self, arrays: Any, inputs: Any, augment: Augment | None = None
    ) -> list[Any]:
        """Returns the K batches of `DeviceFeed.take`, leaves ``[B, ...]``."""

        def one(uses: Any) -> Any:
            batch = self.read(arrays, uses[_SLOT])
            if augment is None:
                return batch
            # On a mesh of explicit axes, the keys must be split like the batch.
            return augment(batch, self.keys(self._split(uses[_KEYS].T)))

        return [one(inputs[k]) for k in range(len(inputs))]

    def keys(self, words: Any) -> jax.Array:
        """Returns the random keys of uses from their words, ``int32[B, 2]``."""
        words = jax.lax.bitcast_convert_type(words, jnp.uint32)
        return jax.random.wrap_key_data(words, impl="threefry2x32")

    def _split(self, rows: Any) -> jax.Array:
        """Splits an array over explicit axes along its first axis, as a batch."""
        rows = jnp.asarray(rows)
        if AxisType.Explicit in self.sharding.mesh.axis_types:
            rows = jax.sharding.reshard(rows, self.sharding)
        return rows

    def _on_devices(self, local: Callable[..., Any]) -> Callable[..., Any]:
        """Runs a function on every device's own lanes, without communication."""
        mesh, rows = self.sharding.mesh, self.sharding.spec
        return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows)


def _written_in_turn(array: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Does what `SlotLayout.write` does, row by row."""
    lane = array[0]
    flat = rows.reshape(len(rows), *lane.shape[1:])

    def put(k: Any, lane: jax.Array) -> jax.Array:
        def into(lane: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(lane, flat[k], slots[k], 0)

        return jax.lax.cond(slots[k] < len(lane), into, lambda lane: lane, lane)

    return jax.lax.fori_loop(0, slots.size, put, lane)[None]


# Caches by value, because jit's own is by the identity of a function: buffers of one
# layout compile once.
@functools.lru_cache(maxsize=8)
def _allocator(buffer: EchoBuffer) -> Callable[[], Any]:
    return jax.jit(buffer.zeros, out_shardings=buffer.sharding)


@functools.lru_cache(maxsize=8)
def jitted_write(buffer: EchoBuffer) -> Callable[[Any, Any, Any], Any]:
    """Returns `EchoBuffer.write` compiled, with donated arrays."""
    return jax.jit(buffer.write, donate_argnums=0, out_shardings=buffer.sharding)


@functools.lru_cache(maxsize=8)
def _sender(sharding: NamedSharding) -> Callable[[Any], Any]:
    if sharding.num_devices > 1:
        return partial(jax.device_put, device=sharding)
    if _platform(sharding) == "cpu":
        return lambda batch: batch  # `write` reads the host's memory itself.
    # To one device, the call of a function takes a quarter of the time.
    return jax.jit(lambda batch: batch, out_shardings=sharding)


def _platform(sharding: NamedSharding) -> str:
    return next(iter(sharding.device_set)).platform


def default_mesh(most: int | None = None) -> Mesh:
    """Returns a mesh of this process' devices along one axis, ``data``."""
    devices = jax.local_devices()[:most]
    return jax.make_mesh(
        (len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices
    )


def split_over(mesh: Mesh | None) -> NamedSharding:
    """Returns the sharding that splits rows over all axes of a mesh."""
    mesh = mesh or default_mesh()
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def _in_units(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} GB"
