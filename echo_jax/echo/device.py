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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from echo_jax.echo.arguments import integer
from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.default_spec import chosen_part, default_spec, free_on, split_state
from echo_jax.echo.device_feed import DeviceFeed, largest_buffer
from echo_jax.echo.device_in_step import StepEcho
from echo_jax.echo.driver import Turn, prefetched
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Plan
from echo_jax.echo.plans.lanes import Lanes, lanes_are_alike
from echo_jax.echo.processes import AgreedIterator, Meeting, Placement
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, num_outputs
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


class DeviceEchoIterator(Iterator[Any]):
    """The iterator that `echo_batches` returns; a context manager, which closes it.

    Attributes:
      tags: The tags of the latest batch, None before the first; in several processes
        those of this process's rows.
    """

    def __init__(
        self, iterator: Iterator[Any], spec: AnySpec | None, options: "_Options"
    ):
        self._meeting: Meeting | None = None
        self._iterator = PeekedIterator(iterator)
        if options.place.sharding is not None:
            mesh, limit_s = options.place.sharding.mesh, options.timeout_s
            assert isinstance(mesh, Mesh)
            self._meeting = Meeting(mesh, limit_s)
            self._iterator = AgreedIterator(iterator, self._meeting)
        self._spec, self._options = spec, options
        self._chooses = spec is None
        self._feed: DeviceFeed | None = None
        self._layout: EchoBuffer | None = None
        self._turn = Turn()
        self.tags: UseInfo | None = None

    @property
    def counts(self) -> Counts:
        """The fresh items taken, and the uses and repeats made so far."""
        if self._feed is None:
            return Counts()
        counts, place = self._feed.counts, self._options.place
        # Lanes that take fresh items at the same batches have the same counts.
        if self._spec is not None and lanes_are_alike(self._spec):
            counts = Counts(*map(place.over_all, astuple(counts)))
        return counts

    @property
    def log(self) -> DecisionLog | None:
        """The decisions of an adaptive echo so far; None in other modes."""
        return None if self._feed is None else self._feed.log

    @property
    def buffer(self) -> EchoBuffer:
        """The layout of the buffer on this process's devices, which has its size.

        Raises:
          StopIteration: The upstream is empty.
        """
        return self._open().buffer

    def __iter__(self) -> "DeviceEchoIterator":
        """Returns itself; warns if the echo has ended."""
        self._turn.warn_if_ended()
        return self

    def __length_hint__(self) -> int:
        """Returns how many batches a fixed echo makes of its whole upstream."""
        options, spec = self._options, self._spec
        length, rows = options.length, getattr(spec, "batch_size", 1)
        if length is not None:
            if self._feed is not None:
                rows = options.place.over_all(self._feed.buffer.rows)
            length *= rows
        return num_outputs(
            spec, length, batch=True, drop_remainder=options.drop_remainder
        )

    def __next__(self) -> Any:
        """Returns the next batch, on the devices, and its `UseInfo` if ``tags`` is set.

        Raises:
          Exception: The upstream raised an error. Nothing is lost: the next call asks
            the upstream again.
          RuntimeError: An earlier call was interrupted at a place from which the echo
            cannot go on.
          ValueError: The echo is closed, or another thread is using it.
        """
        with self._turn:
            found = self._next(self._started())
            if found is None:
                raise self._turn.end()
            self.tags = found[1]
            return found if self._options.tags else found[0]

    def _next(self, feed: DeviceFeed) -> tuple[Any, UseInfo] | None:
        inputs = feed.decide(1)
        if inputs is None:
            return None
        assert self._spec is not None
        assert feed.tags is not None
        tags = UseInfo(feed.tags.fresh_index[0], feed.tags.repeat[0])
        is_whole = tags.repeat.size == self._spec.batch_size
        if self._options.drop_remainder and not is_whole:
            # Whole batches may follow: a stochastic echo goes on after its last fetch.
            self._turn.consistent = True
            return self._next(feed)
        # A smaller batch has its own program, so that an augmentation sees only real
        # rows. The call transfers the integers, as a write does.
        with jax.transfer_guard_host_to_device("allow"):
            batch = self._draw(feed.arrays, inputs)
        return self._options.place.joined(batch), tags

    def _open(self) -> DeviceFeed:
        """Returns the feed; makes it in a turn of its own if there is none."""
        if self._feed is not None:
            return self._feed
        self._turn.enter()
        try:
            return self._started()
        finally:
            # After any failure, the upstream was only peeked at.
            self._turn.leave()

    def _started(self) -> DeviceFeed:
        """Returns the feed, which the first batch makes."""
        if self._feed is None:
            options, place = self._options, self._options.place
            # A feed that is replaced leaves its layout, and an upstream past the start.
            first = self._iterator.peek() if self._layout is None else None
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
                # Only a plan of all lanes knows when one of them needs fresh items, and
                # how many rows a last batch has.
                lanes = Lanes(rows, count)
            make = partial(_plan_of, self._spec, lanes)
            size = self._spec.buffer
            if options.buffer_bytes:
                fits = options.buffer_bytes // layout.bytes_per_item
                size = largest_buffer(make, fits, count)
            plan = make(size)
            buffer = replace(layout, num_slots=plan.num_slots)
            feed = DeviceFeed(
                self._iterator,
                plan,
                buffer,
                seed=None if options.augment is None else self._spec.seed,
                prefetch=options.prefetch,
                turn=self._turn,
                lanes=own if drifting else None,
                meeting=self._meeting,
            )
            self._draw = _jitted_draw(buffer, options.augment)
            self._feed = feed
        return self._feed

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
        if isinstance(self._iterator, AgreedIterator):
            self._iterator.check = layout.checked
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
            "drop_remainder": options.drop_remainder,
        }
        # Without the addresses of functions, such as that of a factor.
        return re.sub(r" at 0x[0-9a-f]+", "", str(named)), place.over_all(room)

    def get_state(self) -> dict[str, Any]:
        """Returns plain data: the plan's integers, and the upstream's own state.

        The upstream's state is the one at the oldest host batch in use. An adaptive
        echo adds its log.

        Raises:
          TypeError: The upstream has no get_state and set_state.
        """
        try:
            state = self._open().get_state()
            if self._chooses and self._spec is not None:
                state["spec"] = chosen_part(self._spec)
            return state
        except StopIteration:  # an empty upstream has the state of its end alone
            return {"plan": {}, "skip": 0, "upstream": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the iterator that returned the state would have.

        Args:
          state: From `get_state`.

        Raises:
          ValueError: The state is not one of a device echo over this upstream.
        """
        try:
            if self._chooses and state["plan"]:
                state, spec = split_state(state)
                if self._feed is not None and spec != self._spec:
                    # It was chosen with another amount of free memory.
                    self._feed.close()
                    self._feed, self._turn = None, Turn()
                self._spec = spec
            self._open().set_state(state)
        except StopIteration as error:
            if state["plan"]:
                raise ValueError(
                    "the upstream is empty, but the state is not one of an empty "
                    "stream; restore it over the same data"
                ) from error
        self.tags = None

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; the upstream stays open."""
        self._turn.close()
        if self._feed is not None:
            self._feed.close()
        if isinstance(self._iterator, AgreedIterator):
            self._iterator.close()

    def __enter__(self) -> "DeviceEchoIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Options:
    place: Placement
    num_lanes: int
    augment: Augment | None
    buffer_bytes: int
    prefetch: int
    drop_remainder: bool
    tags: bool
    length: int | None
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
      prefetch: Host batches that a thread sends ahead; 0 for none. None is 2. Another
        thread reads at most two more.
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
        drop_remainder=drop_remainder,
        tags=tags,
        length=length_of(loader),
        timeout_s=timeout_s,
    )
    return DeviceEchoIterator(iterator_of(loader), spec, options)


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
