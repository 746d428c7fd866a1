"""Echo on the accelerator: fresh data crosses to it once, and is used there again.

A buffer of slots lies in accelerator memory, split into lanes over the devices of a
mesh. For every update the host decides which slots are written and read, see
`echo_jax.echo.plans.draws`; one jitted, donated function scatters the fresh chunk and
gathers the batch, with a random key for every use. Whatever is uint8 stays uint8
until the step casts it.

`echo` makes an iterator of device batches of it, for any trainer. A trainer that
fuses the exchange with its update uses `DeviceFeed` and `EchoBuffer` themselves::

    buffer = EchoBuffer.of(host_batch, num_slots=draws.num_slots, ...)
    with closing(DeviceFeed(host_batches, draws, buffer)) as feed:
        while (inputs := feed.next()) is not None:
            state, feed.arrays = step(state, feed.arrays, inputs)  # uses buffer.draw
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from echo_jax.echo.counts import Counts
from echo_jax.echo.device_feed import DeviceFeed, largest_buffer
from echo_jax.echo.echo import Tags
from echo_jax.echo.plans.draws import FixedDraws
from echo_jax.echo.reader import PeekedIterator
from echo_jax.echo.spec import EchoSpec
from echo_jax.echo.stores.device import DrawInput, EchoBuffer

__all__ = [
    "DeviceEchoIterator",
    "DeviceFeed",
    "DrawInput",
    "EchoBuffer",
    "echo",
    "largest_buffer",
]

Augment = Callable[[Any, jax.Array], Any]


class DeviceEchoIterator(Iterator[Any]):
    """The iterator that `echo` returns.

    Attributes:
      tags: The tags of the latest batch, None before the first.
    """

    def __init__(self, iterator: Iterator[Any], spec: EchoSpec, options: "_Options"):
        """See `echo`."""
        self._iterator = PeekedIterator(iterator)
        self._spec, self._options = spec, options
        self._feed: DeviceFeed | None = None
        self.tags: Tags | None = None

    @property
    def counts(self) -> Counts:
        """Fresh items taken, uses and repeats drawn."""
        return Counts() if self._feed is None else self._feed.counts

    @property
    def buffer(self) -> EchoBuffer:
        """The buffer's layout, from which its size can be read.

        Raises:
          StopIteration: The upstream is empty.
        """
        return self._started().buffer

    def __next__(self) -> Any:
        """Returns the next batch, on the devices, with its `Tags` if asked for."""
        feed = self._started()
        inputs = feed.next()
        if inputs is None:
            raise StopIteration
        size, lanes = self._spec.batch_size, feed.buffer.num_lanes
        assert feed.tags is not None
        tags = Tags(feed.tags.fresh_index[0], feed.tags.repeat[0])
        missing = (size - tags.repeat.size) // lanes
        if missing and self._options.drop_remainder:
            raise StopIteration
        if missing:
            inputs = _filled_up(inputs, missing, lanes)
        feed.arrays, batch = self._draw(feed.arrays, inputs)
        if missing:
            keep = np.arange(size).reshape(lanes, -1)[:, :-missing].reshape(-1)
            batch = jax.tree.map(lambda x: x[keep], batch)
        self.tags = tags
        return (batch, tags) if self._options.tags else batch

    def _started(self) -> DeviceFeed:
        """The feed, which is made by the first batch."""
        if self._feed is None:
            batch, options = self._iterator.peek(), self._options
            layout = EchoBuffer.of(
                batch, num_slots=1, num_lanes=options.num_lanes, mesh=options.mesh
            )
            rows = len(jax.tree.leaves(batch)[0])
            make = partial(_fixed_draws, self._spec, rows, layout.num_lanes)
            size = self._spec.buffer
            if options.buffer_bytes:
                fits = options.buffer_bytes // layout.bytes_per_item
                size = largest_buffer(make, fits, layout.num_lanes)
            draws = make(size)
            buffer = replace(layout, num_slots=draws.num_slots)
            self._feed = DeviceFeed(
                self._iterator,
                draws,
                buffer,
                seed=self._spec.seed,
                prefetch=options.prefetch,
            )
            self._draw = _jitted_draw(buffer, options.augment)
        return self._feed

    def get_state(self) -> dict[str, Any]:
        """Returns integers, and the upstream's state at the oldest chunk in use.

        Raises:
          TypeError: If the upstream has no get_state and set_state.
        """
        try:
            return self._started().get_state()
        except StopIteration:  # an empty upstream has the state of its end alone
            return {"draws": {}, "upstream": self._iterator.get_state()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the iterator that gave the state would have.

        Raises:
          ValueError: The state is not one of a device echo over this upstream.
        """
        try:
            self._started().set_state(state)
        except StopIteration as error:
            if state["draws"]:
                raise ValueError(
                    "the upstream is empty, but the state is not one of an empty "
                    "stream; restore it over the same data"
                ) from error

    def close(self) -> None:
        """Stops reading ahead."""
        if self._feed is not None:
            self._feed.close()


