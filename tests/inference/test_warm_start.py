import itertools
import json
import shutil

import numpy as np
import pytest
from slow_cases import slow_but_for
from trained_runs import lm_config, write_text

import echo_jax as ej
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json
from echo_jax.inference.export import export_run
from echo_jax.runs import run_train
from echo_jax.training.saving.weights import flat_arrays


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def begin(text, workdir, source, **overrides):
    """Begins a run with another one; returns what it wrote down of that."""
    overrides = {"init_from": str(source), "updates": 2, **overrides}
    run_train(lm_config(text, **overrides), workdir)
    environment = read_json(run_folder(workdir) / "environment.json")
    assert environment is not None
    return environment["init_from"]


def first_loss(workdir):
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return next(row["eval_loss"] for row in rows if "eval_loss" in row)


@pytest.mark.parametrize(
    ("kind", "schedule"),
    slow_but_for(
        [("safetensors", "none")],
        itertools.product(["run", "safetensors"], ["none", "every"]),
    ),
)
def test_a_run_begins_where_the_other_ended(kind, schedule, lm_run, text, tmp_path):
    folder, summary = lm_run
    source = folder
    if kind == "safetensors":
        source = export_run(ej.load_run(folder), kind, tmp_path / "m.safetensors")
    overrides = {"local.schedule": schedule, "mesh.data": 2, "optim.lr": 0.01}
    report = begin(text, tmp_path / "run", source, **overrides)
    names = sorted(flat_arrays(ej.load_run(folder).variables))
    assert report["taken"] == names
    assert (report["skipped"], report["made"]) == ({}, [])
    wanted = summary["final"]["loss"]
    assert first_loss(tmp_path / "run") == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_what_does_not_fit_is_made_anew_and_said(lm_run, text, tmp_path, capsys):
    report = begin(text, tmp_path / "run", lm_run[0], **{"model.d_ff": 8})
    name = "params/block_0/ff_in/kernel"
    assert report["skipped"][name] == "(8, 16) there, (8, 8) here"
    assert set(report["made"]) == {name, "params/block_0/ff_out/kernel"}
    assert (
        "2 skipped: params/block_0/ff_in/kernel ((8, 16) there"
        in capsys.readouterr().out
    )
    # What is made anew is what a run from scratch would begin with.
    config = lm_config(text, **{"model.d_ff": 8, "updates": 2})
    config.optim.lr = 1e-30
    run_train(config, tmp_path / "scratch")
    config.init_from = str(lm_run[0])
    run_train(config, tmp_path / "warm")
    scratch, warm = (
        flat_arrays(ej.load_run(tmp_path / name).variables)
        for name in ("scratch", "warm")
    )
    source = flat_arrays(ej.load_run(lm_run[0]).variables)
    for key, array in warm.items():
        wanted = scratch[key] if key in report["made"] else source[key]
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.usefixtures("compiled_soon")
def test_arrays_of_other_models_are_left_out(shapes_run, lm_run, text, tmp_path):
    with pytest.raises(ValueError, match="has no array that this model has, too"):
        begin(text, tmp_path / "run", shapes_run[0])
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    with pytest.raises(ValueError, match=r"init_from='.*/no': .* no checkpoint yet"):
        begin(text, tmp_path / "run", tmp_path / "no")
    with pytest.raises(ValueError, match=r"config.init_from='.*': there is no file"):
        begin(text, tmp_path / "run", tmp_path / "no.safetensors")


def test_a_resumed_run_does_not_need_the_other_one(lm_run, text, tmp_path):
    shutil.copytree(lm_run[0], tmp_path / "source")
    config = lm_config(text, init_from=str(tmp_path / "source"))
    whole = run_train(config, tmp_path / "whole")
    config.updates = 2
    run_train(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "source")
    config.updates = 4
    assert (
        run_train(config, tmp_path / "run")["params_sha256"] == whole["params_sha256"]
    )
    environment = read_json(run_folder(tmp_path / "run") / "environment.json")
    assert environment and len(environment["init_from"]["taken"]) > 10
