"""Runs over data with NaN in them: the first one ends the run, by its name."""

import functools
from contextlib import closing

import numpy as np
import pytest
from tiny_workload import (
    NUM_EXAMPLES,
    ON_DEVICE,
    STOCHASTIC,
    Regression,
    example,
    tiny_config,
)

import echo_jax as ej
from echo_jax.config import RunSpec
from echo_jax.data.pipeline import Stages
from echo_jax.terminal import sentence
from echo_jax.training import train
from echo_jax.workloads import assembly

BAD = range(7, NUM_EXAMPLES, 14)
WAYS = {
    "decode": {"echo__stage": "decode", "echo__order": "spread"},
    "batch": {"echo__stage": "batch"},
    "stochastic": {**STOCHASTIC, "echo__buffer_on": "host", "echo__factor": 1.0},
    "device": ON_DEVICE,
}


class Records:
    def __len__(self):
        return NUM_EXAMPLES

    def __getitem__(self, index):
        return index.to_bytes(2, "big")


def decode(record):
    index = int.from_bytes(record, "big")
    item = example(index)
    if index in BAD:
        item["x"][1] = np.nan
    return {"x": item["x"], "y": np.float32(item["y"])}


def decode_evaluated(record):
    return {"x": np.zeros(4, np.float32), "y": np.float32(1)}


def shift(item, seed):
    return {**item, "y": item["y"] + np.float32(seed % 3)}


def config_of(**fields):
    given = {"echo__factor": 1.5, "echo__buffer": 32, **fields}
    config = tiny_config(**given)
    return RunSpec.of(config)


def workload_of(config):
    return assembly.make_workload(
        config,
        lambda *_: Regression(),
        {},
        stages=Stages(Records(), decode, shift),
        evaluated=Stages(8 * [b""], decode_evaluated),
        data_metadata={"synthetic": True},
        augment_on_device=lambda batch, keys: batch,
    )


def run(workdir, **fields):
    config = config_of(**fields)
    return train(config, workload_of(config), workdir)


@functools.cache
def bad_places():
    """The places in the stream that have a bad item; the same for every echo."""
    config = config_of(data__check_finite=False, echo__stage="decode")
    batches = workload_of(config).train_dataset(ej.EchoSpec())
    with closing(iter(batches)) as iterator:
        x = np.concatenate([next(iterator)["x"] for _ in range(24)])
    return np.flatnonzero(np.isnan(x).any(axis=1))


@pytest.mark.parametrize("way", WAYS)
def test_the_first_bad_item_ends_the_run_with_its_index(tmp_path, way):
    with pytest.raises(ej.BadItemError) as caught:
        run(tmp_path, **WAYS[way])
    line = sentence(caught.value)
    assert line.startswith(f"fresh item {bad_places()[0]} (record ")
    assert (
        "item['x'] holds NaN or infinity in 1 of 4 values" in line and "\n" not in line
    )
