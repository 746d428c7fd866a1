"""The host side of a device echo: reads, sends ahead, and decides."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.driver import Driver, Turn
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.plans.base import BatchIndices, Plan
from echo_jax.echo.processes import Meeting
from echo_jax.echo.reader import ReadAhead, Reader
from echo_jax.echo.source import Element
from echo_jax.echo.stores.device import EchoBuffer, StepInput, jitted_write
from echo_jax.echo.stores.leaves import ReuseGuard, Watched

__all__ = ["DeviceFeed", "largest_buffer"]


class _Slots:
    """The slots of a buffer on the devices, as a store."""

    def __init__(self, buffer: EchoBuffer, lanes: Sequence[int] | None):
        self.buffer, self._lanes = buffer, lanes
        self.guard = ReuseGuard()
        self.rewritten_rows = buffer.rows // buffer.num_lanes
        self.arrays = buffer.init()
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

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns a batch on the devices, with its rows in each lane."""
        (batch,) = values
        watched = self._guard.watch(jax.tree.leaves(batch))
        # The host's arrays are kept only as long as the guard checks them.
        kept = watched if type(watched) is Watched else []
        rows = self._buffer.rows // self._buffer.num_lanes
        return [((self._buffer.put(batch), kept), 0, rows)]


class _Decided(NamedTuple):
    """Batches that are decided: `StepInput.uses`, and tags of ``[K, B]``."""

    uses: np.ndarray
    fresh_index: np.ndarray
    repeat: np.ndarray


_NOTHING = _Decided(*(np.zeros((0, 0), np.int32) for _ in range(3)))


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
          prefetch: Host batches that a thread sends ahead; 0 reads on demand. Another
            thread reads at most two more.
          turn: The turn of an owner that has the feed as a part; its own by default.
          lanes: The plan's lanes that the buffer holds; all by default.
          meeting: The processes that echo together, if there are others.

        Raises:
          ValueError: The buffer does not fit.
        """
        self.buffer = buffer
        self.tags: UseInfo | None = None
        self._plan, self._seed = plan, seed
        self._ahead = plan.batches_ahead * plan.batch
        self._slots, self._lanes = _Slots(buffer, lanes), lanes
        # Sending a batch must not delay the reading of the next.
        self._upstream = ReadAhead(iter(iterable)) if prefetch else None
        reader = Reader(
            self._upstream or iter(iterable),
            # Any host batch may be the oldest one with an item in use.
            anchor=plan.anchor,
            next_anchor=lambda row: row,
            # The thread holds it, so it must not hold the feed.
            intake=_Sender(buffer, self._slots.guard),
            depth=prefetch * buffer.rows // buffer.num_lanes,
        )
        agree = {} if meeting is None else {"agree": meeting.follow_first}
        self._driver = Driver(reader, plan, self._slots, turn, **agree)
        self._turn = self._driver.turn  # held during every call
        self._decided, self._at = _NOTHING, 0  # and its batches handed out

    @property
    def arrays(self) -> Any:
        """The slots, to be read by the caller's jitted function, and never donated.

        `next` may replace them, so read this property after it.
        """
        return self._slots.arrays

    @property
    def counts(self) -> Counts:
        """Fresh items taken, uses and repeats handed out."""
        return self._plan.counts(self._pending)

    @property
    def _pending(self) -> int:
        return (len(self._decided.uses) - self._at) * self._plan.batch

    @property
    def log(self) -> DecisionLog | None:
        """The decisions of an adaptive echo so far; None in other modes."""
        return getattr(self._plan, "log", None)

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
        most = self._plan.max_batches
        with self._turn:
            if 1 <= num_batches <= most:
                return self.decide(num_batches)
        fix = f"Make the plan with max_batches={num_batches}."
        if num_batches < 1:
            fix = "Ask for at least 1."
        elif self.log is not None:
            fix = "An adaptive echo decides one batch at a time."
        raise ValueError(f"num_batches must be 1 to {most}, got {num_batches}. {fix}")

    def decide(self, num_batches: int) -> StepInput | None:
        """Decides like `next`, within a turn that the caller holds and ends."""
        if len(self._decided.uses) < self._at + num_batches:
            self._decide_more(num_batches)
        self._turn.consistent = False
        uses, fresh_index, repeat = self._decided
        if not len(uses):
            return None
        at, end = self._at, self._at + num_batches
        self._at = end
        self.tags = UseInfo(fresh_index[at:end], repeat[at:end])
        return StepInput(uses[at:end])

    def _decide_more(self, num_batches: int) -> None:
        """Decides until ``num_batches`` are ready to be handed out; none at the end."""
        plan, pending = self._plan, self._pending
        uses = num_batches * plan.batch - pending
        wanted = self._driver.wait(uses, pending)
        self._turn.consistent = False
        self._driver.fill(uses, wanted, pending)
        parts = []
        if pending:
            parts = [_Decided(*(column[self._at :] for column in self._decided))]
        left = pending // plan.batch
        while left < num_batches and (found := plan.next(self._ahead)) is not None:
            if self._lanes is not None:
                found = found.of_lanes(self._lanes)
            parts.append(self._cut(found))
            left += len(parts[-1].uses)
        self._decided, self._at = _NOTHING, 0
        if left >= num_batches:
            self._decided = _joined(parts)

    def _cut(self, found: BatchIndices) -> _Decided:
        """Cuts uses of lanes into batches, lane after lane."""
        lanes, size = found.repeat.shape
        count = max(1, size // self._plan.batch)

        def by_batch(column: np.ndarray) -> np.ndarray:
            if count > 1:
                parts = column.reshape(lanes, count, -1).swapaxes(0, 1)
                column = np.ascontiguousarray(parts)
            return column.reshape(count, -1)

        index, repeat = by_batch(found.fresh_index), by_batch(found.repeat)
        columns = 2 if self._seed is None else 4
        uses = np.empty((count, columns, index.shape[1]), np.int32)
        uses[:, 0], uses[:, 1] = by_batch(found.slots), repeat
        if self._seed is not None:
            seeds = seed_for_use(self._seed, index, repeat)
            words = seeds.view(np.int32).reshape(*seeds.shape, 2)
            uses[:, 2], uses[:, 3] = words[..., 0], words[..., 1]
        return _Decided(uses, index, repeat)

    def get_state(self) -> dict[str, Any]:
        """Returns the state before the next batch.

        Raises:
          TypeError: The upstream has no get_state and set_state.
        """
        return self._driver.get_state(self._pending)

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
        self._driver.set_state(state)
        self._decided, self._at = _NOTHING, 0
        self.tags = None

    def hold(self, host_batch: Any) -> StepInput:
        """Returns an input of the first slots; writes a batch there if nothing is."""
        lanes, rows = self.buffer.num_lanes, self.buffer.rows // self.buffer.num_lanes
        slots = np.tile(np.arange(rows, dtype=np.int32), (lanes, 1))
        if self._slots.untouched:
            sent = self.buffer.put(host_batch)
            self._slots.write(slots, [((sent, []), 0, rows)])
        index = np.arange(slots.size).reshape(slots.shape)
        return StepInput(
            self._cut(BatchIndices(slots, index, np.zeros_like(slots))).uses
        )

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use."""
        if self._upstream is not None:
            self._upstream.close()
        self._driver.close()


def _joined(parts: list[_Decided]) -> _Decided:
    """Joins batches into one record; returns no batch if the last one is smaller."""
    if len(parts) == 1:
        return parts[0]
    if len({part.repeat.shape[1] for part in parts}) > 1:
        return _NOTHING
    return _Decided(*map(np.concatenate, zip(*parts, strict=True)))


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
