"""The echo in accelerator memory: the laws on one device, lanes on eight."""

import itertools
import json
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from echo_cases import MODES, ORDERS, Fetched, item_of, mesh_of, spec_of
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, assert_echo_laws
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.lanes import Lanes, lane_spec

LANES = 8


@pytest.fixture(autouse=True)
def _no_implicit_transfers():
    """In all threads: those of the echo, and those of a law. Tests read what comes."""
    for way in ("host_to_device", "device_to_device"):
        jax.config.update(f"jax_transfer_guard_{way}", "disallow")
    yield
    for way in ("host_to_device", "device_to_device"):
        jax.config.update(f"jax_transfer_guard_{way}", None)


class Chunks(CountingUpstream):
    """Batches of integers that count up, with a few bytes beside each."""

    def __init__(self, num_batches, rows=16):
        super().__init__(range(num_batches))
        self.rows = rows

    def __next__(self):
        first = super().__next__() * self.rows
        index = np.arange(first, first + self.rows, dtype=np.int32)
        pixels = np.repeat(index[:, None], 5, axis=1).astype(np.uint8)
        return {"index": index, "pixels": pixels}


@pytest.mark.parametrize(
    ("order", "factor", "num_items"),
    [
        *zip(ORDERS, ["2", "1.15", "4", "1.15"], [8, 6, 6, 8], strict=True),
        ("window_shuffle", "4", 0),
        ("spread", "4", 1),
    ],
)
def test_laws_on_one_device(order, factor, num_items):
    # A fresh echo reads the first host batch to lay its buffer out.
    most = 2 if order == "consecutive" else None
    options = {"num_items": num_items, "max_rereads": most}
    assert_echo_laws(Fetched, spec_of(order, factor), make_item=item_of, **options)


@pytest.mark.parametrize("mode", MODES)
def test_laws_of_the_other_modes(mode):
    assert_echo_laws(
        lambda upstream, spec: Fetched(upstream, spec, prefetch=2),
        MODES[mode],
        num_items=12,
        make_item=item_of,
        # Two batches that are sent ahead, one that is being sent, two behind that.
        read_ahead=5 * 4,
    )


@pytest.mark.parametrize("order", ["shuffle_buffer", "spread"])
def test_uses_are_those_of_the_host_echo_of_every_lane(order):
    spec = ej.EchoSpec(2.5, 256, order, 32, seed=7)
    with_lanes = ej.device.echo_batches(
        Chunks(12), spec, mesh=mesh_of(LANES), tags=True
    )
    got = [[] for _ in range(LANES)]
    for batch, tags in with_lanes:
        assert np.array_equal(batch["index"], tags.fresh_index)
        pixels = jax.device_get(batch["pixels"])
        assert np.array_equal(pixels[:, 3], tags.fresh_index % 256)
        for lane, index in enumerate(tags.fresh_index.reshape(LANES, -1)):
            got[lane] += index.tolist()
    for lane in range(LANES):
        items = [16 * k + 2 * lane + row for k in range(12) for row in range(2)]
        assert got[lane] == list(ej.echo(items, lane_spec(spec, lane, LANES)))


def test_the_same_lanes_on_fewer_devices_give_the_same_batches():
    spec = ej.EchoSpec(1.5, 128, "window_shuffle", 32, seed=1)
    runs = [
        [
            np.asarray(batch["pixels"])
            for batch in ej.device.echo_batches(
                Chunks(8), spec, mesh=mesh_of(num_devices), num_lanes=LANES
            )
        ]
        for num_devices in (1, 2, 8)
    ]
    for batches in runs[1:]:
        assert all(map(np.array_equal, runs[0], batches))
        assert len(batches) == len(runs[0]) == 6


def noisy_batches(**options):
    def noisy(batch, keys):
        noise = jax.vmap(lambda key: jax.random.bits(key, (5,), np.uint8))(keys)
        return {**batch, "pixels": batch["pixels"] ^ noise}

    spec = ej.EchoSpec(1.5, 64, "spread", 32, seed=1)
    options = {"num_lanes": 4, "augment": noisy, **options}
    return ej.device.echo_batches(Chunks(8), spec, **options)


@pytest.fixture(scope="module")
def on_one_device():
    return [*map(jax.device_get, noisy_batches(mesh=mesh_of(1)))]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    ("shape", "axes", "rows"),
    [
        ((4,), ("data",), "data"),
        ((2, 2), ("data", "model"), "data"),
        ((2, 2), ("data", "fsdp"), ("data", "fsdp")),
        ((2, 2), ("model", "data"), "data"),  # whose neighbours hold other rows
    ],
)
def test_batches_have_the_sharding_that_is_asked_for(
    shape, axes, rows, kind, on_one_device
):
    mesh = jax.make_mesh(shape, axes, (kind,) * len(axes), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(rows))
    with jax.set_mesh(mesh):
        step = jax.jit(lambda batch: batch["index"] + 1, in_shardings=sharding)
        on_four = noisy_batches(sharding=sharding)
        for expected, batch in zip(on_one_device, on_four, strict=True):
            assert all(leaf.sharding == sharding for leaf in batch.values())
            np.testing.assert_array_equal(step(batch), expected["index"] + 1)
            for name, leaf in batch.items():
                for shard in leaf.addressable_shards:
                    own = expected[name][shard.index]
                    np.testing.assert_array_equal(shard.data, own)


