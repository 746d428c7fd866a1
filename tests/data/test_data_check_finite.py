"""Fresh items that are not finite: never used, whatever runs the pipeline."""

from contextlib import closing

import numpy as np
import pytest
from test_data_pipeline import (
    BATCH_SIZE,
    ECHOES,
    NUM_RECORDS,
    PLACEMENTS,
    assert_equal,
    assert_resumes_at,
    augment,
)
from test_data_pipeline import decode as decode_number

from echo_jax.data.pipeline import check_finite, stages
from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches, train_dataset
from echo_jax.data.pipeline.stages import Stages
from echo_jax.echo.finite import BadItemError, is_finite
from echo_jax.echo.shard import DataShard
from echo_jax.echo.spec import AdaptiveSpec, EchoSpec

BAD = {3, 11, 12, 40}
SKIPPING = PLACEMENTS[1:]  # a record is echoed before anybody can look into it


class Records:
    """Record i is the number i, in two bytes."""

    def __len__(self):
        return NUM_RECORDS

    def __getitem__(self, index):
        return index.to_bytes(2, "big")


def decode(record):
    item = decode_number(record)
    x = item["x"].astype(np.float32)
    if x[0] in BAD:
        x[1:] = np.nan, -np.inf
    return {**item, "x": x}


STAGES = Stages(Records(), decode, augment)


def spec_of(after, **fields):
    fields = {"seed": 3, "max_bad": 100, **fields}
    return PipelineSpec(after, BATCH_SIZE, **fields)


def make(after="decode", spec=ECHOES["spread"], stages=STAGES, shard=None, **fields):
    shard = shard or DataShard()
    if after == "read":
        fields["max_bad"] = 0
    return train_dataset(stages, spec_of(after, **fields), spec, shard)


def take(dataset, count):
    with closing(iter(dataset)) as batches:
        return [next(batches) for _ in range(count)]


def numbers_of(batches):
    return np.concatenate([batch["x"][:, 0] for batch in batches]).astype(int)


