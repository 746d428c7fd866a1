"""The echo in your own step: pure functions over integers that are made before it."""

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.echo.keys import seed_for_use
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Uses, outputs_of
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, completed
from echo_jax.echo.stats import UseInfo
from echo_jax.echo.stores.batches import check_lists
from echo_jax.echo.stores.device import Augment, EchoBuffer, default_mesh


@dataclass(frozen=True)
class StepEcho:
    """An echo inside your own jitted step, without a thread or an iterator.

    `decide` makes the integers of all training batches before training. In the step
    `write` puts fresh rows into slots, and `read` gathers the batch. Both are pure
    functions, for ``jax.jit``, ``jax.lax.scan``, ``jax.checkpoint`` and your own
    ``jax.shard_map``. Batches, keys and tags equal `echo_batches` with
    ``drop_remainder=True``, bit for bit.

    It can be a static argument of ``jax.jit``; another seed or log makes an equal echo.
    On several devices split the slots and a batch's integers along their first axis and
    ``fresh`` along its second. A mesh of explicit axes needs a ``jax.shard_map``.

    Attributes:
      buffer: The layout of the slots.
      size: Rows of a training batch in a lane, B / G.
      spec: The spec, which alone is not compared.

    Example:
      >>> from echo_jax import EchoSpec
      >>> fresh = {"x": np.arange(8).reshape(2, 4)}
      >>> echo = StepEcho.of({"x": fresh["x"][0]}, EchoSpec(2, batch_size=4))
      >>> integers, taken, tags = echo.decide(num_host_batches=2)
      >>> taken.tolist()
      [1, 0, 1, 0]
      >>> def step(arrays, inputs):
      ...     arrays = echo.write(arrays, fresh, *inputs)
      ...     return arrays, echo.read(arrays, inputs[0])["x"]
      >>> inputs = (integers, np.cumsum(taken) - taken)
      >>> jax.lax.scan(step, echo.init(), inputs)[1].tolist()
      [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5], [6, 6, 7, 7]]
    """

    buffer: EchoBuffer
    size: int
    spec: AnySpec = field(compare=False)

    @classmethod
    def of(cls, batch: Any, spec: AnySpec, num_lanes: int = 1) -> "StepEcho":
        """Lays out the slots of an echo.

        Args:
          batch: A host batch of U rows: a pytree of arrays with a leading axis.
          spec: Description of the echo. An `AdaptiveSpec` needs the log of an earlier
            echo, and ends with it.
          num_lanes: Independent parts of the slots, G: a multiple of the devices.

        Raises:
          ValueError: The spec is adaptive and has no log, the buffer is too small, the
            lanes do not divide a batch, or a device cannot hold it.
        """
        if isinstance(spec, AdaptiveSpec) and not spec.replay:
            raise ValueError(
                "an adaptive echo decides by the data that is ready in training. Use "
                "AdaptiveSpec(replay=batches.log), of an earlier echo, or an EchoSpec."
            )
        spec = completed(spec)
        check_lists(batch, 0)
        buffer = EchoBuffer.of(batch, num_lanes=num_lanes, mesh=default_mesh(1))
        plan = make_plan(spec, lanes=Lanes(buffer.rows, buffer.num_lanes))
        return cls(replace(buffer, num_slots=plan.num_slots), plan.batch, spec)

    def decide(self, num_host_batches: int) -> tuple[np.ndarray, np.ndarray, UseInfo]:
        """Decides all training batches of a stream that begins with empty slots.

        Args:
          num_host_batches: Host batches of the stream, or as many as are needed of it.

        Returns:
          The integers of N batches, ``int32[N, G, W]``, which ``np.save`` can keep; how
          many host batches each of them takes, ``int64[N]``; and the tags of their
          rows, ``int64[N, B]`` and ``int32[N, B]``.
        """
        spec, size, num_slots = self.spec, self.size, self.buffer.num_slots
        lanes = Lanes(self.buffer.rows, self.buffer.num_lanes)
        total, plan = num_host_batches * lanes.rows, make_plan(spec, lanes=lanes)
        end = len(spec.replay or ()) if isinstance(spec, AdaptiveSpec) else None
        fresh, writes, uses = [], [], [Uses.none(lanes.count)]
        for slots, batch in itertools.islice(outputs_of(plan, total, size), end):
            fresh.append(slots)
            if batch.size == size:
                writes.append(np.concatenate(fresh, axis=1))
                uses.append(batch)
                fresh = []
        columns = [(each.slots, each.fresh_index, each.repeat) for each in uses]
        joined = [np.concatenate(each, axis=1) for each in zip(*columns, strict=True)]
        packed, *tags = pack(Uses(*joined), size, spec.seed)
        packed = packed.reshape(-1, 4, lanes.count, size).swapaxes(1, 2)
        taken = np.array([each.shape[1] // lanes.rows for each in writes], np.int64)
        most = lanes.rows * int(taken.max(initial=1))
        shape = (len(taken), lanes.count, most + 4 * size)
        integers = np.full(shape, num_slots, np.int32)
        for number, into in enumerate(writes):
            integers[number, :, : into.shape[1]] = into
        integers[..., most:] = packed.reshape(len(taken), lanes.count, 4 * size)
        return integers, taken, UseInfo(*tags)

    def init(self) -> Any:
        """Returns empty slots, arrays ``[G, ...]``; may be traced."""
        return self.buffer.zeros()

    def write(self, arrays: Any, fresh: Any, integers: Any, first: Any = 0) -> Any:
        """Returns the slots with the fresh rows that a batch takes; to be traced.

        Args:
          arrays: The slots, from `init` or from the batch before, donated to the step.
          fresh: Host batches, leaves ``[n, U, ...]``. Those that are not taken are
            dropped, so a step that takes none can be given an earlier stack.
          integers: Those of the batch, ``int32[G, W]``.
          first: The position in ``fresh`` of the first host batch that is taken.

        Raises:
          ValueError: The host batches are not like the one given to `of`.
        """
        slots = integers[:, : -4 * self.size]
        lanes, rows = len(slots), self.buffer.rows // self.buffer.num_lanes
        count = slots.shape[1] // rows
        self.buffer.checked(jax.tree.map(lambda leaf: leaf[0], fresh), lanes * rows)

        def by_lane(leaf: Any) -> jax.Array:
            # Positions after the last host batch are of those that are not taken.
            leaf = jnp.take(leaf, first + jnp.arange(count), axis=0, mode="clip")
            leaf = leaf.reshape(count, lanes, rows, *leaf.shape[2:])
            return leaf.swapaxes(0, 1).reshape(slots.size, *leaf.shape[3:])

        return self.buffer.write_lanes(arrays, jax.tree.map(by_lane, fresh), slots)

    def read(self, arrays: Any, integers: Any, augment: Augment | None = None) -> Any:
        """Returns a training batch, ``[B, ...]``, lane after lane; to be traced.

        Args:
          arrays: The slots, from `write`.
          integers: Those of the batch, ``int32[G, W]``.
          augment: A pure function ``(batch, keys) -> batch``, with a key for every row.
        """
        slots = integers[:, -4 * self.size : -3 * self.size]
        batch = self.buffer.read_lanes(arrays, slots)
        return batch if augment is None else augment(batch, self.keys(integers))

    def repeats(self, integers: Any) -> Any:
        """Returns the number of the use of its item for every row, ``int32[B]``."""
        return integers[:, -3 * self.size : -2 * self.size].reshape(-1)

    def keys(self, integers: Any) -> jax.Array:
        """Returns the random key of every row, ``key[B]``."""
        words = integers[:, -2 * self.size :].reshape(len(integers), 2, self.size)
        return self.buffer.keys(words.swapaxes(1, 2).reshape(-1, 2))


def pack(
    uses: Uses, size: int, seed: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the integers of batches of ``size`` rows a lane, and their tags."""
    rows = min(size, uses.size) or size

    def by_batch(column: np.ndarray) -> np.ndarray:
        if len(column) == 1:
            return column.reshape(-1, rows)
        parts = column.reshape(len(column), -1, rows).swapaxes(0, 1)
        return np.ascontiguousarray(parts).reshape(-1, len(column) * rows)

    index, repeat = by_batch(uses.fresh_index), by_batch(uses.repeat)
    packed = np.empty((len(index), 2 if seed is None else 4, index.shape[1]), np.int32)
    packed[:, 0], packed[:, 1] = by_batch(uses.slots), repeat
    if seed is not None:
        words = seed_for_use(seed, index, repeat).view(np.int32)
        packed[:, 2:] = words.reshape(*index.shape, 2).swapaxes(1, 2)
    return packed, index, repeat
