"""The pipeline, on records that are numbers: every value can be computed by hand."""

import itertools
import json
import math
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

import echo_jax as ej
from echo_jax.data.pipeline import (
    DataShard,
    FreshTime,
    PipelineSpec,
    SimulatedStorage,
    Stages,
    StorageSpec,
    eval_batches,
    fresh_batches,
    sample_indices,
    stream_eval_batches,
    train_dataset,
)

NUM_RECORDS, BATCH_SIZE = 50, 4
PLACEMENTS = ("read", "decode", "augment", "batch")
IDENTITY = ej.EchoSpec()
ECHOES = {
    "identity": IDENTITY,
    "consecutive": ej.EchoSpec(factor=2.5),
    "window_shuffle": ej.EchoSpec(factor=2.5, order="window_shuffle", buffer=12),
    "shuffle_buffer": ej.EchoSpec(factor=2.5, order="shuffle_buffer", buffer=12),
    "spread": ej.EchoSpec(factor=2.5, order="spread", buffer=12),
    # Decisions are repeated, so that timing does not show.
    "adaptive": ej.AdaptiveSpec(3, 12, replay=[True, False, False, True] * 40),
    "stochastic": ej.StochasticSpec(ej.FetchSchedule(start=0.5, end=0.5), buffer=12),
}
each_placement = pytest.mark.parametrize("after", PLACEMENTS)
# Every order in half of the placements, and every placement with half of the orders.
CASES = [
    (order, after)
    for row, order in enumerate(ECHOES)
    for column, after in enumerate(PLACEMENTS)
    if (row + column) % 2
]
each_case = pytest.mark.parametrize(("order", "after"), CASES)


class Records:
    """Record i is the number i, in two bytes; reads are noted."""

    def __init__(self, size=NUM_RECORDS):
        self.size, self.read = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return index.to_bytes(2, "big")


def decode(record):
    x = np.array([float(int.from_bytes(record, "big"))] * 3)
    return {"x": x, "draw": np.array(0)}


def augment(item, seed):
    return {**item, "draw": np.array(seed % 2**31)}


STAGES = Stages(Records(), decode, augment)


def make(spec=IDENTITY, after="decode", stages=STAGES, shard=None, **fields):
    fields = {"batch_size": BATCH_SIZE, "seed": 3, **fields}
    shard = () if shard is None else (shard,)
    return train_dataset(stages, PipelineSpec(after, **fields), spec, *shard)


def take(dataset, count):
    with closing(iter(dataset)) as batches:
        return [next(batches) for _ in range(count)]


def assert_equal(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], strict=True)


def joined(batches, name="x"):
    return np.concatenate([batch[name] for batch in batches])


def numbers_of(batches):
    return joined(batches)[:, 0].astype(int)


def assert_resumes(dataset, positions, expected=None):
    """Saves at every position, and compares what follows each save."""
    states, batches = [], []
    with closing(iter(dataset)) as whole:
        for _ in range(max(positions) + 4):
            states.append(json.loads(json.dumps(whole.get_state())))
            batches.append(next(whole))
        # An iterator can go back.
        whole.set_state(states[first := positions[0]])
        again = [next(whole) for _ in range(3)]
    assert_equal(again, batches[first : first + 3])
    assert_equal(batches, expected[: len(batches)] if expected else batches)
    for position in positions:
        with closing(iter(dataset)) as resumed:
            resumed.set_state(states[position])
            assert resumed.get_state() == states[position]
            following = [next(resumed) for _ in range(3)]
        assert_equal(following, batches[position : position + 3])


def test_every_epoch_of_every_seed_is_a_permutation_of_its_own():
    epochs = []
    for seed in range(3):
        numbers = numbers_of(take(make(seed=seed), 25)).tolist()
        epochs += [tuple(numbers[:NUM_RECORDS]), tuple(numbers[NUM_RECORDS:])]
    every = tuple(range(NUM_RECORDS))
    assert all(tuple(sorted(epoch)) == every for epoch in epochs)
    # A second epoch must not be another seed's first: seeds would be no repeats.
    assert len({*epochs, every}) == 7


