"""The host side of a device echo: reads, sends ahead, and decides."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from echo_jax.echo.counts import Counts, Tags
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.driver import Driver, Turn
from echo_jax.echo.keys import use_seed
from echo_jax.echo.plans.base import BatchIndices, Plan
from echo_jax.echo.reader import Reader
from echo_jax.echo.source import Element
from echo_jax.echo.stores.device import EchoBuffer, StepInput, jitted_write
from echo_jax.echo.stores.leaves import ReuseGuard, Watched

__all__ = ["DeviceFeed", "largest_buffer"]


class _Slots:
    """The slots of a buffer on the devices, as a store.

    The last host batch that was written waits here: the program that reads writes it
    first. It stays, as what is written nowhere where nothing fresh is taken, so that
    one program does for both.

    Attributes:
      buffer: Their layout.
      arrays: The slots.
      guard: Looks at the first host batches.
    """

    def __init__(self, buffer: EchoBuffer):
        self.buffer = buffer
        self.guard = ReuseGuard()
        self.arrays = buffer.init()
        self._scatter = jitted_write(buffer)
        self._host_batch: Any = None
        self._waiting: np.ndarray | None = None  # the slots of its rows

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`: whole host batches."""
        at = 0
        for (host_batch, leaves), first, end in taken:
            self.guard.check(leaves)
            self._flush()
            into = slots[:, at : at + end - first]
            self._host_batch, self._waiting = host_batch, into
            at += end - first

    def rewrite(self, slots: np.ndarray, taken: list[Element]) -> None:
        """See `echo_jax.echo.driver.Store`."""
        self.write(slots, taken)
        self._flush()

    def clear(self) -> None:
        """See `echo_jax.echo.driver.Store`."""
        self._waiting = None
        if any(array.is_deleted() for array in jax.tree.leaves(self.arrays)):
            self.arrays = self.buffer.init()  # A program that failed took them away.

    def take_waiting(self) -> tuple[Any, np.ndarray]:
        """Returns the last host batch, and where its rows are to be written."""
        slots, self._waiting = self._waiting, None
        return self._host_batch, self._nowhere if slots is None else slots

    def _flush(self) -> None:
        if self._waiting is not None:
            self.arrays = self._scatter(self.arrays, self._host_batch, self._waiting)
            self._waiting = None

    @functools.cached_property
    def _nowhere(self) -> np.ndarray:
        """Slots that are out of range, for what is not written again."""
        rows = len(jax.tree.leaves(self._host_batch)[0])
        shape = (self.buffer.num_lanes, rows // self.buffer.num_lanes)
        return np.full(shape, self.buffer.num_slots, np.int32)


class _Sender:
    """Sends host batches on their way."""

    in_bulk = False

    def __init__(self, buffer: EchoBuffer, guard: ReuseGuard):
        self._buffer, self._guard = buffer, guard

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns a batch on the devices, with its rows in each lane."""
        (batch,) = values
        watched = self._guard.watch(jax.tree.leaves(batch))
        # The host's arrays are kept only as long as they are looked at.
        kept = watched if type(watched) is Watched else []
        rows = self._buffer.rows // self._buffer.num_lanes
        return [((self._buffer.put(batch), kept), 0, rows)]


class DeviceFeed:
    """The host side of a device echo: reads, sends ahead, and decides.

    Attributes:
      buffer: The layout.
      tags: The tags of the latest batches, ``int64[K, B]`` and ``int32[K, B]``.
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        plan: Plan,
        buffer: EchoBuffer,
        *,
        seed: int = 0,
        prefetch: int = 2,
        turn: Turn | None = None,
    ):
        """Allocates the buffer; reads nothing yet.

        Args:
          iterable: Host batches of one size, with a leading axis. What it has
            yielded it must not write to again. With ``get_state`` and ``set_state``
            on its iterator the feed has them too.
          plan: Decides.
          buffer: Laid out for these batches and this plan.
          seed: Of the keys of uses.
          prefetch: Host batches that are read and sent ahead by a thread; 0 reads
            when they are needed.
          turn: Of whoever makes the feed a part of itself; its own by default.

        Raises:
          ValueError: The buffer does not fit.
        """
        self.buffer = buffer
        self.tags: Tags | None = None
        self._plan, self._seed = plan, seed
        self._slots = _Slots(buffer)
        # Any host batch may be the oldest with an item in use.
        reader = Reader(
            iter(iterable),
            anchor=plan.anchor,
            next_anchor=lambda row: row,
            # The thread holds it, so it must not hold the feed.
            intake=_Sender(buffer, self._slots.guard),
            depth=prefetch * buffer.rows // buffer.num_lanes,
        )
        self._driver = Driver(reader, plan, self._slots, turn)

    @property
    def arrays(self) -> Any:
        """The slots.

        The caller passes them to its jitted function, which may take them away, and
        puts back what it returns. `next` may replace them too, so they are read after
        it.
        """
        return self._slots.arrays

    @arrays.setter
    def arrays(self, arrays: Any) -> None:
        self._slots.arrays = arrays

    @property
    def counts(self) -> Counts:
        """Fresh items taken, uses and repeats decided."""
        return self._plan.counts

    @property
    def log(self) -> DecisionLog | None:
        """What an adaptive echo decided so far; None in other modes."""
        return getattr(self._plan, "log", None)

    @property
    def turn(self) -> Turn:
        """See `echo_jax.echo.driver.Driver`."""
        return self._driver.turn

    def next(self, num_batches: int = 1) -> StepInput | None:
        """Decides the next batches, and waits for what they need.

        Args:
          num_batches: K. A stream that ends within K > 1 batches drops their rest.

        Returns:
          The input of the jitted function, None at the end of the stream. The last
          batch of a stream may be smaller.
        """
        with self.turn:
            return self.decide(num_batches)

    def decide(self, num_batches: int) -> StepInput | None:
        """Does what `next` does, within a turn that the caller holds and ends."""
        uses = num_batches * self._plan.batch
        wanted = self._driver.wait(uses)
        self.turn.consistent = False
        self._driver.fill(uses, wanted)
        batches = [self._plan.next(self._plan.batch) for _ in range(num_batches)]
        found = [batch for batch in batches if batch is not None]
        sizes = {batch.repeat.size for batch in found}
        if len(found) < num_batches or len(sizes) > 1:
            return None
        return self._input(found)

    def _input(self, batches: list[BatchIndices]) -> StepInput:
        index, repeat, reads = (
            arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
            for arrays in (
                [batch.fresh_index for batch in batches],
                [batch.repeat for batch in batches],
                [batch.slots for batch in batches],
            )
        )
        rows = (len(batches), -1)
        self.tags = Tags(index.reshape(rows), repeat.reshape(rows))
        seeds = use_seed(self._seed, *self.tags)
        host_batch, write_slots = self._slots.take_waiting()
        return StepInput(
            host_batch,
            write_slots,
            reads.astype(np.int32, copy=False),
            self.tags.repeat,
            seeds.view(np.uint32).reshape(*seeds.shape, 2),
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the state before the next batch.

        Raises:
          TypeError: If the upstream has no get_state and set_state.
        """
        return self._driver.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the feed that gave the state would have.

        What the buffer held is read from the upstream again. A state that is refused
        changes nothing.

        Raises:
          ValueError: If the state is not one of a feed, or if the upstream no longer
            has the items that it had.
        """
        self._driver.set_state(state)
        self.tags = None

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        self._driver.close()


def largest_buffer(
    make_plan: Callable[[int], Plan], num_items: int, num_lanes: int
) -> int:
    """Returns the largest buffer that some memory holds.

    Args:
      make_plan: Makes the plan of a buffer of so many items.
      num_items: Items that fit into the memory, over all lanes.
      num_lanes: Lanes.

    Returns:
      A buffer in items; with it the plan needs at most ``num_items`` slots.

    Raises:
      ValueError: The memory is too small for any.
    """
    # What a plan needs beyond its buffer grows with it.
    needed = make_plan(max(num_items, num_lanes)).num_slots * num_lanes
    buffer = (2 * num_items - needed) // num_lanes * num_lanes
    if buffer < num_lanes:
        raise ValueError(
            f"the memory holds {num_items} items, and the echo needs {needed} "
            "besides its buffer; use more buffer_bytes, or smaller batches"
        )
    return buffer
