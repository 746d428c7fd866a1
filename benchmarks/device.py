"""The buffer in accelerator memory: speed, memory, and bytes that cross to it."""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import echo_jax as ej
from benchmarks.harness import Result
from echo_jax.echo.device import DeviceFeed, EchoBuffer
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.base import Uses, outputs_of
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.stores.device import jitted_write
from echo_jax.echo.upstream import ReadAhead

_FACTOR = 4
_BATCH = 128
_CAPACITY = 8192
_STEPS = 64


def host_batches(
    rows: int, shape: tuple[int, ...] = (32, 32, 3), count: int = 4
) -> Iterator[dict[str, np.ndarray]]:
    """Yields the same few batches of random images for ever."""
    rng = np.random.default_rng(0)
    batches = [
        {
            "image": rng.integers(0, 256, (rows, *shape), np.uint8),
            "label": rng.integers(0, 10, rows, np.int32),
        }
        for _ in range(count)
    ]
    return itertools.cycle(batches)


def make_feed(
    spec: ej.EchoSpec,
    source: Iterator[Any],
    *,
    num_lanes: int = 0,
    max_batches: int = 1,
    **options: Any,
) -> DeviceFeed:
    """Makes a feed for some batches, on all devices; 0 lanes: one for each of them."""
    source = ReadAhead(source, depth=0)
    first = source.peek()
    rows = len(jax.tree.leaves(first)[0])
    buffer = EchoBuffer.of(first, num_lanes=num_lanes)
    lanes = Lanes(rows, buffer.num_lanes)
    plan = make_plan(spec, lanes=lanes, max_batches=max_batches)
    return DeviceFeed(source, plan, buffer, **options)