@each_case
def test_a_batch_holds_what_its_tags_say(after, order):
    """Values follow from the fresh stream, the tags and the seed; nothing else."""
    fresh = take(make(), 40)
    numbers = numbers_of(fresh)
    batches = take(make(ECHOES[order], after), 60)
    for batch in batches:
        index, repeat = batch["fresh_index"], batch["repeat"]
        assert (index.dtype, repeat.dtype) == (np.int64, np.int32)
        if after == "batch":
            assert (index == index[0]).all() and (repeat == repeat[0]).all()
            index = index * BATCH_SIZE + np.arange(BATCH_SIZE)
        elif order == "spread":
            assert len({*index.tolist()}) == BATCH_SIZE
        expected = np.repeat(numbers[index % len(numbers)], 3).reshape(-1, 3)
        inside = index < len(numbers)
        np.testing.assert_array_equal(batch["x"][inside], expected[inside])
        # Stream 1 of the seed is augmentation, keyed by use below the echo.
        used = 0 * repeat if after in ("augment", "batch") else repeat
        seeds = ej.seed_for_use(int(ej.seed_for_use(3, 1, 0)), index, used)
        draws = (seeds % 2**31).astype(np.int64)
        np.testing.assert_array_equal(batch["draw"], draws)
    if order in ("consecutive", "window_shuffle", "spread"):
        # Item k is used floor((k+1) 5/2) - floor(5/2 k) times: 2, 3, 2, 3, ...
        step = BATCH_SIZE if after == "batch" else 1
        index, repeat = (joined(batches, n)[::step] for n in ("fresh_index", "repeat"))
        # Items that the buffer cannot hold any more have had all their uses.
        for item in range(index.max() - 30):
            uses = repeat[index == item].tolist()
            assert sorted(uses) == list(range(2 + item % 2))


@each_placement
def test_threads_and_prefetching_change_nothing(after):
    stages = replace(STAGES, augment=None)
    slow, quick = (
        take(make(ECHOES["spread"], after, stages, threads=n, prefetch=n), 25)
        for n in (0, 4)
    )
    assert_equal(slow, quick)
    assert not joined(slow, "draw").any()  # Without augmentation nothing is drawn.


@pytest.mark.slow
def test_workers_change_nothing():
    expected = take(make(ECHOES["spread"], "batch"), 20)
    assert_resumes(make(ECHOES["spread"], "batch", workers=2), [12], expected)


@each_case
def test_a_pipeline_resumes_at_every_position(order, after):
    every = 1 if order in ("spread", "adaptive") else 4
    assert_resumes(make(ECHOES[order], after), range(0, 30, every))


@each_placement
def test_an_echo_saves_reads_and_each_takes_its_time(after):
    num_reads = {}
    storage = StorageSpec(latency_s=0.002)
    began_s = time.monotonic()
    for factor in (1, 4):
        stages = replace(STAGES, source=Records())
        options = {"threads": 0, "prefetch": 0, "storage": storage}
        take(make(ej.EchoSpec(factor), after, stages, **options), 16)
        num_reads[factor] = len(stages.source.read)
    # 16 batches of 4; items travel in lists of 16, of which none is left over.
    assert num_reads == {1: 64, 4: 16}
    assert time.monotonic() - began_s >= 80 * 0.002


def fails(*_):
    raise ValueError("a damaged record")


def writes(item, seed):
    item["x"] *= 2
    return item


def decode_writing(record):
    record += 1
    return {"x": record}


class Kept(Records):
    kept = tuple(np.array([float(i)]) for i in range(NUM_RECORDS))

    def __getitem__(self, index):
        return self.kept[index]


@each_placement
def test_what_a_stage_raises_or_writes_into_its_input_is_an_error(after):
    kept = {"source": Kept(), "decode": decode_writing, "augment": None}
    for changes, said in (
        ({"decode": fails}, "a damaged record"),
        ({"augment": writes}, r"^augment writes into .*read-only"),
        # Where a source keeps its records, the next epoch would read what it wrote.
        (kept, r"^decode writes into the item"),
    ):
        with pytest.raises(ValueError, match=said):
            take(make(ECHOES["spread"], after, replace(STAGES, **changes)), 1)
    assert [float(each[0]) for each in Kept.kept] == list(range(NUM_RECORDS))


def test_a_bad_pipeline_is_refused():
    with pytest.raises(ValueError, match=r"data\.workers=2 needs data\.pipeline=g"):
        PipelineSpec("decode", 4, engine="tfdata", workers=2)


BAD = {3, 11, 12, 40}


def decode_bad(record):
    item = decode(record)
    if item["x"][0] in BAD:
        item["x"][1:] = np.nan, -np.inf
    return item


def make_bad(spec=ECHOES["spread"], after="decode", **fields):
    return make(spec, after, Stages(Records(), decode_bad, augment), **fields)


@each_placement
def test_the_first_bad_item_is_an_error_that_names_it(after):
    every = numbers_of(take(make(), 40)).tolist()
    first = next(index for index, record in enumerate(every) if record in BAD)
    said = (
        rf"^fresh item {first} \(record {every[first]}\): item\['x'\] holds NaN or "
        r"infinity in 2 of 3 values\. Mend the record"
    )
    options = {"after": after, "threads": 0, "prefetch": 0}
    with pytest.raises(ej.BadItemError, match=said):
        take(make_bad(**options), 40)
    assert np.isnan(joined(take(make_bad(check_finite=False, **options), 40))).any()


