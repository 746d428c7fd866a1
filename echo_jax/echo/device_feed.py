"""The host side of a device echo: reads, sends ahead, and decides."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.driver import Driver, Turn
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.plans.base import Plan, Uses
from echo_jax.echo.processes import Meeting
from echo_jax.echo.reader import ReadAhead, Reader
from echo_jax.echo.source import Element
from echo_jax.echo.stores.device import EchoBuffer, StepInput, jitted_put, jitted_write
from echo_jax.echo.stores.leaves import ReuseGuard, Watched

__all__ = ["DeviceFeed", "largest_buffer"]


class _Slots:
    """The slots of a buffer on the devices, as a store."""

    def __init__(self, buffer: EchoBuffer, lanes: Sequence[int] | None):
        self.buffer, self._lanes = buffer, lanes
        self.guard = ReuseGuard()
        self.rewritten_rows = buffer.rows // buffer.num_lanes
        self.arrays = buffer.init()
        self.eager = False
        self.untouched = True
        self._scatter = jitted_write(buffer)

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        self.untouched, at = False, 0
        if self._lanes is not None:
            slots = slots[list(self._lanes)]
        for (host_batch, leaves), first, end in taken:
            self.guard.check(leaves)
            into = slots[:, at : at + end - first]
            # The call transfers the integers: a device_put of them would take longer.
            with jax.transfer_guard_host_to_device("allow"):
                self.arrays = self._scatter(self.arrays, host_batch, into)
            at += end - first

    # Rows whose slot is out of range are dropped by every write.
    rewrite = write

    def clear(self) -> None:
        if any(array.is_deleted() for array in jax.tree.leaves(self.arrays)):
            self.arrays = self.buffer.init()  # A failed write has donated them.


class _Sender:
    """Starts the transfer of host batches."""

    in_bulk = False

    def __init__(self, buffer: EchoBuffer, guard: ReuseGuard):
        self._buffer, self._guard = buffer, guard
        self._send = jitted_put(buffer)

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns a batch on the devices, with its rows in each lane."""
        (batch,) = values
        watched = self._guard.watch(jax.tree.leaves(batch))
        # The host's arrays are kept only as long as the guard checks them.
        kept = watched if type(watched) is Watched else []
        if self._buffer.is_known(batch):
            with jax.transfer_guard_host_to_device("allow"):
                sent = self._send(batch)
        else:
            sent = self._buffer.put(batch)
        rows = self._buffer.rows // self._buffer.num_lanes
        return [((sent, kept), 0, rows)]


