"""The pipeline, on records that are numbers: every value can be computed by hand."""

import itertools
import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from slow_cases import slow_but_for

from echo_jax.data.pipeline.dataset import PipelineSpec, train_dataset
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.pipeline.storage import SimulatedStorage, StorageSpec
from echo_jax.echo.keys import use_seed
from echo_jax.echo.load_schedule import LoadSchedule
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec, StochasticSpec

NUM_RECORDS = 50
BATCH_SIZE = 4
PLACEMENTS = ("read", "decode", "augment", "batch")
IDENTITY = EchoSpec()
ECHOES = {
    "identity": IDENTITY,
    "consecutive": EchoSpec(factor=2.5),
    "shuffle": EchoSpec(factor=2.5, order="shuffle", buffer=12),
    "shuffle_buffer": EchoSpec(factor=2.5, order="shuffle_buffer", buffer=12),
    "spread": EchoSpec(factor=2.5, order="spread", buffer=12),
    # Decisions are repeated, so that timing does not show.
    "adaptive": AdaptiveSpec(cap=3, buffer=12, replay=[True, False, False, True] * 40),
    "stochastic": StochasticSpec(LoadSchedule(start=0.5, end=0.5), buffer=12),
}


class NumberRecords:
    """Record i is the number i, in two bytes; reads are counted."""

    def __init__(self):
        self.num_reads = 0

    def __len__(self) -> int:
        return NUM_RECORDS

    def __getitem__(self, index: int) -> bytes:
        self.num_reads += 1
        return index.to_bytes(2, "big")


def decode(record: bytes) -> dict[str, np.ndarray]:
    return {"x": np.array([int.from_bytes(record, "big")] * 3), "draw": np.array(0)}


