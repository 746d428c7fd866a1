"""Echo on the accelerator: each fresh item is sent to it once, and used there again.

A buffer of slots is in accelerator memory, split into lanes over the devices of a mesh.
The host decides which slots are written and read (`echo_jax.echo.plans`). A jitted,
donated function scatters every fresh host batch. Another one gathers each training
batch, with a random key for every use. uint8 stays uint8 until the step casts it.

`echo_batches` makes an iterator of device batches. `StepEcho` has the writes and reads
as pure functions, for a step of your own.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.arguments import integer
from echo_jax.echo.default_spec import chosen_spec, free_on
from echo_jax.echo.device_in_step import StepEcho, pack
from echo_jax.echo.driver import Driver, Turn, prefetched
from echo_jax.echo.iterator import EchoIterator
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Plan, Uses
from echo_jax.echo.plans.lanes import Lanes, lanes_are_alike
from echo_jax.echo.processes import AgreedIterator, Placement
from echo_jax.echo.spec import AdaptiveSpec, AnySpec
from echo_jax.echo.stats import Counts, UseInfo
from echo_jax.echo.stores.batches import check_lists
from echo_jax.echo.stores.device import Augment, EchoBuffer, jitted_write, split_over
from echo_jax.echo.upstream import (
    Element,
    ReadAhead,
    Reader,
    batch_size_of,
    iterator_of,
    length_of,
)

__all__ = ["DeviceEchoIterator", "StepEcho", "echo_batches"]


class _Slots:
    """The slots of a buffer on the devices, as a store; sends host batches there."""

    # The thread that reads holds it, so it must not hold the feed.
    eager = in_bulk = False

    def __init__(self, buffer: EchoBuffer, lanes: list[int] | slice):
        self.buffer, self._lanes = buffer, lanes
        self.arrays, self._scatter = buffer.init(), jitted_write(buffer)
        self.rewritten_rows = buffer.rows // buffer.num_lanes
        # Here; the thread that reads does not see ``with jax.enable_x64(True)``.
        self._is_x64 = jax.dtypes.canonicalize_dtype(np.int64) == np.int64

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Returns a batch on the devices, with its rows in each lane."""
        (batch,) = values
        with jax.enable_x64(self._is_x64):
            return self.buffer.put(batch), self.rewritten_rows

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        slots, rows = slots[self._lanes], self.rewritten_rows
        for number, (batch, _, _) in enumerate(taken):
            into = slots[:, number * rows : (number + 1) * rows]
            # It transfers the integers: a device_put of them would take longer.
            with jax.transfer_guard_host_to_device("allow"):
                self.arrays = self._scatter(self.arrays, batch, into)

    def clear(self) -> None:
        # A failed write has donated them.
        if any(array.is_deleted() for array in jax.tree.leaves(self.arrays)):
            self.arrays = self.buffer.init()


