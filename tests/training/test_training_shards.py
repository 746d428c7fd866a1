"""Data shards that one process makes are one stream again."""

import itertools
from contextlib import closing

import grain
import numpy as np
from tiny_workload import make_workload, tiny_config

from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.feeds.feed import JoinedBatches

SPEC = EchoSpec(2, 4, "consecutive", 1)
HALVES = [DataShard(0, count=2), DataShard(1, count=2)]


def joined(shards):
    workload = make_workload(tiny_config())
    return JoinedBatches([workload.train_dataset(SPEC, shard) for shard in shards])


def assert_equal(batches, others):
    for one, other in zip(batches, others, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_shards_make_the_rows_of_the_whole_in_its_order():
    with closing(joined([SINGLE])) as whole, closing(joined(HALVES)) as halves:
        assert_equal(itertools.islice(halves, 6), itertools.islice(whole, 6))


def test_they_go_on_from_the_states_of_all_shards():
    with closing(joined(HALVES)) as first, closing(joined(HALVES)) as again:
        next(first)
        state = first.get_state()
        assert len(state) == 2
        again.set_state(state)
        assert_equal(itertools.islice(again, 4), itertools.islice(first, 4))
        # A process for each of them goes on as well.
        with closing(joined(HALVES[1:])) as second:
            second.set_state(state[1:])
            again.set_state(state)
            assert_equal([next(second)], [{k: x[4:] for k, x in next(again).items()}])


def test_they_end_with_the_first_that_ends():
    items = grain.MapDataset.source([{"x": np.arange(2)}] * 5)
    shards = [items[:length].to_iter_dataset() for length in (5, 3)]
    assert len([*JoinedBatches(shards)]) == 3
