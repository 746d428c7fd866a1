"""Echo on the accelerator: each fresh item is sent to it once, and used there again.

A buffer of slots is in accelerator memory, split into lanes over the devices of a mesh.
The host decides which slots are written and read (`echo_jax.echo.plans`). A jitted,
donated function scatters every fresh host batch. Another one gathers each training
batch, with a random key for every use. uint8 stays uint8 until the step casts it.

`echo_batches` makes an iterator of device batches, for any trainer. A trainer that
gathers in the program of its update uses `DeviceFeed` and `EchoBuffer` directly::

    buffer = EchoBuffer.of(host_batch, num_slots=plan.num_slots, ...)
    with closing(DeviceFeed(host_batches, plan, buffer)) as feed:
        while (inputs := feed.next()) is not None:
            state = step(state, feed.arrays, inputs)  # uses buffer.draw
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from echo_jax.echo.arguments import integer
from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.default_spec import default_spec, free_on
from echo_jax.echo.device_feed import DeviceFeed, largest_buffer
from echo_jax.echo.device_in_step import StepEcho
from echo_jax.echo.driver import Driver, Turn, prefetched
from echo_jax.echo.iterator import EchoIterator
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Plan
from echo_jax.echo.plans.lanes import Lanes, lanes_are_alike
from echo_jax.echo.processes import AgreedIterator, Meeting, Placement
from echo_jax.echo.spec import AdaptiveSpec, AnySpec
from echo_jax.echo.stateful import PeekedIterator, iterator_of, length_of
from echo_jax.echo.stores.device import Augment, EchoBuffer, StepInput, default_mesh

__all__ = [
    "DeviceEchoIterator",
    "DeviceFeed",
    "EchoBuffer",
    "StepEcho",
    "StepInput",
    "echo_batches",
    "largest_buffer",
]


class DeviceEchoIterator(EchoIterator):
    """The iterator that `echo_batches` returns; an `echo_jax.EchoIterator`."""

    _feed: DeviceFeed

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: AnySpec | None,
        options: "_Options",
        **common: Any,
    ):
        self._meeting: Meeting | None = None
        self._peeked = PeekedIterator(iterator)
        if options.place.sharding is not None:
            mesh, limit_s = options.place.sharding.mesh, options.timeout_s
            assert isinstance(mesh, Mesh)
            self._meeting = Meeting(mesh, limit_s)
            self._peeked = AgreedIterator(iterator, self._meeting)
        super().__init__(self._peeked, spec, batch=True, **common)
        self._options = options
        self._layout: EchoBuffer | None = None

    @property
    def counts(self) -> Counts:
        """The fresh items taken, and the uses and repeats made so far."""
        counts, place = super().counts, self._options.place
        # Lanes that take fresh items at the same batches have the same counts.
        if self._spec is not None and lanes_are_alike(self._spec):
            counts = Counts(*map(place.over_all, astuple(counts)))
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
        return length * self._options.place.over_all(self._feed.buffer.rows)

    def _read(self, driver: Driver, at: int, stop: int) -> tuple[Any, UseInfo]:
        feed = self._feed
        inputs, (index, repeat) = feed.inputs(at, stop)
        # A smaller batch has its own program, so that an augmentation sees only real
        # rows. The call transfers the integers, as a write does.
        with jax.transfer_guard_host_to_device("allow"):
            batch = self._draw(feed.arrays, inputs)
        return self._options.place.joined(batch), UseInfo(index[0], repeat[0])

    def _start(self, turn: Turn) -> Driver:
        options, place = self._options, self._options.place
        # A feed that is replaced leaves its layout, and an upstream past the start.
        first = self._peeked.peek() if self._layout is None else None
        if self._meeting is None:
            room = self._laid_out(first)[1]
        else:
            room = self._meeting.check_alike(partial(self._laid_out, first))
        layout = self._layout
        assert layout is not None
        count, rows = map(place.over_all, (layout.num_lanes, layout.rows))
        own = place.own_lanes(options.num_lanes)
        lanes = Lanes(rows, count, own)
        if self._spec is None:
            self._spec = default_spec(rows, layout.bytes_per_item, room)
        drifting = self._meeting is not None and not lanes_are_alike(self._spec)
        if drifting:
            # Only a plan of all lanes knows when one of them needs fresh items, and how
            # many rows a last batch has.
            lanes = Lanes(rows, count)
        make = partial(_plan_of, self._spec, lanes)
        size = self._spec.buffer
        if options.buffer_bytes:
            fits = options.buffer_bytes // layout.bytes_per_item
            size = largest_buffer(make, fits, count)
        plan = make(size)
        buffer = replace(layout, num_slots=plan.num_slots)
        self._feed = DeviceFeed(
            self._peeked,
            plan,
            buffer,
            seed=None if options.augment is None else self._spec.seed,
            prefetch=options.prefetch,
            turn=turn,
            lanes=own if drifting else None,
            meeting=self._meeting,
        )
        self._draw = _jitted_draw(buffer, options.augment)
        return self._feed.driver

    def _laid_out(self, batch: Any) -> tuple[str, int]:
        """Lays out the buffer; returns what is alike in all processes, and its room."""
        options, place = self._options, self._options.place
        layout = self._layout = self._layout or EchoBuffer.of(
            batch,
            num_slots=1,
            num_lanes=len(place.own_lanes(options.num_lanes)),
            mesh=place.mesh,
            axes=place.axes,
        )
        if isinstance(self._peeked, AgreedIterator):
            self._peeked.check = layout.checked
        devices = layout.mesh.local_devices
        # A device that does not tell has as much as one batch needs.
        free = [free_on(device, len(devices)) or 0 for device in devices]
        room = sum(free) * layout.num_shards // layout.mesh.size
        named = {
            "spec": self._spec,
            "rows on each shard": layout.rows // layout.num_shards,
            "examples of": jax.tree.unflatten(layout.structure, layout.items),
            "buffer_bytes": options.buffer_bytes,
            "num_lanes": options.num_lanes,
            "prefetch": options.prefetch,
            "drop_remainder": self._drop_remainder,
        }
        # Without the addresses of functions, such as that of a factor.
        return re.sub(r" at 0x[0-9a-f]+", "", str(named)), place.over_all(room)

    def _stop(self) -> None:
        if self._driver is not None:
            self._feed.close()

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; the upstream stays open."""
        super().close()
        if isinstance(self._peeked, AgreedIterator):
            self._peeked.close()