@pytest.mark.parametrize(
    ("sharding", "error"),
    [
        (lambda mesh: NamedSharding(mesh, PartitionSpec(None, "data")), "the examples"),
        (lambda mesh: NamedSharding(mesh, PartitionSpec()), "must split the examples"),
        (lambda mesh: PartitionSpec("data"), "must be a NamedSharding"),
    ],
)
def test_another_sharding_is_refused_with_the_fix(sharding, error):
    with pytest.raises((TypeError, ValueError), match=rf"{error}.*Use NamedSharding\("):
        ej.device.echo_batches(Chunks(1), sharding=sharding(mesh_of(1)))


def feed_of(spec, lanes=1, rows=16, num_batches=20, **options):
    """A feed over so many batches, one lane on each device; and how often it reads."""
    plan = make_plan(spec, lanes=Lanes(rows, lanes), **options)
    upstream = Chunks(num_batches, rows)
    buffer = ej.device.EchoBuffer.of(next(Chunks(1, rows)), mesh=mesh_of(lanes))
    return ej.device.DeviceFeed(upstream, plan, buffer, prefetch=0), upstream


def put(feed, count=1):
    return jax.device_put(feed.take(count), feed.buffer.input_sharding)


def test_a_draw_communicates_nothing_between_devices():
    feed, _ = feed_of(ej.EchoSpec(2, 64, "spread", 16), LANES)
    program = jax.jit(feed.buffer.draw).lower(feed.arrays, put(feed))
    text = program.compile().as_text()
    for name in ("all-gather", "all-reduce", "all-to-all", "collective", "permute"):
        assert name not in text


def test_a_draw_that_takes_nothing_writes_nothing():
    feed, upstream = feed_of(ej.EchoSpec(4, 32, "spread", 16))
    step = jax.jit(feed.buffer.draw, out_shardings=feed.buffer.sharding)
    written = 0
    for _ in range(24):
        before, inputs = feed.arrays, put(feed)
        written += feed.arrays is not before
        step(feed.arrays, inputs)
    assert written == upstream.reads < 10
    assert step._cache_size() == 1


def test_a_write_waits_for_updates_that_still_read():
    feed, _ = feed_of(ej.EchoSpec(1, 16, "consecutive", 16), num_batches=24)

    @jax.jit
    def late(arrays, inputs, weights):
        """Reads after some milliseconds of work."""
        weights = jax.lax.fori_loop(0, 20, lambda _, w: jnp.tanh(w @ w), weights)
        zero = (0 * weights[0, 0]).astype(jnp.int32)
        (batch,) = feed.buffer.draw(arrays, inputs + zero)
        return batch["index"]

    weights, found = jax.device_put(np.full((256, 256), 1 / 256, np.float32)), []
    for _ in range(24):
        inputs = put(feed)
        found.append((late(feed.arrays, inputs, weights), feed.tags.fresh_index[0]))
    # Every slot was written several times while all of them were in flight.
    assert feed.take() is None and feed.buffer.num_slots < 24 * 16 / 4
    for index, expected in found:
        np.testing.assert_array_equal(index, expected)


@pytest.mark.parametrize("order", ["window_shuffle", "spread"])
def test_how_many_batches_are_asked_for_changes_nothing(order):
    """Nor where the feed is saved: what is decided ahead is no part of the state."""
    spec = ej.EchoSpec(2.5, 96, order, 16, seed=4)

    def start():
        return feed_of(spec, 2, 32, 50, max_batches=4)[0]

    draw = jax.jit(start().buffer.draw)

    def drawn(feed, sizes):
        found = []
        for size in sizes:
            inputs = put(feed, size)
            tags = zip(*feed.tags, strict=True)
            for batch, (index, repeat) in zip(
                draw(feed.arrays, inputs), tags, strict=True
            ):
                assert batch["index"].tolist() == index.tolist()
                found.append((index.tolist(), repeat.tolist()))
        return found

    single = start()
    expected, counts, states = [], [], []
    for _ in range(46):
        states.append(single.get_state())
        expected += drawn(single, [1])
        counts.append(single.counts)
    mixed = [1, 4, 1, 1, 3, 2, 4, 4, 1, 4, 1, 1, 1, 3, 2, 2]
    for at, sizes in ((0, mixed), (9, [1, 4, 1, 3]), (21, [4]), (36, [3, 4])):
        later, end = start(), at + sum(sizes)
        later.set_state(states[at])
        assert drawn(later, sizes) == expected[at:end]
        assert later.counts == counts[end - 1]


