"""A run's weights and program as files, and runs that begin with them."""

import json
import os
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from trained_runs import lm_config, write_text

import echo_jax as ej
from echo_jax.files import FolderError, read_json, run_folder
from echo_jax.inference import export_run
from echo_jax.runs import run_train
from echo_jax.training.saving import flat_arrays, read_weights, write_weights


def test_weights_are_read_back_to_the_bit_with_what_they_mean(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    file = export_run(run, "safetensors", tmp_path / "m.safetensors")
    found, wanted = read_weights(str(file)), flat_arrays(run.variables)
    assert found.keys() == wanted.keys()
    assert {name.split("/")[0] for name in found} == {"params", "batch_stats"}
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(str(file), framework="np") as opened:
        metadata = {k: json.loads(v) for k, v in opened.metadata().items()}
    assert metadata["task"]["classes"] == run.classes
    assert metadata["config"]["model"] == run.config.model.to_dict()
    assert metadata["update"] == 2


def test_arrays_of_any_layout_and_type_are_read_back(tmp_path):
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    arrays = {
        "turned": rows.T,
        "every_other": rows[:, ::2],
        "half": jnp.ones((2, 3), jnp.bfloat16) / 3,
        "one": np.float32(7.0).reshape(()),
        "none": np.zeros((0, 3), np.int8),
    }
    write_weights(tmp_path / "a.safetensors", {"params": arrays}, {})
    found = read_weights(tmp_path / "a.safetensors")
    for name, array in arrays.items():
        got = found[f"params/{name}"]
        assert got.dtype == array.dtype and got.shape == array.shape
        np.testing.assert_array_equal(got, np.asarray(array))


def test_whatever_bit_of_an_array_has_changed_is_seen(tmp_path):
    file = tmp_path / "a.safetensors"
    arrays = {"a": np.arange(6, dtype=np.float32), "b": jnp.ones(4, jnp.bfloat16)}
    write_weights(file, {"params": arrays}, {"update": 3})
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    assert len(whole) - start == 6 * 4 + 4 * 2
    for bit in range(8 * start, 8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with pytest.raises(FolderError, match=r"is damaged: .params/[ab]. is not what"):
            read_weights(file)
    for before, after, said in (
        (b"params/a", b"params/c", "its hashes do not match its arrays"),
        (b'{\\"params', b'[\\"params', "its hashes cannot be read"),
    ):
        file.write_bytes(whole.replace(before, after, 1))
        with pytest.raises(FolderError, match=f"is damaged: {said}"):
            read_weights(file)


def test_files_of_others_are_read_or_refused(tmp_path):
    save_file({"params/a": np.ones(3)}, tmp_path / "a.safetensors")
    (tmp_path / "link.safetensors").symlink_to("a.safetensors")
    (found,) = read_weights(tmp_path / "link.safetensors").values()
    np.testing.assert_array_equal(found, np.ones(3))
    (tmp_path / "x").write_bytes(b"nothing of the kind, and long enough")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    for name, said in {
        "x": "is no file of safetensors",
        "y": "there is no file",
        "pipe": "is no file; name one of safetensors",
        "to_pipe": "is no file; name one of safetensors",
    }.items():
        with pytest.raises(FolderError, match=said):
            read_weights(tmp_path / name)


@pytest.mark.slow
def test_a_program_predicts_alike_for_batches_of_any_size(lm_run, tmp_path):
    rng = np.random.default_rng(0)
    run = ej.load_run(lm_run[0])
    file = export_run(run, "stablehlo", tmp_path / "m.stablehlo")
    program = jax.export.deserialize(bytearray(run_folder(file).read_bytes()))
    assert program.platforms == ("cpu", "cuda", "tpu")
    for size in (1, 5):
        batch = {"tokens": rng.integers(0, 255, (size, 16), np.int32)}
        found, wanted = program.call(batch), run.predict(batch)
        assert found.keys() == wanted.keys() == {"logits"}
        np.testing.assert_allclose(found["logits"], wanted["logits"], 1e-5, 1e-6)


def test_a_file_that_cannot_be_made_is_said_with_the_fix(lm_run, tmp_path, monkeypatch):
    run = ej.load_run(lm_run[0])
    for package, to in (("safetensors", "safetensors"), ("flatbuffers", "stablehlo")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'echo-jax\[export"):
            export_run(run, to, tmp_path / "m")
        assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match="to='onnx' is unknown; use one of"):
        export_run(run, "onnx")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


def begin(text, workdir, source, **overrides):
    """Begins a run with another one; returns what it wrote down of that."""
    overrides = {"init_from": str(source), "updates": 2, **overrides}
    run_train(lm_config(text, **overrides), workdir)
    return read_json(run_folder(workdir) / "environment.json")["init_from"]


@pytest.mark.usefixtures("compiled_soon")
def test_a_run_begins_where_the_other_ended(lm_run, text, tmp_path):
    run, summary = ej.load_run(lm_run[0]), lm_run[1]
    source = export_run(run, "safetensors", tmp_path / "m.safetensors")
    report = begin(text, tmp_path / "run", source)
    assert report["taken"] == sorted(flat_arrays(run.variables))
    assert (report["skipped"], report["made"]) == ({}, [])
    rows = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    first = next(row["eval_loss"] for row in rows if "eval_loss" in row)
    assert first == pytest.approx(summary["final"]["loss"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_what_does_not_fit_is_made_anew_and_said(lm_run, text, tmp_path, capsys):
    other = {"model.d_ff": 8, "optim.lr": 1e-30}
    report = begin(text, tmp_path / "warm", lm_run[0], **other)
    name = "params/block_0/ff_in/kernel"
    assert report["skipped"][name] == "(8, 16) there, (8, 8) here"
    assert set(report["made"]) == {name, "params/block_0/ff_out/kernel"}
    said = "2 skipped: params/block_0/ff_in/kernel ((8, 16) there"
    assert said in capsys.readouterr().out
    warm, source = (
        flat_arrays(ej.load_run(each).variables)
        for each in (tmp_path / "warm", lm_run[0])
    )
    for key, array in warm.items():
        if key in report["made"]:
            assert 0.1 < np.std(array) < 1  # Drawn, as at any beginning.
        else:
            np.testing.assert_array_equal(array, source[key])


@pytest.mark.usefixtures("compiled_soon")
def test_arrays_of_other_models_are_left_out(shapes_run, text, tmp_path):
    for source, said in (
        (shapes_run[0], "has no array that this model has, too"),
        (tmp_path / "no", r"init_from='.*/no': .* no checkpoint yet"),
        (tmp_path / "no.safetensors", r"config.init_from='.*': there is no file"),
    ):
        with pytest.raises(ValueError, match=said):
            begin(text, tmp_path / "run", source)
        assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.usefixtures("compiled_soon")
def test_a_resumed_run_does_not_need_the_other_one(lm_run, text, tmp_path):
    shutil.copytree(lm_run[0], tmp_path / "source")
    config = lm_config(text, init_from=str(tmp_path / "source"))
    whole = run_train(config, tmp_path / "whole")
    report = begin(text, tmp_path / "run", tmp_path / "source")
    assert len(report["taken"]) > 10
    shutil.rmtree(tmp_path / "source")
    resumed = run_train(config, tmp_path / "run")
    assert resumed["params_sha256"] == whole["params_sha256"]