@dataclass(frozen=True)
class _Options:
    place: Placement
    num_lanes: int
    augment: Augment | None
    buffer_bytes: int
    prefetch: int
    timeout_s: float


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
    again.

    Without a spec it is an adaptive echo, chosen as `echo_jax.echo_batches` does: the
    loader's own batch size, at most 4 uses, and a buffer of at most 64 batches and a
    tenth of the devices' free memory.

    If the mesh has devices of several processes, every process calls this with a loader
    of its own rows: the parts of a host batch that its devices hold, in their order.
    The spec counts over all processes, and a batch is one global array. Nothing is sent
    between processes but a few bytes for each fresh batch. If a loader fails, or ends
    before the others, that is an error in all processes. An adaptive echo follows the
    first process's decisions.

    Args:
      loader: Yields host batches of one size: pytrees of arrays with a first axis.
        Their size may differ from that of the training batches. The echo's state can be
        saved if their iterator has ``get_state`` and ``set_state``, or if the loader
        has ``state_dict`` and ``load_state_dict``.
      spec: Description of the echo: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
        ``batch_size`` is that of the training batches, and ``buffer`` counts examples
        over all devices. None to choose it by the first batch.
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
      The iterator of batches, sharded over the devices, with ``counts``, ``tags``,
      ``log``, ``buffer``, ``get_state``, ``set_state`` and ``close``; a context
      manager. It has a ``__length_hint__`` if the loader has a ``len`` and the spec is
      an `EchoSpec`.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The sharding splits another axis than that of the examples. With the
        first batch, if the buffer does not fit, or is too small for ``spread`` without
        twins (two uses of an item in one batch), or if other processes make another
        echo.

    Example:
      >>> import numpy as np
      >>> from echo_jax import EchoSpec
      >>> fresh = iter([{"x": np.arange(8)}, {"x": np.arange(8, 16)}])
      >>> batches = echo_batches(fresh, EchoSpec(2, batch_size=8), num_lanes=8)
      >>> [int(batch["x"].sum()) for batch in batches]
      [28, 28, 92, 92]
    """
    axes: tuple[str, ...] = ()
    if sharding is not None:
        mesh, axes = _rows_of(sharding, mesh)
    options = _Options(
        place=Placement.of(mesh or default_mesh(), axes),
        num_lanes=integer("num_lanes", num_lanes, 0),
        augment=augment,
        buffer_bytes=integer("buffer_bytes", buffer_bytes, 0),
        prefetch=prefetched(spec or AdaptiveSpec(), prefetch, default=2),
        timeout_s=timeout_s,
    )
    return DeviceEchoIterator(
        iterator_of(loader),
        spec,
        options,
        drop_remainder=drop_remainder,
        tags=tags,
        length=length_of(loader),
    )


def _rows_of(sharding: Any, mesh: Mesh | None) -> tuple[Mesh, tuple[str, ...]]:
    """Returns the mesh of a sharding, and the axes that split the examples."""
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
    names = first if isinstance(first, tuple) else (first,)
    return sharding.mesh, tuple(map(str, names))


def _plan_of(spec: AnySpec, lanes: Lanes, buffer: int) -> Plan:
    return make_plan(replace(spec, buffer=buffer), lanes=lanes)


@lru_cache(maxsize=8)
def _jitted_draw(buffer: EchoBuffer, augment: Augment | None) -> Callable[..., Any]:
    def draw(arrays: Any, inputs: StepInput) -> Any:
        (batch,) = buffer.draw(arrays, inputs, augment)
        return batch

    return jax.jit(draw, out_shardings=buffer.sharding)