def shards_of(of, count, spec=IDENTITY, **fields):
    """The batches of each shard, of batches of 8 of 52 records."""
    options = {"batch_size": 8, "threads": 0, "prefetch": 0, **fields}
    sources = [Records(52) for _ in range(of)]
    shards = []
    for number, source in enumerate(sources):
        stages, shard = replace(STAGES, source=source), DataShard(number, of)
        shards.append(take(make(spec, stages=stages, shard=shard, **options), count))
    return sources, shards


def whole_of(shards):
    """The batches of all shards: their rows one shard after another."""
    return [
        {name: joined(rows, name) for name in rows[0]}
        for rows in zip(*shards, strict=True)
    ]


def assert_shards_are_the_whole_stream(after, of, **fields):
    _, (whole,) = shards_of(1, 20, after=after)
    sources, shards = shards_of(of, 20, after=after, **fields)
    assert_equal(whole_of(shards), whole)
    return sources


@each_placement
def test_without_an_echo_the_shards_are_the_whole_stream(after):
    sources = assert_shards_are_the_whole_stream(after, 4)
    # 52 records are 6.5 batches, of which a shard makes 2 rows: an epoch ends within
    # a batch, of which the first half has been made by the first two shards.
    sizes = (14, 14, 12, 12)
    read = [source.read[:size] for source, size in zip(sources, sizes, strict=True)]
    assert sorted(itertools.chain(*read)) == list(range(52))


