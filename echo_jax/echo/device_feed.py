"""The host side of a device echo: reads, sends ahead, and decides."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from echo_jax.echo.counts import UseInfo
from echo_jax.echo.driver import Driver, Turn
from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Plan, Uses
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.reader import ReadAhead, Reader
from echo_jax.echo.source import Element
from echo_jax.echo.spec import AnySpec
from echo_jax.echo.stores.device import EchoBuffer, jitted_write
from echo_jax.echo.stores.leaves import ReuseGuard


class _Slots:
    """The slots of a buffer on the devices, as a store; sends host batches there."""

    # The thread that reads holds it, so it must not hold the feed.
    eager = in_bulk = False

    def __init__(self, buffer: EchoBuffer, lanes: list[int] | slice):
        self.buffer, self._lanes = buffer, lanes
        self.arrays, self._scatter = buffer.init(), jitted_write(buffer)
        self.rewritten_rows = buffer.rows // buffer.num_lanes
        self._guard = ReuseGuard()
        # The slots that were written last, and the batch if it is in host memory.
        self.latest: tuple[np.ndarray, Any] | None = None

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Returns a batch on the devices, with its rows in each lane."""
        (batch,) = values
        leaves = jax.tree.leaves(batch)
        mark = self._guard.mark(leaves)
        if mark is None:
            leaves = []  # The host's arrays are kept only to be checked.
        return (self.buffer.put(batch), leaves, mark), self.rewritten_rows

    def write(self, slots: np.ndarray, taken: list[Element]) -> None:
        slots, rows = slots[self._lanes], self.rewritten_rows
        for number, ((batch, leaves, mark), _, _) in enumerate(taken):
            self._guard.check(leaves, mark)
            into = slots[:, number * rows : (number + 1) * rows]
            # The call transfers the integers: a device_put of them would take longer.
            with jax.transfer_guard_host_to_device("allow"):
                short = self.buffer.shortened(into)
                self.arrays = self._scatter(self.arrays, batch, short)
            sent = jax.tree.leaves(batch)
            on_host = all(type(leaf) is np.ndarray for leaf in sent)
            self.latest = (into.ravel(), batch) if on_host else None

    def clear(self) -> None:
        self.latest = None
        if any(array.is_deleted() for array in jax.tree.leaves(self.arrays)):
            self.arrays = self.buffer.init()  # A failed write has donated them.


class DeviceFeed(Driver):
    """The host side of a device echo: reads, sends ahead, and decides.

    It decides together all batches that follow from the written rows, and hands them
    out as views. It has ``counts``, ``tags`` (``int64[K, B]`` and ``int32[K, B]``),
    ``log``, ``buffer``, ``get_state``, ``set_state`` and ``close`` as the iterator of
    `echo_batches`.
    """

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
        """Allocates the buffer; reads nothing yet.

        Args:
          iterable: Host batches, as `echo_batches` takes them.
          plan: Decides.
          buffer: Laid out for these batches, with any number of slots.
          seed: Seed of the keys of uses; None for an input without keys.
          prefetch: Host batches that a thread reads and sends ahead; see
            `echo_batches`.
          lanes: The plan's lanes that the buffer holds; all by default.
          turn: The turn of an owner that has the feed as a part; its own by default.
          agree: Decides with other processes whether optional rows are taken.

        Raises:
          ValueError: The buffer does not fit.
        """
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
        """The slots, to be read by the caller's jitted function, and never donated.

        `take` may replace them, so read this property after it.
        """
        return self._slots.arrays

    def take(self, num_batches: int = 1) -> np.ndarray | None:
        """Decides the next batches, and waits for the rows that they need.

        Args:
          num_batches: K, at most the plan's ``max_batches``. A stream that ends within
            K > 1 batches drops the last ones.

        Returns:
          The integers of every use, ``int32[K, 2, B]``, lane after lane: the slot in
          its lane, and the number of the use of its item. With a ``seed``
          ``int32[K, 4, B]``, with the two words of its random key, which follow from
          (seed, fresh index, repeat). None at the end of the stream, whose last batch
          may be smaller.

        Raises:
          ValueError: The plan was made for fewer batches.
        """
        most, uses = self.plan.max_batches, num_batches * self.plan.batch
        if not 1 <= num_batches <= most:
            fix = f"Make the plan with max_batches={num_batches}."
            if num_batches < 1 or self.log is not None:
                fix = "Use 1."
            raise ValueError(
                f"num_batches must be 1 to {most}, got {num_batches}. {fix}"
            )
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

    def take_fresh(self, uses: np.ndarray) -> Any:
        """Returns the batch of ``inputs`` from host memory, None if it is not there.

        So a batch of fresh rows in their order waits for no program on a CPU.
        """
        latest, self._slots.latest = self._slots.latest, None
        if latest is None or not np.array_equal(latest[0], uses[0, 0]):
            return None

        def sent(leaf: np.ndarray) -> jax.Array:
            # Of a copy, else the device would use the memory of the loader. A
            # device_put takes twice as long.
            place = leaf.shape, self.buffer.sharding
            return jax.make_array_from_callback(*place, lambda _: leaf.copy())

        with jax.transfer_guard_host_to_device("allow"):
            return jax.tree.map(sent, latest[1])

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


def pack(
    uses: Uses, size: int, seed: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the integers of batches of ``size`` rows a lane, and their tags."""
    rows = min(size, uses.size) or size

    def by_batch(column: np.ndarray) -> np.ndarray:
        parts = column.reshape(len(column), -1, rows).swapaxes(0, 1)
        return np.ascontiguousarray(parts).reshape(-1, len(column) * rows)

    index, repeat = by_batch(uses.fresh_index), by_batch(uses.repeat)
    packed = np.empty((len(index), 2 if seed is None else 4, index.shape[1]), np.int32)
    packed[:, 0], packed[:, 1] = by_batch(uses.slots), repeat
    if seed is not None:
        words = seed_for_use(seed, index, repeat).view(np.int32)
        packed[:, 2:] = words.reshape(*index.shape, 2).swapaxes(1, 2)
    return packed, index, repeat


def plan_of_size(
    spec: AnySpec,
    lanes: Lanes,
    bytes_per_item: int,
    buffer_bytes: int,
    max_batches: int = 1,
) -> Plan:
    """Returns the plan of an echo, with the largest buffer that the memory holds.

    ``buffer_bytes`` are over all lanes; 0 keeps ``spec.buffer``. `DeviceFeed.take` can
    ask for ``max_batches`` together.

    Raises:
      ValueError: The memory is too small for any buffer.
    """

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