class DeviceFeed(Driver):
    """The host side of a device echo: reads, sends ahead, and decides."""

    def __init__(
        self,
        iterable: Iterable[Any],
        plan: Plan,
        buffer: EchoBuffer,
        *,
        seed: int | None = 0,
        prefetch: int = 2,
        lanes: Sequence[int] | None = None,
        turn: Turn | None = None,
        agree: Callable[[Callable[[], bool]], bool] = lambda ask: ask(),
    ):
        # It allocates the buffer, laid out for these batches, and reads nothing yet.
        # Without a seed inputs have no keys. The buffer holds some of the plan's lanes,
        # by default all.
        self.buffer = replace(buffer, num_slots=plan.num_slots)
        self.tags: UseInfo | None = None
        self._seed = seed
        self._lanes = slice(None) if lanes is None else list(lanes)
        self._slots = slots = _Slots(self.buffer, self._lanes)
        # Sending a batch to several devices takes long, and must not delay the reading
        # of the next.
        is_slow = prefetch and buffer.sharding.num_devices > 1
        self._upstream = ReadAhead(iter(iterable)) if is_slow else None
        reader = Reader(
            self._upstream or iter(iterable),
            # Any host batch may be the oldest one with an item in use.
            next_anchor=lambda row: row,
            intake=slots,
            depth=prefetch * slots.rewritten_rows,
        )
        super().__init__(reader, plan, slots, turn, agree)
        # The decided uses, and what `pack` made of them.
        self._decided: Uses | None = None
        self._packed: tuple[np.ndarray, ...] = ()

    @property
    def arrays(self) -> Any:
        """The slots, never donated; `take` may replace them."""
        return self._slots.arrays

    def take(self, num_batches: int = 1) -> np.ndarray | None:
        """Decides the next K batches; returns their integers, None at the end.

        They are ``int32[K, 2, B]``, lane after lane: the slot of each use in its lane,
        and its number. With a seed ``int32[K, 4, B]``, with two words of a random key.
        """
        # A stream that ends within K > 1 batches drops the last ones.
        uses = num_batches * self.plan.batch
        with self.turn:
            self.turn.check()
            found = self.next(uses)
            if found is None or (num_batches > 1 and found[1] - found[0] < uses):
                return None
            inputs, self.tags = self.inputs(*found)
            return inputs

    def inputs(self, at: int, stop: int) -> tuple[np.ndarray, UseInfo]:
        """Returns the integers and the tags of some of the decided uses."""
        size = self.plan.batch
        if self.uses is not self._decided:
            self._decided = self.uses
            self._packed = pack(self.uses[self._lanes], size, self._seed)
        batches = slice(at // size, -(-stop // size))
        packed, index, repeat = self._packed
        return packed[batches], UseInfo(index[batches], repeat[batches])

    def hold(self, host_batch: Any) -> np.ndarray:
        """Returns an input of the first slots; writes a batch there if nothing is."""
        lanes, rows = self.buffer.num_lanes, self._slots.rewritten_rows
        slots = np.tile(np.arange(rows, dtype=np.int32), (lanes, 1))
        if not self.counts.fresh:
            batch, _ = self._slots.prepare([host_batch])
            self._slots.write(slots, [(batch, 0, rows)])
        uses = Uses(slots, np.arange(slots.size).reshape(lanes, rows), 0 * slots)
        return pack(uses, rows, self._seed)[0]

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        if self._upstream is not None:
            self._upstream.close()
        super().close()


def plan_of_size(
    spec: AnySpec,
    lanes: Lanes,
    bytes_per_item: int,
    buffer_bytes: int,
    max_batches: int = 1,
) -> Plan:
    """Returns the plan of an echo, with the largest buffer that the memory holds."""
    # ``buffer_bytes`` are over all lanes; 0 keeps ``spec.buffer``.

    def make(buffer: int) -> Plan:
        own = replace(spec, buffer=buffer)
        return make_plan(own, lanes=lanes, max_batches=max_batches)

    if not buffer_bytes:
        return make(spec.buffer)
    # The slots that a plan needs beyond its buffer grow with it.
    count, num_items = lanes.count, buffer_bytes // bytes_per_item
    needed = make(max(num_items, count)).num_slots * count
    buffer = (2 * num_items - needed) // count * count
    if buffer < count:
        raise ValueError(
            f"the memory holds {num_items} items, and the echo needs {needed} "
            "besides its buffer; use more buffer_bytes, or smaller batches"
        )
    return make(buffer)


class DeviceEchoIterator(EchoIterator):
    """The iterator that `echo_batches` returns; an `echo_jax.EchoIterator`."""

    _feed: DeviceFeed

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: AnySpec | None,
        *,
        place: Placement,
        augment: Augment | None,
        buffer_bytes: int,
        prefetch: int,
        timeout_s: float,
        **common: Any,
    ):
        self._peeked, self._agreed = ReadAhead(iterator, depth=0), None
        if place.own is not place.sharding:
            self._agreed = AgreedIterator(iterator, place.sharding, timeout_s)
            self._peeked = self._agreed
        super().__init__(self._peeked, spec, batch=True, **common)
        self._place, self._augment = place, augment
        self._buffer_bytes, self._prefetch = buffer_bytes, prefetch
        self._layout: EchoBuffer | None = None

    @property
    def counts(self) -> Counts:
        """The fresh items taken, and the uses and repeats made so far."""
        counts = super().counts
        # Lanes that take fresh items at the same batches have the same counts.
        if self._spec is not None and lanes_are_alike(self._spec):
            counts = Counts(*map(self._place.over_all, counts))
        return counts

    @property
    def buffer(self) -> EchoBuffer:
        """The layout of the buffer on this process's devices, which has its size.

        Raises:
          StopIteration: The upstream is empty.
        """
        self._open()
        return self._feed.buffer

    def _items(self, length: int) -> int:
        if self._driver is None:
            return length * (self._spec.batch_size if self._spec else 1)
        return length * self._place.over_all(self._feed.buffer.rows)

    def _read(self, driver: Driver, at: int, stop: int) -> tuple[Any, UseInfo]:
        feed = self._feed
        uses, (index, repeat) = feed.inputs(at, stop)
        # A smaller batch has its own program: an augmentation sees only real rows.
        with jax.transfer_guard_host_to_device("allow"):
            batch = self._draw(feed.arrays, uses)
        return self._place.joined(batch), UseInfo(index[0], repeat[0])

    def _start(self, turn: Turn) -> Driver:
        place, agreed = self._place, self._agreed
        # A feed that is replaced leaves its layout, and an upstream past the start.
        lay_out = partial(self._lay_out, None if self._layout else self._peeked.peek())
        room = lay_out()[1] if agreed is None else agreed.check_alike(lay_out)
        layout = self._layout
        assert layout is not None
        rows, own, count = place.over_all(layout.rows), place.lanes, place.num_lanes
        spec = self._spec or chosen_spec(self._given, rows, layout.bytes_per_item, room)
        # Else only a plan of all lanes knows when one of them needs fresh items, and
        # how many rows a last batch has.
        alike = agreed is None or lanes_are_alike(spec)
        self._feed = DeviceFeed(
            self._peeked,
            plan_of_size(
                spec,
                Lanes(rows, count, own if alike else range(count)),
                layout.bytes_per_item,
                self._buffer_bytes,
            ),
            layout,
            seed=None if self._augment is None else spec.seed,
            prefetch=self._prefetch,
            lanes=None if alike else own,
            turn=turn,
            agree=agreed.follow_first if agreed else lambda ask: ask(),
        )
        self._spec, self._draw = spec, _jitted_draw(self._feed.buffer, self._augment)
        return self._feed

    def _lay_out(self, batch: Any) -> tuple[str, int]:
        """Lays out the buffer; returns what is alike in all processes, and its room."""
        place = self._place
        if self._layout is None:
            check_lists(batch, self._loader_rows)
            lanes = len(place.lanes)
            self._layout = EchoBuffer.of(batch, num_lanes=lanes, sharding=place.own)
        layout = self._layout
        if self._agreed is not None:
            self._agreed.check = layout.checked
        devices = layout.sharding.addressable_devices
        # A device that does not tell has as much as one batch needs.
        free = [free_on(device, len(devices)) or 0 for device in devices]
        room = sum(free) * layout.num_shards // len(devices)
        named = {
            "spec": self._given,
            "rows on each shard": layout.rows // layout.num_shards,
            "examples of": jax.tree.unflatten(layout.structure, layout.items),
            "buffer_bytes": self._buffer_bytes,
            "num_lanes": place.num_lanes,
            "prefetch": self._prefetch,
            "drop_remainder": self._drop_remainder,
        }
        # Without the addresses of functions, such as a factor by item.
        return re.sub(r" at 0x[0-9a-f]+", "", str(named)), place.over_all(room)

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; the upstream stays open."""
        super().close()
        if self._agreed is not None:
            self._agreed.close()


def echo_batches(
    loader: Iterable[Any],
    spec: AnySpec | None = None,
    *,
    mesh: Mesh | None = None,
    sharding: NamedSharding | None = None,
    num_lanes: int = 0,
    augment: Augment | None = None,
    buffer_bytes: int = 0,
    prefetch: int | None = None,
    drop_remainder: bool = False,
    tags: bool = False,
    timeout_s: float = 600.0,
) -> DeviceEchoIterator:
    """Repeats the examples of a loader's batches on the accelerator.

    Every fresh batch is sent once, ahead of its use. The spec says how the training
    batches are drawn from a buffer in accelerator memory. Every use is augmented there
    again. Without a spec the echo is as in `echo_jax.echo_batches`, within a tenth of
    the devices' free memory.

    If the mesh has devices of several processes, every process calls this with a loader
    of its own rows: the parts of a host batch that its devices hold, in their order.
    The spec counts over all processes, and a batch is one global array. Nothing is sent
    between processes but a few bytes for each fresh batch. If a loader fails, or ends
    before the others, that is an error in all processes. An adaptive echo follows the
    first process's decisions.

    Args:
      loader: Yields host batches of one size: pytrees of arrays with a first axis. The
        state can be saved as in `echo_jax.echo_batches`.
      spec: An `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`. ``batch_size`` is that of
        the training batches, which may be another than the loader's, and ``buffer``
        counts examples over all devices. The first batch chooses what it leaves out.
      mesh: The devices; all of this process by default. A batch is split over all of
        its axes.
      sharding: The sharding that batches are to have, instead of ``mesh``. Its spec
        names the axes that split the examples, such as ``P("data")`` or
        ``P(("data", "fsdp"))``; devices along other axes hold equal copies.
      num_lanes: Independent parts of the buffer; 0 for one per shard of a batch. With
        the same number the sequence is the same on fewer devices.
      augment: A pure function ``(batch, keys) -> batch``, with a key for every
        example, traced into the same program. Its keys follow from (``spec.seed``,
        fresh index, repeat). A last, smaller batch is not padded, so the program is
        compiled once more for it.
      buffer_bytes: Sizes the buffer by memory over all devices; 0 uses ``spec.buffer``.
      prefetch: Host batches that a thread sends ahead, while it reads the next; 0 for
        none. None is 2. For several devices, another thread reads at most three more.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of batch and `UseInfo`.
      timeout_s: In several processes, how long one waits for a fresh batch of another,
        in seconds.

    Returns:
      The `EchoIterator` of batches, sharded over the devices, which also has the layout
      of its ``buffer``.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The sharding splits another axis than the examples' axis, or the
        lanes are not a multiple of its parts. With the first batch, if the buffer does
        not fit, or is too small for ``spread`` to have no item twice in a batch, or if
        other processes make another echo.

    Example:
      >>> import numpy as np
      >>> from echo_jax import EchoSpec
      >>> fresh = iter([{"x": np.arange(8)}, {"x": np.arange(8, 16)}])
      >>> spec = EchoSpec(2, order="consecutive")
      >>> batches = echo_batches(fresh, spec, num_lanes=8)
      >>> [int(batch["x"].sum()) for batch in batches]
      [28, 28, 92, 92]
    """
    sharding = _of_rows(split_over(mesh) if sharding is None else sharding, mesh)
    return DeviceEchoIterator(
        iterator_of(loader),
        spec,
        place=Placement.of(sharding, integer("num_lanes", num_lanes, 0)),
        augment=augment,
        buffer_bytes=integer("buffer_bytes", buffer_bytes, 0),
        prefetch=prefetched(spec or AdaptiveSpec(), prefetch, default=2),
        timeout_s=timeout_s,
        drop_remainder=drop_remainder,
        tags=tags,
        length=length_of(loader),
        loader_rows=batch_size_of(loader),
    )


def _of_rows(sharding: Any, mesh: Mesh | None) -> NamedSharding:
    """Returns a sharding of rows alone; raises if it does not split them."""
    fix = 'Use NamedSharding(mesh, PartitionSpec("data")).'
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(f"sharding must be a NamedSharding, got {sharding!r}. {fix}")
    if mesh not in (None, sharding.mesh):
        raise ValueError(f"mesh={mesh} is not that of sharding={sharding}; give one")
    first, *rest = sharding.spec or (None,)
    if first is None or any(rest):
        raise ValueError(
            f"sharding must split the examples, and nothing else, got {sharding.spec}. "
            f"{fix}"
        )
    return NamedSharding(sharding.mesh, PartitionSpec(first))


@lru_cache(maxsize=8)
def _jitted_draw(buffer: EchoBuffer, augment: Augment | None) -> Callable[..., Any]:
    def draw(arrays: Any, uses: Any) -> Any:
        (batch,) = buffer.draw(arrays, uses, augment)
        return batch

    return jax.jit(draw, out_shardings=buffer.sharding)
