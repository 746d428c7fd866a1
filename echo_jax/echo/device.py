"""Echo on the accelerator: each fresh item is sent to it once, and used there again.

A buffer of slots is in accelerator memory, split into lanes over the devices of a mesh.
The host decides which slots are written and read (`echo_jax.echo.plans`). A jitted,
donated function scatters every fresh host batch. Another one gathers each training
batch, with a random key for every use. uint8 stays uint8 until the step casts it.

`echo_batches` makes an iterator of device batches, for any trainer. A trainer that
gathers in the program of its update uses `DeviceFeed` and `EchoBuffer` directly::

    with closing(DeviceFeed(host_batches, plan, EchoBuffer.of(host_batch))) as feed:
        while (inputs := feed.take()) is not None:
            state = step(state, feed.arrays, inputs)  # uses feed.buffer.draw
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from echo_jax.echo.arguments import integer
from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.default_spec import default_spec, free_on
from echo_jax.echo.device_feed import DeviceFeed, plan_of_size
from echo_jax.echo.device_in_step import StepEcho
from echo_jax.echo.driver import Driver, Turn, prefetched
from echo_jax.echo.iterator import EchoIterator
from echo_jax.echo.plans.lanes import Lanes, lanes_are_alike
from echo_jax.echo.processes import AgreedIterator, Placement
from echo_jax.echo.spec import AdaptiveSpec, AnySpec
from echo_jax.echo.stateful import PeekedIterator, iterator_of, length_of
from echo_jax.echo.stores.device import Augment, EchoBuffer, split_over

__all__ = [
    "DeviceEchoIterator",
    "DeviceFeed",
    "EchoBuffer",
    "StepEcho",
    "echo_batches",
    "plan_of_size",
]


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
        self._peeked, self._agreed = PeekedIterator(iterator), None
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
            counts = Counts(*map(self._place.over_all, astuple(counts)))
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
            return length * getattr(self._spec, "batch_size", 1)
        return length * self._place.over_all(self._feed.buffer.rows)

    def _read(self, driver: Driver, at: int, stop: int) -> tuple[Any, UseInfo]:
        feed = self._feed
        uses, (index, repeat) = feed.inputs(at, stop)
        batch = feed.take_fresh(uses) if self._augment is None else None
        if batch is None:
            # A smaller batch has its own program, so that an augmentation sees only
            # real rows. The call transfers the integers, as a write does.
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
        spec = self._spec or default_spec(rows, layout.bytes_per_item, room)
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
        layout = self._layout = self._layout or EchoBuffer.of(
            batch, num_lanes=len(place.lanes), sharding=place.own
        )
        if self._agreed is not None:
            self._agreed.check = layout.checked
        devices = layout.sharding.addressable_devices
        # A device that does not tell has as much as one batch needs.
        free = [free_on(device, len(devices)) or 0 for device in devices]
        room = sum(free) * layout.num_shards // len(devices)
        named = {
            "spec": self._spec,
            "rows on each shard": layout.rows // layout.num_shards,
            "examples of": jax.tree.unflatten(layout.structure, layout.items),
            "buffer_bytes": self._buffer_bytes,
            "num_lanes": place.num_lanes,
            "prefetch": self._prefetch,
            "drop_remainder": self._drop_remainder,
        }
        # Without the addresses of functions, such as that of a factor.
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
    again. Without a spec the echo is that of `echo_jax.echo_batches`, within a tenth of
    the devices' free memory.

    If the mesh has devices of several processes, every process calls this with a loader
    of its own rows: the parts of a host batch that its devices hold, in their order.
    The spec counts over all processes, and a batch is one global array. Nothing is sent
    between processes but a few bytes for each fresh batch. If a loader fails, or ends
    before the others, that is an error in all processes. An adaptive echo follows the
    first process's decisions.

    Args:
      loader: Yields host batches of one size: pytrees of arrays with a first axis. The
        state can be saved if that of `echo_jax.echo_batches` can.
      spec: An `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`. ``batch_size`` is that of
        the training batches, which may be another than the loader's, and ``buffer``
        counts examples over all devices. None to choose it by the first batch.
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
      prefetch: Host batches that a thread reads and sends ahead; 0 for none. None is 2.
        For several devices, another thread reads at most two more.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of batch and `UseInfo`.
      timeout_s: In several processes, how long one waits for a fresh batch of another,
        in seconds.

    Returns:
      The `EchoIterator` of batches, sharded over the devices, which also has the layout
      of its ``buffer``.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The sharding splits another axis than that of the examples, or the
        lanes are not a multiple of its parts. With the first batch, if the buffer does
        not fit, or is too small for ``spread`` without twins (two uses of an item in
        one batch), or if other processes make another echo.

    Example:
      >>> import numpy as np
      >>> from echo_jax import EchoSpec
      >>> fresh = iter([{"x": np.arange(8)}, {"x": np.arange(8, 16)}])
      >>> batches = echo_batches(fresh, EchoSpec(2, batch_size=8), num_lanes=8)
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