@pytest.mark.parametrize(
    ("order", "after"),
    [("consecutive", "read"), ("window_shuffle", "decode"), ("spread", "augment")],
)
def test_an_echo_of_shards_uses_the_items_of_the_whole(after, order):
    spec = ej.EchoSpec(2, order=order, buffer=32)
    _, (fresh,) = shards_of(1, 12)
    numbers, draws, seen = joined(fresh), joined(fresh, "draw"), []
    for number, batches in enumerate(shards_of(2, 12, spec, after=after)[1]):
        index, repeat = (joined(batches, name) for name in ("fresh_index", "repeat"))
        # Rows 4 to 7 of every fresh batch are the second shard's.
        assert (index % 8 // 4 == number).all()
        np.testing.assert_array_equal(joined(batches), numbers[index])
        # The same augmentation, too, where it is the same use.
        same = (repeat == 0) | (after == "augment")
        assert (joined(batches, "draw") == draws[index])[same].all()
        seen += zip(index.tolist(), repeat.tolist(), strict=True)
    assert len(seen) == len({*seen}) == 12 * 8


def test_fresh_batches_of_shards_are_rows_of_the_whole_and_shards_resume():
    spec = PipelineSpec("decode", 8, seed=3, threads=0)
    made = [fresh_batches(STAGES, spec, DataShard(n, 2)) for n in range(2)]
    whole = take(fresh_batches(STAGES, spec), 10)
    assert_equal(whole_of([take(dataset, 10) for dataset in made]), whole)
    assert_resumes(make(ECHOES["window_shuffle"], shard=DataShard(1, 2)), [0, 7])
    with pytest.raises(ValueError, match=r"config\.batch_size=4 is not a multiple of"):
        make(shard=DataShard(0, 3))
    with pytest.raises(ValueError, match=r"stage='read' has no echo on a device"):
        fresh_batches(STAGES, replace(spec, after="read"))


@pytest.mark.parametrize("num_examples", [1, 9, 16])
def test_every_example_is_evaluated_by_one_shard(num_examples):
    options = {"source": Records(num_examples), "decode": decode, "batch_size": 8}
    whole = eval_batches(**options)
    together = whole_of(
        [eval_batches(**options, shard=DataShard(n, 4)) for n in range(4)]
    )
    for ours, wanted in zip(together, whole, strict=True):
        np.testing.assert_array_equal(ours["mask"], wanted["mask"])
        real = wanted["mask"] > 0
        np.testing.assert_array_equal(ours["x"][real], wanted["x"][real])


def test_the_last_batch_of_an_evaluation_is_padded_and_masked():
    batches = eval_batches(Records(5), decode, batch_size=2)
    assert [batch["mask"].tolist() for batch in batches] == [[1, 1], [1, 1], [1, 0]]
    # Filled up with an example, on which a model is as well defined as on others.
    assert numbers_of(batches).tolist() == [0, 1, 2, 3, 4, 4]
    assert {batch["mask"].dtype for batch in batches} == {np.dtype(np.float32)}


def test_a_sample_favours_no_class_that_takes_turns():
    indices = np.array(sample_indices(2048, 256))
    assert len({*indices.tolist()}) == 256
    assert (np.diff(indices) > 0).all() and indices.max() < 2048
    assert np.bincount(indices % 8, minlength=8).min() > 16
    for max_records in (0, 10, 11):
        assert sample_indices(10, max_records) == list(range(10))


def test_a_stream_makes_the_same_batches_and_holds_a_few_only():
    options = {"decode": decode, "batch_size": 4, "max_examples": 22}
    kept = eval_batches(Records(29), **options)
    assert_equal([*stream_eval_batches(Records(29), threads=1, **options)], kept)
    source = Records(100)
    with closing(stream_eval_batches(source, decode, batch_size=5)) as batches:
        next(batches)
    assert len(source.read) <= 10
    with pytest.raises(ValueError, match="a damaged record"):
        next(stream_eval_batches(source, fails, batch_size=1))


class FakeTime:
    """A clock that only sleeping moves, by `late_s` more than was asked for."""

    def __init__(self, late_s=0.0, **spec):
        self.now_s, self.late_s, self.slept_s = 100.0, late_s, []
        options = {"clock": lambda: self.now_s, "sleep": self.sleep}
        self.wait = SimulatedStorage(StorageSpec(**spec), 0, **options).wait

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds + self.late_s


@pytest.mark.parametrize("kind", ["exponential", "bursty"])
def test_latencies_have_the_stated_distribution_and_follow_from_seed_and_index(kind):
    storage, other = (SimulatedStorage(StorageSpec(0.5, 0.0, kind), n) for n in (3, 8))
    latencies = np.array([storage.latency_s(i) for i in range(20_000)])
    assert latencies.mean() == pytest.approx(0.5, rel=0.05)
    again = pickle.loads(pickle.dumps(storage))
    assert [again.latency_s(i) for i in range(49, -1, -1)] == [*latencies[49::-1]]
    assert [other.latency_s(i) for i in range(50)] != [*latencies[:50]]
    if kind == "bursty":
        assert {*latencies} == {0.5 * 0.4, 0.5 * 6.4}
    else:
        # The median of an exponential is log(2) of its mean.
        assert np.median(latencies) == pytest.approx(0.5 * math.log(2), rel=0.05)


def test_a_read_takes_its_latency_and_then_its_transfer():
    fake = FakeTime(latency_s=2.0, bytes_per_s=100.0)
    fake.wait(0, 50)
    assert fake.slept_s == [2.0, 0.5]
    # An idle link saves up no bandwidth.
    fake = FakeTime(bytes_per_s=100.0)
    fake.wait(0, 100)
    fake.now_s += 60
    fake.wait(1, 100)
    assert fake.slept_s == [1.0, 1.0]
    # A late wake-up is given back to the next read.
    fake = FakeTime(late_s=0.001, latency_s=0.01)
    for read in range(100):
        fake.wait(read, 1)
    assert fake.now_s - 100.0 == pytest.approx(100 * 0.01 + 0.001)


def test_concurrent_reads_overlap_in_latency_and_share_the_bandwidth():
    # With a lock held while sleeping, the barrier would time out and raise.
    barrier = threading.Barrier(3)
    spec = StorageSpec(1.0, 1.0)
    storage = SimulatedStorage(spec, 0, sleep=lambda _: barrier.wait(timeout=120))
    with ThreadPoolExecutor(3) as pool:
        [*pool.map(storage.wait, range(3), [1] * 3)]
    # The clock stands still: all three ask at the same moment.
    spec, slept_s = StorageSpec(bytes_per_s=100.0), []
    storage = SimulatedStorage(spec, 0, clock=lambda: 5.0, sleep=slept_s.append)
    for read in range(3):
        storage.wait(read, 50)
    assert slept_s == [0.5, 1.0, 1.5]


# --- The time of a fresh batch, seen by its consumer.


def bounds(waits_s, busy_s, *, held, count=401, per_batch=1):
    """Takes elements, each after a wait, and is then busy."""
    now = [0.0]
    seen = FreshTime(elements_per_batch=per_batch, held=held, now=lambda: now[0])

    def load():
        now[0] += waits_s

    elements = iter(load, "the end")
    for _ in range(count):
        seen.next_of(elements)
        now[0] += busy_s
    # The first element is left out, also that after a restart.
    seen.restart()
    seen.next_of(elements)
    return seen.bounds()


def test_bounds_by_hand():
    # Who waits all the time sees what a batch takes.
    assert bounds(2.0, 0.0, held=0, per_batch=8) == (16.0, 16.0)
    # All four may have been there when the first was taken.
    assert bounds(1.5, 0.5, held=4, count=5)[1] == math.inf
    found = bounds(1.5, 0.5, held=4)
    assert found == pytest.approx((400 * 1.5 / 404, 400 * 2 / 396))
    # Who never waits sees only that it is fast enough.
    assert bounds(0.0, 5.0, held=4) == pytest.approx((0.0, 5.0 * 400 / 396))
    assert bounds(1.0, 0.0, held=0, count=1) == (0.0, math.inf)