@pytest.mark.parametrize(
    ("order", "num_bytes"),
    [("window_shuffle", 50_000), ("shuffle_buffer", 3000), ("spread", 3000)],
)
def test_a_buffer_sized_by_memory_fills_it_and_no_more(order, num_bytes):
    spec = ej.EchoSpec(2, 1, order, 16)
    echo = ej.device.echo_batches(
        Chunks(1), spec, mesh=mesh_of(1), buffer_bytes=num_bytes
    )
    item = echo.buffer.bytes_per_item
    assert item == 4 + 5
    room = 20 * item + (
        10 * item * (num_bytes / item) ** 0.5 if order == "window_shuffle" else 0
    )
    assert num_bytes - room < echo.buffer.num_bytes <= num_bytes


def test_a_buffer_that_does_not_fit_is_refused_with_what_would():
    # Large items, and few: a plan of millions of items takes a second.
    huge = {"x": np.broadcast_to(np.uint8(0), (8, 1 << 26))}
    echo = ej.device.echo_batches(
        [huge], ej.EchoSpec(2, 1 << 16, "window_shuffle", 8), mesh=mesh_of(1)
    )
    with pytest.raises(ValueError, match=r"4,\d+\.\d GB.*does not fit.*_bytes="):
        next(echo)
    tiny = ej.device.echo_batches(
        Chunks(1),
        ej.EchoSpec(2, 1, "window_shuffle", 16),
        mesh=mesh_of(1),
        buffer_bytes=90,
    )
    with pytest.raises(ValueError, match="use more buffer_bytes"):
        next(tiny)


def test_a_state_of_other_data_is_refused():
    spec = ej.EchoSpec(2, 64, "spread", 16)
    echo = ej.device.echo_batches(Chunks(9), spec, mesh=mesh_of(1))
    for _ in range(9):
        next(echo)
    state = json.loads(json.dumps(echo.get_state()))
    shorter = ej.device.echo_batches(Chunks(2), spec, mesh=mesh_of(1))
    with pytest.raises(ValueError, match=r"ended after \d+ items, .* same data"):
        shorter.set_state(state)
    empty = ej.device.echo_batches(Chunks(0), spec, mesh=mesh_of(1))
    with pytest.raises(ValueError, match="the upstream is empty"):
        empty.set_state(state)


@pytest.mark.parametrize(
    ("spec", "rows", "num_devices"),
    [
        (ej.StochasticSpec(ej.FetchSchedule(start=0.4, end=0.4), 120, 40), 40, 2),
        (ej.EchoSpec(4, 300, "spread", 100), 100, 2),
        (ej.AdaptiveSpec(3, 192, 64, replay=[True, False] * 9), 64, LANES),
        (ej.StochasticSpec(ej.FetchSchedule(start=0.4, end=0.4), 1152, 384), 384, 1),
    ],
)
def test_host_batches_of_any_size_are_read_again_as_a_whole(spec, rows, num_devices):
    def start():
        return ej.device.echo_batches(
            Chunks(9, rows), spec, mesh=mesh_of(num_devices), tags=True
        )

    with closing(start()) as echo, closing(start()) as later:
        assert len([*itertools.islice(echo, 14)]) == 14
        later.set_state(echo.get_state())
        pairs = [*zip(echo, later, strict=True)]
    assert pairs
    for (batch, tags), (found, found_tags) in pairs:
        assert found["index"].tolist() == found_tags.fresh_index.tolist()
        assert found["index"].tolist() == batch["index"].tolist()
        assert found_tags.repeat.tolist() == tags.repeat.tolist()


def test_a_smaller_batch_is_left_out_where_asked():
    spec = ej.EchoSpec(1, batch_size=20)

    def batches(**options):
        echo = ej.device.echo_batches(Chunks(3), spec, mesh=mesh_of(1), **options)
        return [batch["index"].tolist() for batch in echo]

    every = batches()
    whole = [batch for batch in every if len(batch) == 20]
    assert batches(drop_remainder=True) == whole != every


def test_a_group_that_holds_a_smaller_last_batch_is_the_end():
    feed, _ = feed_of(ej.EchoSpec(batch_size=6), 1, 8, 2, max_batches=2)
    with closing(feed):
        assert feed.take(1).shape[-1] == 6
        assert feed.take(2) is None  # Of 6 and of 4.


class InterruptedOnce(Chunks):
    """Ctrl-C comes in the first read, after its batch was taken."""

    interrupted = False

    def __next__(self):
        batch = super().__next__()
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        return batch


def test_an_interrupted_look_at_the_first_batch_loses_nothing():
    spec = ej.EchoSpec(1, batch_size=16)
    batches = ej.device.echo_batches(InterruptedOnce(2), spec, mesh=mesh_of(1))
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    found = [jax.device_get(batch["index"]).tolist() for batch in batches]
    assert found == [[*range(16)], [*range(16, 32)]]
