"""Data shards: together they are the whole, whoever makes them."""

import itertools
from contextlib import closing

import numpy as np
import pytest

from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.evaluation import eval_batches
from echo_jax.data.pipeline.stages import Stages
from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import EchoSpec

NUM_RECORDS, BATCH = 52, 8


class Records:
    """Numbers, and which of them were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return NUM_RECORDS

    def __getitem__(self, index):
        self.read.append(index)
        return bytes([index])


def stages_of(records):
    return Stages(
        records,
        decode=lambda record: {"x": np.int64(record[0])},
        augment=lambda item, seed: {"x": item["x"] + 1000 * (seed % 1000)},
    )


def batches_of(shard, spec, *, count, after="decode", records=None, engine="grain"):
    stages = stages_of(records or Records())
    pipeline = PipelineSpec(after, BATCH, seed=3, threads=0, prefetch=0, engine=engine)
    with closing(iter(train_dataset(stages, pipeline, spec, shard))) as batches:
        return list(itertools.islice(batches, count))


def joined(shards):
    """The batches of all shards: their rows one shard after another."""
    return [
        {name: np.concatenate([batch[name] for batch in rows]) for name in rows[0]}
        for rows in zip(*shards, strict=True)
    ]


ENGINES = ["grain", pytest.param("tfdata", marks=pytest.mark.slow)]


@pytest.mark.parametrize(
    ("engine", "of"),
    # As the other engine shows for four shards; TensorFlow builds a graph for each.
    [("grain", 2), ("grain", 4), pytest.param("tfdata", 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("after", ["read", "decode", "augment", "batch"])
def test_without_an_echo_the_shards_are_the_whole_stream(after, of, engine):
    spec = EchoSpec()
    whole = batches_of(SINGLE, spec, count=20, after=after)
    shards = [
        batches_of(DataShard(number, of), spec, count=20, after=after, engine=engine)
        for number in range(of)
    ]
    for ours, wanted in zip(joined(shards), whole, strict=True):
        for name in wanted:
            np.testing.assert_array_equal(ours[name], wanted[name])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("order", ["consecutive", "shuffle", "spread"])
@pytest.mark.parametrize("after", ["read", "decode", "augment"])
def test_an_echo_of_shards_uses_the_items_of_the_whole(after, order, engine):
    spec = EchoSpec(2, order=order, buffer=32)
    shards = [
        batches_of(DataShard(number, 2), spec, count=12, after=after, engine=engine)
        for number in range(2)
    ]
    fresh = batches_of(SINGLE, EchoSpec(), count=12, after="augment")
    first_use = {
        index: x
        for batch in fresh
        for index, x in zip(batch["fresh_index"].tolist(), batch["x"], strict=True)
    }
    seen = []
    for number, batches in enumerate(shards):
        for batch in batches:
            for index, repeat, x in zip(
                *(batch[name].tolist() for name in ("fresh_index", "repeat", "x")),
                strict=True,
            ):
                # Rows 4 to 7 of every fresh batch are the second shard's.
                assert index % BATCH // 4 == number
                seen.append((index, repeat))
                # The same augmentation, too, where it is the same use.
                if after == "augment" or repeat == 0:
                    assert x == first_use[index]
    assert len(seen) == len({*seen}) == 12 * BATCH


def test_no_record_is_read_by_two_shards_in_an_epoch():
    sources = [Records() for _ in range(4)]
    # 52 records are 6.5 batches, of which a shard makes 2 rows: an epoch ends within
    # a batch, of which the first half has been made by the first two shards.
    for number, records in enumerate(sources):
        batches_of(DataShard(number, 4), EchoSpec(), count=8, records=records)
    sizes = (14, 14, 12, 12)
    read = [records.read[:size] for records, size in zip(sources, sizes, strict=True)]
    assert sorted(itertools.chain(*read)) == list(range(52))


def test_fresh_batches_of_shards_are_rows_of_the_whole():
    pipeline = PipelineSpec("decode", BATCH, seed=3, threads=0)

    def take(shard):
        dataset = fresh_batches(stages_of(Records()), pipeline, shard)
        with closing(iter(dataset)) as batches:
            return list(itertools.islice(batches, 10))

    for ours, wanted in zip(
        joined([take(DataShard(0, 2)), take(DataShard(1, 2))]),
        take(SINGLE),
        strict=True,
    ):
        np.testing.assert_array_equal(ours["x"], wanted["x"])


def test_a_shard_goes_on_where_it_was_saved():
    spec = EchoSpec(2.5, order="spread", buffer=32)
    pipeline = PipelineSpec("decode", BATCH, seed=3, threads=0, prefetch=0)
    dataset = train_dataset(stages_of(Records()), pipeline, spec, DataShard(1, 2))
    with closing(iter(dataset)) as batches:
        list(itertools.islice(batches, 7))
        state = batches.get_state()
        wanted = list(itertools.islice(batches, 5))
    with closing(iter(dataset)) as batches:
        batches.set_state(state)
        for ours, other in zip(batches, wanted, strict=False):
            np.testing.assert_array_equal(ours["x"], other["x"])


@pytest.mark.parametrize("num_examples", [1, 3, 8, 9, 13, 16])
@pytest.mark.parametrize("of", [2, 4])
def test_every_example_is_evaluated_by_one_shard(num_examples, of):
    source = [bytes([index]) for index in range(num_examples)]

    def batches(shard):
        return eval_batches(
            source, lambda r: {"x": np.int64(r[0])}, batch_size=BATCH, shard=shard
        )

    whole, shards = (
        batches(SINGLE),
        [batches(DataShard(number, of)) for number in range(of)],
    )
    assert {len(shard) for shard in shards} == {len(whole)}
    together = joined(shards)
    for ours, wanted in zip(together, whole, strict=True):
        np.testing.assert_array_equal(ours["mask"], wanted["mask"])
        real = wanted["mask"] > 0
        np.testing.assert_array_equal(ours["x"][real], wanted["x"][real])


def test_shards_that_do_not_divide_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"config\.batch_size=8 is not a multiple of"):
        batches_of(DataShard(0, 3), EchoSpec(), count=1)
