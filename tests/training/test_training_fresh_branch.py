"""Branches on fresh data alone, which say what the repeats of a run are worth."""

import signal
from dataclasses import replace

import numpy as np
import pytest
from tiny_workload import make_workload, rows_of, stop_at, tiny_config

from echo_jax.config.check import check_config
from echo_jax.studies.runs import read_run, read_runs
from echo_jax.studies.table import notes
from echo_jax.training import train
from echo_jax.training.processes.interrupt import Interrupted

ECHOES = {
    "host": {"echo__factor": 2.0, "echo__order": "shuffle", "echo__buffer": 4},
    "device": {
        "echo__factor": 2.0,
        "echo__after": "decode",
        "echo__where": "device",
        "echo__order": "spread",
        "echo__buffer": 16,
    },
}


def run(workdir, *, constant=False, on_batch=None, every=6, seeds=None, **overrides):
    seeds = [] if seeds is None else seeds
    config = tiny_config(eval_every=3, probe_repeats=every, **overrides)
    workload = make_workload(config, on_batch=on_batch)

    def with_seed(seed):
        seeds.append(seed)
        other = tiny_config(**overrides)
        other.seed = seed % 2**31
        return filled(make_workload(other))

    def filled(workload):
        if not constant:
            return workload
        datasets = {}
        for name in ("train_dataset", "fresh_dataset"):
            make = getattr(workload, name)

            def all_alike(*args, make=make):
                return make(*args).map(
                    lambda batch: {
                        k: np.ones_like(x) if k in "xy" else x for k, x in batch.items()
                    }
                )

            datasets[name] = all_alike
        return replace(workload, **datasets)

    metadata = {"data": {"synthetic": True}}
    workload = replace(filled(workload), with_seed=with_seed, metadata=metadata)
    return train(config, workload, workdir)


def evals_of(workdir):
    return [row for row in rows_of(workdir) if row["kind"] == "eval"]


@pytest.mark.parametrize("echo", ECHOES)
def test_a_branch_changes_nothing_of_the_run(tmp_path, echo):
    with_branches = run(tmp_path / "a", **ECHOES[echo])
    without = run(tmp_path / "b", every=0, **ECHOES[echo])
    assert with_branches["params_sha256"] == without["params_sha256"]
    rows = evals_of(tmp_path / "a")
    # Not before the first update, nor where no evaluation follows.
    assert [row["updates"] for row in rows if "after_fresh" in row] == [6]
    for one, other in zip(rows, evals_of(tmp_path / "b"), strict=True):
        assert one["eval_loss"] == other["eval_loss"]
        assert one["fresh"] == other["fresh"]


@pytest.mark.parametrize("echo", ECHOES)
def test_on_the_same_data_a_branch_ends_where_the_run_does(tmp_path, echo):
    run(tmp_path, constant=True, **ECHOES[echo])
    rows = {row["updates"]: row for row in evals_of(tmp_path)}
    assert rows[6]["after_fresh"] == rows[9]["eval_loss"] != rows[6]["eval_loss"]


def test_a_branch_trains_on_other_data_and_again_on_the_same(tmp_path):
    run(tmp_path / "a", **ECHOES["host"])
    run(tmp_path / "b", **ECHOES["host"])
    first, second = (
        {row["updates"]: row for row in evals_of(tmp_path / name)} for name in "ab"
    )
    assert first[6]["after_fresh"] == second[6]["after_fresh"]
    assert first[6]["after_fresh"] != first[9]["eval_loss"]


def test_every_branch_has_an_order_of_its_own(tmp_path):
    seeds = []
    run(tmp_path / "a", updates=18, seeds=seeds)
    run(tmp_path / "b", updates=18, seeds=seeds, seed=1)
    assert len(seeds) == len({0, 1, *seeds}) - 2 == 4


def test_a_run_that_was_stopped_has_the_same_branches(tmp_path):
    long = {"updates": 18, **ECHOES["host"]}
    run(tmp_path / "whole", **long)
    with pytest.raises(Interrupted):
        run(tmp_path / "cut", on_batch=stop_at(8, signal.SIGTERM), **long)
    run(tmp_path / "cut", **long)
    branches = [
        [(row["updates"], row.get("after_fresh")) for row in evals_of(tmp_path / name)]
        for name in ("whole", "cut")
    ]
    assert branches[0] == branches[1]
    assert sum(value is not None for _, value in branches[0]) == 2


def test_a_report_says_what_repeats_were_worth(tmp_path):
    run(tmp_path, updates=18, **ECHOES["host"])
    found = read_run(tmp_path)
    assert len(found.branches) == 2
    rows = {row["updates"]: row for row in evals_of(tmp_path)}
    first = found.branches[0]
    assert (first.start, first.echoed) == (rows[6]["eval_loss"], rows[9]["eval_loss"])
    assert first.fresh_part == (rows[9]["fresh"] - rows[6]["fresh"]) / 24
    assert any("by 2 branches on fresh data" in n for n in notes(read_runs([tmp_path])))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"probe_repeats": 5}, "must be a multiple of config.eval_every=6"),
        ({"local__schedule": "every"}, "does not go with config.local.schedule"),
        ({"data__hold_batch": True}, "does not go with config.data.hold_batch"),
        ({"probe_repeats": -6}, "must be at least 0"),
    ],
)
def test_branches_that_nothing_could_be_compared_with_are_refused(fields, says):
    with pytest.raises(ValueError, match=rf"config\.probe_repeats=-?\d+ {says}"):
        check_config(tiny_config(**{"probe_repeats": 6, **fields}))


def test_a_workload_of_one_order_is_refused_before_anything_is_written(tmp_path):
    config = tiny_config(probe_repeats=6)
    with pytest.raises(ValueError, match="needs a workload with with_seed"):
        train(config, make_workload(config), tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()