class DeviceFeed:
    """The host side of a device echo: reads, sends ahead, and decides.

    It decides together all batches that follow from the written rows, and hands them
    out as views.

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
        seed: int | None = 0,
        prefetch: int = 2,
        turn: Turn | None = None,
        lanes: Sequence[int] | None = None,
        meeting: Meeting | None = None,
    ):
        """Allocates the buffer; reads nothing yet.

        Args:
          iterable: Host batches of one size, with a leading axis. It must not write to
            a batch after it has yielded it. The feed has ``get_state`` and
            ``set_state`` if its iterator has both.
          plan: Decides.
          buffer: Laid out for these batches and this plan.
          seed: Seed of the keys of uses; None for an input without keys.
          prefetch: Host batches that a thread reads and sends ahead; 0 reads on demand.
            For several devices, another thread reads at most two more.
          turn: The turn of an owner that has the feed as a part; its own by default.
          lanes: The plan's lanes that the buffer holds; all by default.
          meeting: The processes that echo together, if there are others.

        Raises:
          ValueError: The buffer does not fit.
        """
        self.buffer = buffer
        self.tags: UseInfo | None = None
        self._plan, self._seed = plan, seed
        self._slots, self._lanes = _Slots(buffer, lanes), lanes
        # Sending a batch to several devices takes long, and must not delay the reading
        # of the next.
        is_slow = prefetch and buffer.mesh.size > 1
        self._upstream = ReadAhead(iter(iterable)) if is_slow else None
        reader = Reader(
            self._upstream or iter(iterable),
            # Any host batch may be the oldest one with an item in use.
            next_anchor=lambda row: row,
            # The thread holds it, so it must not hold the feed.
            intake=_Sender(buffer, self._slots.guard),
            depth=prefetch * buffer.rows // buffer.num_lanes,
        )
        agree = {} if meeting is None else {"agree": meeting.follow_first}
        self.driver = Driver(reader, plan, self._slots, turn, **agree)
        # The decided uses, by batch: for `StepInput`, and their tags.
        self._uses: Uses | None = None
        self._packed, self._tags = np.zeros((0, 2, 0), np.int32), []

    @property
    def arrays(self) -> Any:
        """The slots, to be read by the caller's jitted function, and never donated.

        `next` may replace them, so read this property after it.
        """
        return self._slots.arrays

    @property
    def counts(self) -> Counts:
        """Fresh items taken, uses and repeats handed out."""
        return self.driver.counts

    @property
    def log(self) -> DecisionLog | None:
        """The decisions of an adaptive echo so far; None in other modes."""
        return self.driver.log

    def next(self, num_batches: int = 1) -> StepInput | None:
        """Decides the next batches, and waits for the rows that they need.

        Args:
          num_batches: K, at most the plan's ``max_batches``. A stream that ends within
            K > 1 batches drops the last ones.

        Returns:
          The input of the jitted function, None at the end of the stream. The last
          batch of a stream may be smaller.

        Raises:
          ValueError: The plan was made for fewer batches.
        """
        most, uses = self._plan.max_batches, num_batches * self._plan.batch
        if 1 <= num_batches <= most:
            with self.driver.turn:
                found = self.driver.next(uses)
                if found is None or (num_batches > 1 and found[1] - found[0] < uses):
                    return None
                inputs, self.tags = self.inputs(*found)
                return inputs
        fix = f"Make the plan with max_batches={num_batches}."
        if num_batches < 1:
            fix = "Ask for at least 1."
        elif self.log is not None:
            fix = "An adaptive echo decides one batch at a time."
        raise ValueError(f"num_batches must be 1 to {most}, got {num_batches}. {fix}")

    def inputs(self, at: int, stop: int) -> tuple[StepInput, UseInfo]:
        """Returns the input and the tags of uses that the driver has decided."""
        size = self._plan.batch
        if self.driver.uses is not self._uses:
            self._uses = self.driver.uses
            self._packed, *self._tags = self._pack(self._uses)
        batches = slice(at // size, -(-stop // size))
        index, repeat = self._tags
        tags = UseInfo(index[batches], repeat[batches])
        return StepInput(self._packed[batches]), tags

    def _pack(self, uses: Uses) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns `StepInput.uses` of all batches, and their tags, ``[K, B]``."""
        if self._lanes is not None:
            uses = uses[list(self._lanes)]
        count = max(1, uses.size // self._plan.batch)

        def by_batch(column: np.ndarray) -> np.ndarray:
            parts = column.reshape(len(column), count, -1)
            return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(count, -1)

        index, repeat = by_batch(uses.fresh_index), by_batch(uses.repeat)
        columns = 2 if self._seed is None else 4
        packed = np.empty((count, columns, index.shape[1]), np.int32)
        packed[:, 0], packed[:, 1] = by_batch(uses.slots), repeat
        if self._seed is not None:
            words = seed_for_use(self._seed, index, repeat).view(np.int32)
            words = words.reshape(*index.shape, 2)
            packed[:, 2], packed[:, 3] = words[..., 0], words[..., 1]
        return packed, index, repeat

    def get_state(self) -> dict[str, Any]:
        """Returns the state before the next batch.

        Raises:
          TypeError: The upstream has no get_state and set_state.
        """
        return self.driver.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the feed that returned the state would have.

        It reads the content of the buffer from the upstream again. A refused state
        changes nothing.

        Args:
          state: From `get_state`.

        Raises:
          ValueError: The state is not one of a feed, or the upstream no longer has the
            items that it had.
        """
        self.driver.set_state(state)
        self.tags = None

    def hold(self, host_batch: Any) -> StepInput:
        """Returns an input of the first slots; writes a batch there if nothing is."""
        lanes, rows = self.buffer.num_lanes, self.buffer.rows // self.buffer.num_lanes
        slots = np.tile(np.arange(rows, dtype=np.int32), (lanes, 1))
        if self._slots.untouched:
            sent = self.buffer.put(host_batch)
            self._slots.write(slots, [((sent, []), 0, rows)])
        index = np.arange(slots.size).reshape(slots.shape)
        return StepInput(self._pack(Uses(slots, index, np.zeros_like(slots)))[0])

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        if self._upstream is not None:
            self._upstream.close()
        self.driver.close()


def largest_buffer(
    make_plan: Callable[[int], Plan], num_items: int, num_lanes: int
) -> int:
    """Returns the largest buffer that fits into some memory.

    Args:
      make_plan: Makes a plan from the buffer size in items.
      num_items: Items that fit into the memory, over all lanes.
      num_lanes: Lanes.

    Returns:
      A buffer in items; with it the plan needs at most ``num_items`` slots.

    Raises:
      ValueError: The memory is too small for any buffer.
    """
    # The slots that a plan needs beyond its buffer grow with it.
    needed = make_plan(max(num_items, num_lanes)).num_slots * num_lanes
    buffer = (2 * num_items - needed) // num_lanes * num_lanes
    if buffer < num_lanes:
        raise ValueError(
            f"the memory holds {num_items} items, and the echo needs {needed} "
            "besides its buffer; use more buffer_bytes, or smaller batches"
        )
    return buffer