class Exchange:
    """Draws that are decided beforehand, for what the devices do alone.

    Attributes:
      buffer: Its layout.
      batch: The host batch that every insertion writes.
      arrays: The slots.
      picks: The slots that every draw reads.
    """

    def __init__(
        self, spec: ej.EchoSpec, batch: Any, num_draws: int, *, transfers: bool = False
    ):
        """Fills the buffer, and decides draws; transfers the batch for every write."""
        rows = len(jax.tree.leaves(batch)[0])
        plan = make_plan(spec, lanes=Lanes(rows, jax.device_count()))
        self.buffer = EchoBuffer.of(batch, num_slots=plan.num_slots)
        self.batch = jax.device_put(batch, self.buffer.sharding)
        self.arrays = self.buffer.init()
        self._to_transfer = batch if transfers else None
        self._write, self._read = jitted_write(self.buffer), jax.jit(self.buffer.draw)
        outputs = outputs_of(plan, sys.maxsize, plan.batch)
        while plan.row < spec.buffer // self.buffer.num_lanes:
            next(outputs)
        decided = [self._decided(*next(outputs)) for _ in range(num_draws)]
        self._draws = itertools.cycle(decided)
        self.picks = [inputs[0, 0] for _, inputs in decided]

    def _decided(
        self, slots: np.ndarray, found: Uses
    ) -> tuple[list[np.ndarray], np.ndarray]:
        rows = self.buffer.rows // self.buffer.num_lanes
        columns = [found.slots.reshape(-1), found.repeat.reshape(-1)]
        writes = [slots[:, at : at + rows] for at in range(0, slots.shape[1], rows)]
        return writes, np.stack(columns)[None]

    def __call__(self) -> Any:
        """Returns the next batch, having written what it needs."""
        writes, inputs = next(self._draws)
        for slots in writes:
            batch = self.batch
            if self._to_transfer is not None:
                batch = jax.device_put(self._to_transfer, self.buffer.sharding)
            self.arrays = self._write(self.arrays, batch, slots)
        return self._read(self.arrays, inputs)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, list]:
    """Seconds of each call, in turn, so that all see the same machine."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def p7() -> list[Result]:
    """Insert and draw in one step, beside flashbax and beside a raw gather."""
    import flashbax

    spec = ej.EchoSpec(_FACTOR, _CAPACITY, "window_shuffle", _BATCH)
    exchange = Exchange(spec, next(host_batches(_BATCH)), _STEPS)

    # Every draw is waited for, as the step that needs it does: draws without an
    # insertion would else run beside each other, on as many cores.
    def draw_all():
        for _ in range(_STEPS):
            jax.block_until_ready(exchange())

    gather = jax.jit(lambda rows, at: jax.tree.map(lambda x: x[at], rows))
    rows = jax.tree.map(
        lambda x: jnp.copy(x.reshape(-1, *x.shape[2:])), exchange.arrays
    )

    def gather_all():
        for pick in exchange.picks:
            jax.block_until_ready(gather(rows, pick))

    peer = flashbax.make_item_buffer(
        max_length=_CAPACITY, min_length=1, sample_batch_size=_BATCH, add_batches=True
    )
    part = jax.tree.map(lambda x: x[: _BATCH // _FACTOR], exchange.batch)
    step = jax.jit(
        lambda state, part, key: (
            lambda state: (state, peer.sample(state, key).experience)
        )(peer.add(state, part)),
        donate_argnums=0,
    )
    state = peer.init(jax.tree.map(lambda x: x[0], part))
    keys = list(jax.random.split(jax.random.key(0), _STEPS))
    holder = [state]

    def flashbax_all():
        for key in keys:
            holder[0], batch = step(holder[0], part, key)
            jax.block_until_ready(batch)

    for _ in range(_CAPACITY // _STEPS):
        flashbax_all()
    times = in_turns(
        {"ours": draw_all, "raw": gather_all, "flashbax": flashbax_all}, 15
    )
    title = "insert and draw of 128 of 8192 CIFAR-shaped items, e=4"
    return [
        _ratio("P7", title, times["flashbax"], times["ours"], ">= 1.8", "flashbax"),
        _ratio(
            "P7-gather",
            f"{title}, against a gather alone",
            times["ours"],
            times["raw"],
            "<= 1.2",
            "a raw gather from a device array",
            "ours also inserts a fresh batch at every fourth draw",
        ),
    ]


def _ratio(
    id_: str,
    title: str,
    above: list[float],
    below: list[float],
    goal: str,
    peer: str,
    note: str = "",
) -> Result:
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    value = statistics.median(ratios)
    return Result(id_, title, value, goal, "x", peer, ratios, note)


def draw() -> list[Result]:
    """Host time of a draw of `ej.device.echo_batches` as a user calls it."""
    fixed = ej.EchoSpec(_FACTOR, _CAPACITY, "spread", _BATCH)
    # It takes something fresh as often as the fixed one does.
    log = ej.DecisionLog(([True] + [False] * (_FACTOR - 1)) * _CAPACITY)
    adaptive = ej.AdaptiveSpec(2 * _FACTOR, _CAPACITY, _BATCH, replay=log)
    return [
        _host_time("draw", fixed, fixed, 40),
        _host_time("draw-adaptive", adaptive, fixed, 60),
    ]


def _host_time(id_: str, spec: Any, same: ej.EchoSpec, goal: int) -> Result:
    """Microseconds of a blocked draw beyond what the devices do for it.

    That is to transfer fresh batches, to write them and to read the draw's.

    Args:
      id_: The result's.
      spec: The echo.
      same: One that writes and reads as often.
      goal: In microseconds.
    """
    batches = ej.device.echo_batches(host_batches(_BATCH), spec)
    with batches:
        while batches.counts.fresh < _CAPACITY:
            jax.block_until_ready(next(batches))
        exchange = Exchange(same, next(host_batches(_BATCH)), _STEPS, transfers=True)

        def draw_all():
            for _ in range(_STEPS):
                jax.block_until_ready(next(batches))

        def exchange_all():
            for _ in range(_STEPS):
                jax.block_until_ready(exchange())

        times = in_turns({"echo": draw_all, "devices": exchange_all}, 15)
    values = [
        1e6 * (echo - devices) / _STEPS
        for echo, devices in zip(*times.values(), strict=True)
    ]
    whole, alone = (1e6 * statistics.median(each) / _STEPS for each in times.values())
    return Result(
        id_,
        f"host time of a draw of ej.device.echo_batches, {type(spec).__name__}",
        statistics.median(values),
        f"<= {goal}",
        "us",
        "jax.device_put of what is fresh, and the jitted write and read alone",
        values,
        f"an absolute time; 128 of 8192 CIFAR-shaped items, blocked; a draw takes "
        f"{whole:.0f} us, the devices' part alone {alone:.0f}",
    )


def p8() -> list[Result]:
    """What an insertion costs as the buffer grows, and what memory it takes."""
    title = "insert of 128 items into {:,} slots / into {:,}"
    peer = "itself at 1/64 of the capacity"
    results = []
    # Rows written all over a buffer miss a cache that it does not fit into, however
    # they are written: what the buffer's size itself costs shows beyond the cache.
    for id_, small, note in (
        ("P8", 16 * 1024, "both buffers are larger than the cache"),
        ("P8-cache", 1024, "the smaller one lies in the cache"),
    ):
        large = 64 * small
        inserts = {size: _Inserts(size) for size in (small, large)}
        times = in_turns({str(size): each for size, each in inserts.items()}, 15)
        name = title.format(large, small)
        found = (times[str(large)], times[str(small)])
        results.append(_ratio(id_, name, *found, "<= 1.2", peer, note))
    buffer = inserts[large].buffer
    taken, not_donated = (
        _peak_bytes(inserts[large], donate) / buffer.num_bytes for donate in (0, ())
    )
    results.append(
        Result(
            "P8-memory",
            "peak bytes of an insert / bytes of the buffer",
            taken,
            "<= 1.1",
            "x",
            f"not donated: {not_donated:.2f}",
            [taken],
            "as the compiler plans it",
        )
    )
    return results


class _Inserts:
    """Insertions of one batch at random places of a buffer."""

    def __init__(self, size: int):
        batch = next(host_batches(_BATCH))
        self.buffer = EchoBuffer.of(batch, num_slots=size)
        self.arrays = self.buffer.init()
        self.batch = jax.device_put(batch, self.buffer.sharding)
        rng = np.random.default_rng(0)
        self.slots = [
            rng.choice(size, _BATCH, replace=False)
            .reshape(self.buffer.num_lanes, -1)
            .astype(np.int32)
            for _ in range(_STEPS)
        ]

    def __call__(self) -> Any:
        write = jitted_write(self.buffer)
        for slots in self.slots:
            self.arrays = write(self.arrays, self.batch, slots)
        return self.arrays


def _peak_bytes(inserts: _Inserts, donate: Any) -> int:
    """What an insertion takes at most, its arguments and results included."""
    jitted = jax.jit(inserts.buffer.write, donate_argnums=donate)
    lowered = jitted.lower(inserts.arrays, inserts.batch, inserts.slots[0])
    memory = lowered.compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def p10() -> Result:
    """Bytes that cross to the accelerator for each step, echo against no echo."""

    def bytes_per_step(spec: ej.EchoSpec) -> float:
        sent = [0.0]
        source = host_batches(_BATCH)

        def counted() -> Iterator[Any]:
            for batch in source:
                sent[0] += sum(leaf.nbytes for leaf in batch.values())
                yield batch

        feed = make_feed(spec, counted(), prefetch=0)
        steps = 400
        for at in range(-steps, steps):
            if at == 0:  # warm
                sent[0] = 0
            before = feed.arrays
            inputs = feed.take()
            assert inputs is not None
            sent[0] += inputs.nbytes
            if feed.arrays is not before:  # The slots that were written.
                sent[0] += 4 * _BATCH
        return sent[0] / steps

    echoed = bytes_per_step(ej.EchoSpec(_FACTOR, 2048, "spread", _BATCH))
    item = sum(leaf[0].nbytes for leaf in next(host_batches(_BATCH)).values())
    value = echoed / (item * _BATCH)
    return Result(
        "P10",
        "host-to-device bytes per step, e=4 / without echo",
        value,
        "<= 0.27",
        "x",
        "a batch of 128 CIFAR-shaped items per step",
        [value],
        "counted: batches, slots, repeats and keys",
    )