def augment(item: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    return {**item, "draw": np.array(seed % 2**31)}


STAGES = Stages(NumberRecords(), decode, augment)


def pipeline(after: str, **fields) -> PipelineSpec:
    return PipelineSpec(after, BATCH_SIZE, **{"seed": 3, **fields})


def take(num_batches, spec=IDENTITY, after="decode", stages=STAGES, **fields):
    iterator = iter(train_dataset(stages, pipeline(after, **fields), spec))
    try:
        return [next(iterator) for _ in range(num_batches)]
    finally:
        iterator.close()


def assert_equal(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
            assert one[key].dtype == other[key].dtype


def fresh_numbers(num_batches: int, **fields) -> np.ndarray:
    batches = take(num_batches, **fields)
    return np.concatenate([batch["x"][:, 0] for batch in batches])


def test_every_epoch_is_a_permutation_of_its_own():
    numbers = fresh_numbers(3 * NUM_RECORDS // BATCH_SIZE + 1)
    epochs = [numbers[i * NUM_RECORDS : (i + 1) * NUM_RECORDS] for i in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(NUM_RECORDS))
    for one, other in itertools.combinations([*epochs, np.arange(NUM_RECORDS)], 2):
        assert (one != other).any()


def test_seeds_do_not_share_permutations():
    """A second epoch must not be another seed's first: seeds would be no repeats."""
    firsts, seconds = [], []
    for seed in range(8):
        numbers = fresh_numbers(25, seed=seed).tolist()
        firsts.append(tuple(numbers[:NUM_RECORDS]))
        seconds.append(tuple(numbers[NUM_RECORDS:]))
    assert len(set(firsts + seconds)) == 16


@pytest.mark.parametrize("after", PLACEMENTS)
@pytest.mark.parametrize("order", ECHOES)
def test_a_batch_holds_what_its_tags_say(after, order):
    """Values follow from the fresh stream, the tags and the seed; nothing else."""
    numbers = fresh_numbers(40)
    # All draws at factor 1 are first uses: they tell the key of the augmentation.
    first_draws = np.concatenate([batch["draw"] for batch in take(40)])
    for batch in take(30, ECHOES[order], after):
        fresh, repeat = batch["fresh_index"], batch["repeat"]
        assert fresh.shape == repeat.shape == (BATCH_SIZE,)
        assert (fresh.dtype, repeat.dtype) == (np.int64, np.int32)
        if after == "batch":
            assert (fresh == fresh[0]).all() and (repeat == repeat[0]).all()
            fresh = fresh * BATCH_SIZE + np.arange(BATCH_SIZE)
        np.testing.assert_array_equal(
            batch["x"], np.repeat(numbers[fresh], 3).reshape(-1, 3)
        )
        if after in ("augment", "batch"):
            np.testing.assert_array_equal(batch["draw"], first_draws[fresh])
        else:
            is_first = repeat == 0
            np.testing.assert_array_equal(
                batch["draw"][is_first], first_draws[fresh][is_first]
            )
            assert (batch["draw"][~is_first] != first_draws[fresh][~is_first]).all()


@pytest.mark.parametrize("after", PLACEMENTS)
@pytest.mark.parametrize("order", ["consecutive", "shuffle", "spread"])
def test_uses_are_counted_exactly(after, order):
    """Item k is used floor((k+1) 5/2) - floor(5/2 k) times: 2, 3, 2, 3, ..."""
    batches = take(60, ECHOES[order], after)
    step = BATCH_SIZE if after == "batch" else 1
    fresh = np.concatenate([b["fresh_index"] for b in batches])[::step]
    repeat = np.concatenate([b["repeat"] for b in batches])[::step]
    # Items that the buffer cannot hold any more have had all their uses.
    for item in range(fresh.max() - 30):
        uses = repeat[fresh == item].tolist()
        assert sorted(uses) == list(range(2 + item % 2))


@pytest.mark.parametrize("after", ["read", "decode", "augment"])
def test_spread_puts_no_item_twice_into_a_batch(after):
    """The pipeline tells the echo what a batch is, whatever the spec says."""
    for batch in take(60, ECHOES["spread"], after):
        assert len(set(batch["fresh_index"].tolist())) == BATCH_SIZE


def test_augmentation_is_keyed_by_use():
    seed = int(use_seed(3, 1, 0))  # stream 1 of pipeline seed 3 is augmentation
    for batch in take(10, ECHOES["spread"], "decode"):
        keys = use_seed(seed, batch["fresh_index"], batch["repeat"])
        np.testing.assert_array_equal(batch["draw"], (keys % 2**31).astype(np.int64))


def test_without_augmentation_nothing_is_drawn():
    stages = replace(STAGES, augment=None)
    for after in PLACEMENTS:
        for batch in take(5, ECHOES["spread"], after, stages):
            assert (batch["draw"] == 0).all()


@pytest.mark.parametrize("after", PLACEMENTS)
def test_threads_and_prefetching_change_nothing(after):
    expected = take(25, ECHOES["spread"], after, threads=0, prefetch=0)
    for threads, prefetch in [(1, 0), (1, 4), (4, 1)]:
        batches = take(25, ECHOES["spread"], after, threads=threads, prefetch=prefetch)
        assert_equal(batches, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("after", "workers"), [("read", 2), ("decode", 1), ("augment", 2), ("batch", 2)]
)
def test_workers_change_nothing(after, workers):
    expected = take(25, ECHOES["spread"], after)
    assert_equal(take(25, ECHOES["spread"], after, workers=workers), expected)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["decode", "batch"])
def test_workers_resume_exactly(after):
    dataset = train_dataset(STAGES, pipeline(after, workers=2), ECHOES["spread"])
    assert_resumes_at(dataset, positions=[1, 12])


def assert_resumes_at(dataset, positions):
    """Saves at every position, and compares what follows each save."""
    num_after = 3
    whole = iter(dataset)
    states, batches = [], []
    for _ in range(max(positions) + num_after + 1):
        states.append(json.loads(json.dumps(whole.get_state())))
        batches.append(next(whole))
    whole.close()
    for position in positions:
        resumed = iter(dataset)
        resumed.set_state(states[position])
        assert resumed.get_state() == states[position]
        following = [next(resumed) for _ in range(num_after)]
        resumed.close()
        assert_equal(following, batches[position : position + num_after])


def _half_of(orders, placements):
    """Every order in half of the placements, and every placement with half of them."""
    grid = itertools.product(enumerate(orders), enumerate(placements))
    return [(o, p) for (row, o), (column, p) in grid if (row + column) % 2]


@pytest.mark.parametrize(
    ("order", "after"),
    slow_but_for(_half_of(ECHOES, PLACEMENTS), itertools.product(ECHOES, PLACEMENTS)),
)
def test_resumes_at_every_position(order, after):
    assert_resumes_at(train_dataset(STAGES, pipeline(after), ECHOES[order]), range(30))


def test_an_iterator_can_go_back():
    iterator = iter(train_dataset(STAGES, pipeline("decode"), ECHOES["spread"]))
    for _ in range(5):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    following = [next(iterator) for _ in range(6)]
    iterator.set_state(state)
    assert_equal([next(iterator) for _ in range(6)], following)
    iterator.close()


@pytest.mark.parametrize("after", PLACEMENTS)
def test_an_echo_saves_reads(after):
    num_reads = {}
    for factor in (1, 4):
        source = NumberRecords()
        stages = replace(STAGES, source=source)
        take(16, EchoSpec(factor), after, stages, threads=0, prefetch=0)
        num_reads[factor] = source.num_reads
    # 16 batches of 4; items travel in lists of 16, of which none is left over.
    assert num_reads == {1: 64, 4: 16}


@pytest.mark.parametrize("after", PLACEMENTS)
def test_each_fresh_read_passes_the_storage_once(after, monkeypatch):
    waits = []

    def wait(storage: SimulatedStorage, index: int, num_bytes: int) -> None:
        waits.append((index, num_bytes, storage.latency_s(index)))

    monkeypatch.setattr(SimulatedStorage, "wait", wait)
    storage = StorageSpec(latency_s=0.5)
    take(16, EchoSpec(4), after, threads=0, prefetch=0, storage=storage)
    assert waits == [(index, 2, 0.5) for index in range(16)]


@pytest.mark.parametrize("after", PLACEMENTS)
def test_batches_share_no_writable_memory(after):
    expected = take(20, ECHOES["consecutive"], after)
    iterator = iter(
        train_dataset(STAGES, pipeline(after, prefetch=0), ECHOES["consecutive"])
    )
    for batch in expected:
        spoiled = next(iterator)
        np.testing.assert_array_equal(spoiled["x"], batch["x"])
        for array in spoiled.values():
            if array.flags.writeable:
                array[...] = -1
    iterator.close()


@pytest.mark.parametrize("after", PLACEMENTS)
def test_the_time_of_fresh_batches_is_seen_where_the_echo_takes_them(after):
    options = pipeline(after, threads=0, prefetch=0)
    dataset = train_dataset(STAGES, options, EchoSpec(2))
    # A tick before an element is waited for, and one after it.
    dataset.fresh_time.now = itertools.count().__next__
    with closing(iter(dataset)) as batches:
        for _ in range(100):
            next(batches)
    # Items travel in lists of 16.
    per_batch = 1 if after == "batch" else BATCH_SIZE / 16
    assert dataset.fresh_time.bounds() == (per_batch, 2 * per_batch)


@pytest.mark.parametrize("after", PLACEMENTS)
def test_a_record_that_cannot_be_decoded_reaches_the_trainer(after):
    def fail(record: bytes) -> dict[str, np.ndarray]:
        raise ValueError("a damaged record")

    with pytest.raises(ValueError, match="a damaged record"):
        take(1, IDENTITY, after, replace(STAGES, decode=fail))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"after": "shuffle"}, "'shuffle' is no stage; use one of read, decode"),
        ({"batch_size": 0}, "batch_size=0.*use 1 or more"),
        ({"threads": -1}, "threads=-1"),
        ({"workers": -1}, "workers=-1"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_pipeline_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        PipelineSpec(**{"after": "decode", "batch_size": 4, **fields})