@pytest.fixture(scope="module")
def records():
    """The records of the stream in order, bad ones too, and those that are used."""
    fields = {"check_finite": False, "max_bad": 0}
    batches = take(make(spec=EchoSpec(), **fields), 8 * NUM_RECORDS // BATCH_SIZE)
    every = numbers_of(batches).tolist()
    used = list(every[:200])
    for index in range(len(used)):
        place = index
        while every[place] in BAD:
            place += NUM_RECORDS
        used[index] = every[place]
    return every, np.array(used)


@pytest.mark.parametrize("after", SKIPPING)
@pytest.mark.parametrize("order", ECHOES)
def test_another_item_takes_the_place_of_a_bad_one_and_it_is_counted(
    after, order, records
):
    every, used = records
    dataset = make(after, ECHOES[order])
    counted, expected = [], set()
    with closing(iter(dataset)) as batches:
        for _ in range(30):
            batch = next(batches)
            fresh, repeat = batch["fresh_index"], batch["repeat"]
            found = dataset.bad_items.take(fresh, repeat)
            counted += found
            if after == "batch":
                fresh = fresh * BATCH_SIZE + np.arange(BATCH_SIZE)
            np.testing.assert_array_equal(
                batch["x"], np.repeat(used[fresh], 3).reshape(-1, 3)
            )
            first = fresh[repeat == 0].tolist()
            expected |= {index for index in first if every[index] in BAD}
    assert expected and sorted(bad.index for bad in counted) == sorted(expected)
    assert all(bad.record == every[bad.index] for bad in counted)
    assert counted[0].what == "item['x'] holds 1 NaN and 1 infinity in 3 values"


@pytest.mark.parametrize("after", SKIPPING)
def test_threads_and_prefetching_change_nothing(after):
    expected = take(make(after, threads=0, prefetch=0), 25)
    for threads, prefetch in [(1, 4), (4, 1)]:
        assert_equal(
            take(make(after, threads=threads, prefetch=prefetch), 25), expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("after", ["decode", "batch"])
def test_workers_change_nothing_and_tell_what_was_bad(after):
    dataset = make(after, workers=2)
    assert_equal(take(dataset, 25), take(make(after), 25))
    everywhere = np.arange(100)
    assert dataset.bad_items.take(everywhere, np.zeros_like(everywhere))


@pytest.mark.slow
def test_a_worker_says_which_item_is_bad():
    with pytest.raises(BadItemError, match=r"fresh item \d+ \(record \d+\)"):
        take(make(workers=1, max_bad=0), 25)


@pytest.mark.parametrize("after", SKIPPING)
@pytest.mark.parametrize("order", ["identity", "spread", "adaptive"])
def test_resumes_at_every_position(after, order):
    assert_resumes_at(make(after, ECHOES[order]), range(24))


def test_shards_use_the_items_of_one_process(records):
    _, used = records
    for index in range(2):
        for batch in take(make(spec=ECHOES["shuffle"], shard=DataShard(index, 2)), 20):
            assert (batch["x"][:, 0] == used[batch["fresh_index"]]).all()


def test_fresh_batches_for_the_devices_hold_them_too(records):
    dataset = fresh_batches(STAGES, spec_of("decode"))
    assert numbers_of(take(dataset, 25)).tolist() == records[1][:100].tolist()
    index = np.arange(100)
    found = [bad.index for bad in dataset.bad_items.take(index, 0 * index)]
    assert found == [i for i in range(100) if records[0][i] in BAD]


@pytest.mark.parametrize("after", PLACEMENTS)
@pytest.mark.parametrize("order", ["identity", "spread", "adaptive"])
def test_without_a_limit_the_first_is_an_error_that_names_it(after, order, records):
    every, _ = records
    first = next(index for index, record in enumerate(every) if record in BAD)
    said = (
        rf"^fresh item {first} \(record {every[first]}\): item\['x'\] holds 1 NaN "
        r"and 1 infinity in 3 values; mend the record, .*--config.data.max_bad=1"
    )
    with pytest.raises(BadItemError, match=said):
        take(make(after, ECHOES[order], max_bad=0, threads=0, prefetch=0), 40)


@pytest.mark.parametrize("after", PLACEMENTS)
def test_it_can_be_left_out(after, monkeypatch):
    looked_at = []

    def look(item):
        looked_at.append(item)
        return is_finite(item)

    for module in (check_finite, stages):
        monkeypatch.setattr(module, "is_finite", look)
    fields = {"threads": 0, "prefetch": 0, "max_bad": 0}
    batches = take(make(after, EchoSpec(), check_finite=False, **fields), 40)
    assert not np.isfinite(np.concatenate([batch["x"] for batch in batches])).all()
    assert not looked_at
    with pytest.raises(BadItemError):
        take(make(after, EchoSpec(), **fields), 40)
    assert looked_at


def test_an_item_is_looked_at_once_however_often_it_is_used(monkeypatch):
    """Where it is decoded behind the echo, at its first use."""
    looked_at = []

    def look(item):
        looked_at.append(item)
        return True

    for module in (check_finite, stages):
        monkeypatch.setattr(module, "is_finite", look)
    for after in ("decode", "read"):
        looked_at.clear()
        fields = {"threads": 0, "prefetch": 0, "max_bad": 0}
        take(make(after, EchoSpec(4), **fields), 16)
        assert len(looked_at) == 16


def test_data_without_a_finite_item_is_an_error():
    def decode_nan(record):
        return {"x": np.full(2, np.nan)}

    with pytest.raises(BadItemError, match=r"fresh item 0 .* 100 epochs after it"):
        take(make(stages=Stages(Records(), decode_nan), threads=0, prefetch=0), 1)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_bad": -1}, "data.max_bad=-1 is too small"),
        ({"check_finite": False}, "data.max_bad=100 needs --config.data.check_finite"),
        ({"after": "read"}, "data.max_bad=100 .* use --config.data.max_bad=0, or"),
    ],
)
def test_what_cannot_be_skipped_is_refused(fields, named):
    with pytest.raises(ValueError, match=named):
        spec_of(**{"after": "decode", **fields})


def writes(item, seed):
    item["x"] *= 2
    return item


def writes_to_a_part(item, seed):
    part = {**item, "x": item["x"][1:]}
    part["x"][0] = seed % 7
    return part


@pytest.mark.parametrize("order", [*ECHOES, "adaptive-live"])
@pytest.mark.parametrize("after", PLACEMENTS)
def test_a_transform_that_writes_into_its_input_is_found(after, order):
    """At its first item, with every order, mode, factor and placement."""
    spec = AdaptiveSpec(buffer=12) if order == "adaptive-live" else ECHOES[order]
    for transform in (writes, writes_to_a_part):
        writing = Stages(Records(), decode_number, transform)
        with pytest.raises(ValueError, match=r"^augment writes into .*read-only"):
            take(make(after, spec, writing), 1)


@pytest.mark.parametrize("after", PLACEMENTS)
def test_so_is_a_decoder_that_writes_into_a_record(after):
    """Where a source keeps its records, the next epoch would read what it wrote."""

    class Arrays(Records):
        kept = tuple(np.array([float(i)]) for i in range(NUM_RECORDS))

        def __getitem__(self, index):
            return self.kept[index]

    def decode_writing(record):
        record += 1
        return {"x": record}

    writing = Stages(Arrays(), decode_writing)
    with pytest.raises(ValueError, match=r"^decode writes into the item"):
        take(make(after, EchoSpec(), writing, max_bad=0), 1)
    assert [float(each[0]) for each in Arrays.kept] == list(range(NUM_RECORDS))
