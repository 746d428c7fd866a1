"""Runs over data with NaN in them: nothing of these is used, and they are counted."""

import functools
import io
from contextlib import closing

import numpy as np
import pytest
from rich.console import Console
from test_training_resume import exact, rows_of
from tiny_workload import (
    NUM_EXAMPLES,
    ON_DEVICE,
    STOCHASTIC,
    Regression,
    example,
    tiny_config,
)

import echo_jax as ej
from echo_jax.config import check_config
from echo_jax.data.pipeline import Stages
from echo_jax.terminal import sentence
from echo_jax.training import train
from echo_jax.workloads import make_workload

BAD = range(7, NUM_EXAMPLES, 14)
WAYS = {
    "decode": {"echo__after": "decode", "echo__order": "spread"},
    "batch": {"echo__after": "batch"},
    "stochastic": {**STOCHASTIC, "echo__where": "host", "echo__factor": 1.0},
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
    given = {"echo__factor": 1.5, "echo__buffer": 32, "data__max_bad": 9, **fields}
    config = tiny_config(**given)
    check_config(config)
    return config


def workload_of(config):
    return make_workload(
        config,
        task=Regression(),
        metric="loss",
        mode="min",
        stages=Stages(Records(), decode, shift),
        evaluated=Stages(8 * [b""], decode_evaluated),
        data_metadata={"synthetic": True},
        task_info={},
        augment_on_device=lambda batch, keys: batch,
    )


def run(workdir, console=None, **fields):
    config = config_of(**fields)
    return train(config, workload_of(config), workdir, console=console)


@functools.cache
def bad_places():
    """The places in the stream that have a bad item; the same for every echo."""
    config = config_of(data__max_bad=0, data__check_finite=False, echo__after="decode")
    batches = workload_of(config).train_dataset(ej.EchoSpec())
    with closing(iter(batches)) as iterator:
        x = np.concatenate([next(iterator)["x"] for _ in range(24)])
    return np.flatnonzero(np.isnan(x).any(axis=1))


@pytest.mark.parametrize("way", ["batch", "device"])
def test_a_bad_item_is_not_used_and_counted_also_by_a_resumed_run(tmp_path, way):
    whole = run(tmp_path / "whole", **WAYS[way])
    assert 0 < whole["skipped"] == (bad_places() < whole["fresh"]).sum()
    rows = rows_of(tmp_path / "whole")
    assert [row["skipped"] for row in rows] == [
        (bad_places() < row["fresh"]).sum() for row in rows
    ]
    # Where it stops, items in use are read again, and some of them are bad.
    for updates in (5, 12):
        parts = run(tmp_path / "parts", updates=updates, **WAYS[way])
    for name in ("params_sha256", "fresh", "repeats", "skipped"):
        assert parts[name] == whole[name]
    assert exact(rows_of(tmp_path / "parts")[-1]) == exact(rows[-1])


@pytest.mark.parametrize("way", ["batch", "device"])
def test_one_more_than_may_be_skipped_ends_the_run_before_it_is_used(tmp_path, way):
    text = io.StringIO()
    first, second = bad_places()[:2]
    said = r"^2 fresh items are bad, more than data.max_bad=1; the last is fresh item "
    with pytest.raises(ej.BadItemError, match=rf"{said}{second} \(record \d+\)"):
        run(tmp_path, Console(file=text, width=200), data__max_bad=1, **WAYS[way])
    assert f"skips fresh item {first} (record " in text.getvalue()
    assert "1 of 1 that may be skipped" in text.getvalue()
    # What is typed then goes on, from the last checkpoint or the start.
    assert run(tmp_path, data__max_bad=9, **WAYS[way])["skipped"] >= 2


@pytest.mark.parametrize("way", WAYS)
def test_by_default_the_first_ends_the_run_with_its_index(tmp_path, way):
    with pytest.raises(ej.BadItemError) as caught:
        run(tmp_path, data__max_bad=0, **WAYS[way])
    line = sentence(caught.value)
    assert line.startswith(f"fresh item {bad_places()[0]} (record ")
    assert (
        "item['x'] holds NaN or infinity in 1 of 4 values" in line and "\n" not in line
    )