@dataclass(frozen=True)
class _Options:
    """The options of `echo`."""

    mesh: Mesh | None
    num_lanes: int
    augment: Augment | None
    buffer_bytes: int
    prefetch: int
    drop_remainder: bool
    tags: bool


def echo(
    batches: Iterable[Any],
    spec: EchoSpec,
    *,
    mesh: Mesh | None = None,
    num_lanes: int = 0,
    augment: Augment | None = None,
    buffer_bytes: int = 0,
    prefetch: int = 2,
    drop_remainder: bool = False,
    tags: bool = False,
) -> DeviceEchoIterator:
    """Repeats the examples of host batches on the accelerator.

    Every fresh batch is sent once, ahead of its use; the training batches are drawn
    from a buffer in accelerator memory as the spec says, and augmented there anew
    for every use.

    Args:
      batches: Host batches: pytrees of arrays with a leading axis, all of one size,
        which need not be that of the training batches.
      spec: What the echo does. ``batch_size`` is that of the training batches,
        ``buffer`` counts examples over all devices.
      mesh: The devices; all of this process by default.
      num_lanes: Independent parts of the buffer; 0 for one per device. With the same
        number the sequence is the same on fewer devices.
      augment: A pure function ``(batch, keys) -> batch``, with a key for every
        example, traced into the same program. Its keys follow from (``spec.seed``,
        fresh index, repeat).
      buffer_bytes: Sizes the buffer by memory over all devices instead of by
        ``spec.buffer``; 0 for the latter.
      prefetch: Fresh batches that are read and sent ahead; 0 for none.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of batch and `Tags`.

    Returns:
      The iterator of batches, sharded over the devices, with ``counts``, ``tags``,
      ``buffer``, ``get_state``, ``set_state`` and ``close``.

    Raises:
      ValueError: With the first batch, if the buffer does not fit, or is too small
        for ``spread`` without twins.

    Example:
      >>> fresh = iter([{"x": np.arange(8)}, {"x": np.arange(8, 16)}])
      >>> batches = echo(fresh, EchoSpec(2, batch_size=8), num_lanes=8)
      >>> [int(batch["x"].sum()) for batch in batches]
      [28, 28, 92, 92]
    """
    options = _Options(
        mesh, num_lanes, augment, buffer_bytes, prefetch, drop_remainder, tags
    )
    return DeviceEchoIterator(iter(batches), spec, options)


def _fixed_draws(
    spec: EchoSpec, chunk_items: int, num_lanes: int, buffer: int
) -> FixedDraws:
    return FixedDraws(
        replace(spec, buffer=buffer), chunk_items=chunk_items, num_lanes=num_lanes
    )


@lru_cache(maxsize=8)
def _jitted_draw(buffer: EchoBuffer, augment: Augment | None) -> Callable[..., Any]:
    one = partial(_draw_one, buffer=buffer, augment=augment)
    return jax.jit(one, donate_argnums=0, out_shardings=buffer.sharding)


def _draw_one(
    arrays: Any, inputs: DrawInput, *, buffer: EchoBuffer, augment: Augment | None
) -> tuple[Any, Any]:
    """Makes one batch, and augments it."""
    arrays, (batch,) = buffer.draw(arrays, inputs)
    if augment is not None:
        keys = jax.random.wrap_key_data(inputs.key_data[0], impl="threefry2x32")
        batch = augment(batch, keys)
    return arrays, batch


def _filled_up(inputs: DrawInput, missing: int, num_lanes: int) -> DrawInput:
    """Inputs of a full batch from those of a last, smaller one."""
    pad = ((0, 0), (0, 0), (0, missing))
    lanes = (1, num_lanes, -1)
    keys = inputs.key_data.reshape(*lanes, 2)
    return inputs._replace(
        read_slots=np.pad(inputs.read_slots, pad),
        repeat=np.pad(inputs.repeat.reshape(lanes), pad).reshape(1, -1),
        key_data=np.pad(keys, (*pad, (0, 0))).reshape(1, -1, 2),
    )
