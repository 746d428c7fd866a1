import json
import os
import re
import shutil
from pathlib import Path

import cv2
import jax
import numpy as np
import pytest
from text_folders import prepare
from trained_runs import lm_config, shapes_config, write_text

import echo_jax as ej
from echo_jax.data.prepare.tokenizer import SubwordTokenizer
from echo_jax.data.sources.shapes import CLASS_NAMES
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import DamagedFileError, write_json
from echo_jax.inference.evaluate import evaluate_run
from echo_jax.runs import run_train
from echo_jax.training.saving.checkpoint import params_sha256
from echo_jax.workloads import build


def copied(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def listing(folder):
    paths = [folder, *sorted(folder.rglob("*"))]
    return [(str(path), path.stat().st_mtime_ns, path.stat().st_size) for path in paths]


def test_the_model_is_that_of_the_last_update_to_the_bit(lm_run, shapes_run):
    for folder, summary in (lm_run, shapes_run):
        run = ej.load_run(folder)
        assert run.update == summary["updates"]
        assert params_sha256(run.variables["params"]) == summary["params_sha256"]


def test_an_evaluation_is_that_of_the_training_to_the_bit(shapes_run):
    folder, summary = shapes_run
    found = evaluate_run(ej.load_run(folder))
    assert found.metrics == summary["final"]
    assert (found.metric, found.source, found.split) == ("accuracy", "synthetic", "")


def test_the_summary_of_a_classifier_names_its_classes(shapes_run, lm_run):
    kept = json.loads((shapes_run[0] / "summary.json").read_text())
    assert kept["classes"] == list(CLASS_NAMES) and "classes" not in lm_run[1]


def test_nothing_in_the_folder_changes_not_even_what_is_being_saved(lm_run, tmp_path):
    folder = copied(lm_run[0], tmp_path)
    unfinished = folder / "checkpoints" / "6.orbax-checkpoint-tmp"
    shutil.copytree(folder / "checkpoints" / "4", unfinished)
    before = listing(folder)
    for path in folder.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    assert ej.load_run(folder).update == 4
    assert listing(folder) == before


def test_any_checkpoint_can_be_loaded_and_others_are_named(lm_run):
    folder, _ = lm_run
    run = ej.load_run(folder, 2)
    assert run.update == 2
    assert params_sha256(run.variables) != params_sha256(ej.load_run(folder).variables)
    with pytest.raises(ValueError, match=r"no checkpoint of update 3; it holds 2, 4"):
        ej.load_run(folder, 3)


def largest_file_of(checkpoint, within="state"):
    files = checkpoint.glob(f"{within}/**/*")
    return max((path for path in files if path.is_file()), key=os.path.getsize)


ZSTANDARD_FRAME = b"\x28\xb5\x2f\xfd"


def arrays_in(file):
    """The places in the middle of each compressed array of a file of a checkpoint."""
    data = file.read_bytes()
    starts = [found.start() for found in re.finditer(re.escape(ZSTANDARD_FRAME), data)]
    ends = [*starts[1:], len(data)]
    return [(start + end) // 2 for start, end in zip(starts, ends, strict=True)]


def test_no_flipped_bit_makes_another_model(lm_run, tmp_path):
    folder = copied(lm_run[0], tmp_path)
    checkpoint = folder / "checkpoints" / "4"
    # Large files have no sum there, and are seen by the sums of the arrays alone.
    (folder / "checkpoints" / "4.sums.json").unlink()
    wanted = params_sha256(ej.load_run(folder, 4).variables)
    said = []
    # Which array lies in which file follows from which thread wrote it first.
    for file in sorted(checkpoint.glob("state/**/d/*")):
        whole = file.read_bytes()
        for place in arrays_in(file):
            data = bytearray(whole)
            data[place] ^= 1
            file.write_bytes(data)
            try:
                # What is not of the model, such as the optimizer's, is not read.
                assert params_sha256(ej.load_run(folder, 4).variables) == wanted
            except ValueError as error:
                said.append(str(error))
        file.write_bytes(whole)
    assert any("arrays are not what was saved" in line for line in said), said


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(lm_run, tmp_path):
    folder = copied(lm_run[0], tmp_path)
    largest = largest_file_of(folder / "checkpoints" / "4")
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.warns(UserWarning, match=r"update 4 in .*; that of update 2 is used"):
        run = ej.load_run(folder)
    assert run.update == 2
    with pytest.raises(ValueError, match="update 4 in"):
        ej.load_run(folder, 4)


def widen(run):
    """Has the config of a run say that its model is wider than it is."""
    config = json.loads((run / "config.json").read_text())
    del config["crc32"]
    config["model"]["d_ff"] *= 2
    write_json(run_folder(run) / "config.json", config)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda run: shutil.rmtree(run), "holds no config.json, so it is no run"),
        (lambda run: (run / "task.json").unlink(), "holds no task.json, which says"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint yet"),
        (
            lambda run: [shutil.rmtree(run / "checkpoints" / n) for n in ("2", "4")],
            "holds no whole checkpoint yet",
        ),
        (lambda run: (run / "task.json").write_text("{}"), "it lacks 'info'"),
        (
            lambda run: (run / "task.json").write_text('{"info": {}, "files": {}}'),
            "task.json is damaged: it does not fit config",
        ),
        (
            lambda run: (run / "task.json").write_text(
                '{"info": {}, "files": {"../run/config.json": "0"}}'
            ),
            "'..' is no name",
        ),
        (widen, r"config\.json is damaged: the checkpoint holds another model"),
    ],
)
def test_what_is_missing_or_damaged_is_said(damage, says, lm_run, tmp_path):
    folder = copied(lm_run[0], tmp_path)
    damage(folder)
    with pytest.raises((ValueError, OSError), match=says):
        ej.load_run(folder)


def test_a_text_needs_no_data_and_an_evaluation_says_what_it_lacks(lm_run):
    run = ej.load_run(lm_run[0])
    assert run.is_of_text and run.classes == []
    outputs = run.predict(["99 bottles", "7"])
    assert outputs["logits"].shape == (2, 16, 256)
    with pytest.raises(FileNotFoundError, match=r"text\.txt"):
        evaluate_run(run)


def test_logits_do_not_depend_on_what_is_behind_a_text(lm_run):
    run = ej.load_run(lm_run[0])
    together = run.predict(["99 bottles", "7"])["logits"]
    alone = run.predict(["7"])["logits"]
    np.testing.assert_allclose(together[1, 0], alone[0, 0], rtol=1e-5, atol=1e-6)
    read = run.read(["99 bottles", "7"])
    assert read["length"].tolist() == [10, 1]
    assert bytes(read["tokens"][0, :10].tolist()) == b"99 bottles"
    with pytest.raises(ValueError, match="a text of 17 tokens is longer than the mod"):
        run.read(["x" * 17])


def test_images_are_read_as_in_evaluation_and_of_any_size(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    assert run.classes == list(CLASS_NAMES)
    (batch, *_) = build(run.config).eval_batches()
    files = [tmp_path / f"{k}.png" for k in range(8)]
    for file, image in zip(files, batch["image"], strict=True):
        cv2.imwrite(str(file), image[..., ::-1])
    np.testing.assert_array_equal(run.read(files)["image"], batch["image"])
    wide = np.zeros((50, 90, 3), np.uint8)
    mixed = [files[0], files[1].read_bytes(), batch["image"][2], wide]
    read = run.read(mixed)["image"]
    np.testing.assert_array_equal(read[:3], batch["image"][:3])
    assert read.shape == (4, 32, 32, 3)
    with pytest.raises(ValueError, match=r"text\.jpg: .*no readable image"):
        (tmp_path / "text.jpg").write_text("no image")
        run.read([tmp_path / "text.jpg"])
    with pytest.raises(ValueError, match="there is nothing to predict"):
        run.predict([])


def test_one_input_is_no_list_of_inputs(shapes_run, lm_run):
    run = ej.load_run(shapes_run[0])
    for single in ("cat.jpg", Path("cat.jpg"), b"\xff\xd8\xff"):
        for use in (run.predict, run.read):
            with pytest.raises(ValueError, match="is a single input; give a list, \\["):
                use(single)
    with pytest.raises(ValueError, match="'The museum was' is a single input"):
        ej.load_run(lm_run[0]).generate("The museum was")


def test_many_inputs_are_computed_as_a_batch_is(shapes_run):
    run = ej.load_run(shapes_run[0])
    images = np.random.default_rng(0).integers(0, 255, (19, 32, 32, 3), np.uint8)
    found = run.predict([*images])["probabilities"]
    wanted = run.predict({"image": images})["probabilities"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)


def test_other_data_must_mean_the_same(lm_run, shapes_run, tmp_path):
    run = ej.load_run(lm_run[0])
    text = write_text(tmp_path)
    found = evaluate_run(run, source=str(text))
    assert found.metrics == pytest.approx(lm_run[1]["final"], rel=1e-6)
    assert found.source == str(text)
    on_train = evaluate_run(run, source=str(text), split="train", max_examples=0)
    assert on_train.split == "train" and on_train.metrics != found.metrics
    assert next(iter(found.metrics)) == found.metric == "loss"
    # Other data, as far as one can tell, until it is the run's own.
    assert on_train.where == f"{text} train"
    run.config.data.source = str(text)
    on_train = evaluate_run(run, source=str(text), split="train")
    assert on_train.where == f"{text} train, which it was trained on"
    assert not evaluate_run(run, split="validation").was_trained_on
    with pytest.raises(ValueError, match=r"has no split 'test'; it has train, valid"):
        evaluate_run(run, source=str(text), split="test")
    prepared = prepare(tmp_path, block=32)
    with pytest.raises(ValueError, match=r"other vocab than .*: 257, not 256"):
        evaluate_run(run, source=str(prepared))
    with pytest.raises(ValueError, match="draws its images, and has no splits"):
        evaluate_run(ej.load_run(shapes_run[0]), split="test")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_the_model_of_replicas_is_the_one_that_is_evaluated(outer, tmp_path):
    config = lm_config(write_text(tmp_path), **{"mesh.data": 2})
    config.local.schedule, config.local.every, config.local.outer = "every", 3, outer
    summary = run_train(config, tmp_path / "run")
    run = ej.load_run(tmp_path / "run")
    kernels = jax.tree.leaves(run.variables)
    assert all(len(array.devices()) == 1 for array in kernels)
    assert evaluate_run(run).metrics == pytest.approx(summary["final"], rel=1e-5)
    # Between two meetings, too, where the anchor is not the mean.
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    evals = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    (then,) = (row["eval_loss"] for row in evals if row["updates"] == 2)
    found = evaluate_run(ej.load_run(tmp_path / "run", 2)).metrics["loss"]
    assert found == pytest.approx(then, rel=1e-6)
    if outer == "nesterov":
        assert params_sha256(run.variables["params"]) == summary["params_sha256"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_statistics_are_recomputed_where_the_run_did(tmp_path):
    config = shapes_config(**{"batch.norm": "recompute", "batch.norm_batches": 2})
    summary = run_train(config, tmp_path / "run")
    assert evaluate_run(ej.load_run(tmp_path / "run")).metrics == summary["final"]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_a_tokenizer_comes_with_the_run(tmp_path):
    data = prepare(tmp_path, tokenizer="sentencepiece", vocab=300)
    config = lm_config(data, **{"model.seq_len": 12})
    run_train(config, tmp_path / "run")
    wanted = SubwordTokenizer((data / "tokenizer.model").read_bytes())
    shutil.rmtree(data)
    run = ej.load_run(tmp_path / "run")
    text = "Line 7 says so much."
    assert run.tokenizer.encode(text).tolist() == wanted.encode(text).tolist()
    assert run.tokenizer.decode([*wanted.encode(text), wanted.eod]) == text
    (added,) = run.generate([""], tokens=5)  # A document can be begun.
    assert isinstance(added, str)
    (Path(run.workdir) / "tokenizer.model").write_bytes(b"another")
    with pytest.raises(DamagedFileError, match=r"tokenizer\.model is damaged"):
        ej.load_run(tmp_path / "run")


def test_the_task_is_written_once_and_is_plain_data(lm_run):
    content = json.loads((lm_run[0] / "task.json").read_text())
    assert content["info"] == {
        "vocab": 256,
        "eod": None,
        "bytes_per_token": 1.0,
        "tokenizer": "bytes",
    }
