"""A trained run in use: loaded, asked, evaluated again, and shown as a page."""

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from text_folders import prepare
from trained_runs import lm_config, write_text

import echo_jax as ej
from echo_jax.data.prepare import SubwordTokenizer
from echo_jax.data.sources import CLASS_NAMES
from echo_jax.files import DamagedFileError, run_folder, write_json
from echo_jax.inference import TrainedRun, evaluate_run, write_evaluation
from echo_jax.models import Transformer
from echo_jax.runs import run_train
from echo_jax.training.saving import params_sha256
from echo_jax.workloads import build, lm


@pytest.fixture
def copied(lm_run, tmp_path):
    shutil.copytree(lm_run[0], tmp_path / "run")
    return tmp_path / "run"


def test_the_model_is_that_of_the_last_update_to_the_bit(lm_run, shapes_run):
    for folder, summary in (lm_run, shapes_run):
        run = ej.load_run(folder)
        assert run.update == summary["updates"]
        assert params_sha256(run.variables["params"]) == summary["params_sha256"]
    assert shapes_run[1]["classes"] == run.classes == list(CLASS_NAMES)
    assert "classes" not in lm_run[1]
    earlier = ej.load_run(lm_run[0], 2)
    assert earlier.update == 2
    assert params_sha256(earlier.variables["params"]) != lm_run[1]["params_sha256"]
    assert json.loads((lm_run[0] / "task.json").read_text())["info"] == {
        "vocab": 256,
        "eod": None,
        "bytes_per_token": 1.0,
        "tokenizer": "bytes",
    }


def test_nothing_in_the_folder_changes_not_even_what_is_being_saved(copied):
    def listing():
        found = [copied, *sorted(copied.rglob("*"))]
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in found]

    checkpoints = copied / "checkpoints"
    shutil.copytree(checkpoints / "4", checkpoints / "6.orbax-checkpoint-tmp")
    before = listing()
    for path in copied.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    assert ej.load_run(copied).update == 4
    assert listing() == before


def arrays_in(data):
    """The places in the middle of each compressed array of a file of a checkpoint."""
    starts = [found.start() for found in re.finditer(rb"\x28\xb5\x2f\xfd", data)]
    ends = [*starts[1:], len(data)]
    return [(start + end) // 2 for start, end in zip(starts, ends, strict=True)]


def test_no_flipped_bit_makes_another_model(copied):
    wanted = params_sha256(ej.load_run(copied, 4).variables)
    said = []
    # Which array lies in which file follows from which thread wrote it first.
    for file in sorted((copied / "checkpoints" / "4").glob("state/**/d/*")):
        whole = file.read_bytes()
        for place in arrays_in(whole):
            data = bytearray(whole)
            data[place] ^= 1
            file.write_bytes(data)
            try:
                # What is not of the model, such as the optimizer's, is not read.
                assert params_sha256(ej.load_run(copied, 4).variables) == wanted
            except ValueError as error:
                said.append(str(error))
        file.write_bytes(whole)
    assert any("arrays are not what was saved" in line for line in said), said


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(copied):
    # A bit of every array, since those that are not of the model are not read.
    for file in (copied / "checkpoints" / "4").glob("state/**/d/*"):
        data = bytearray(file.read_bytes())
        for place in arrays_in(data):
            data[place] ^= 1
        file.write_bytes(data)
    with pytest.warns(UserWarning, match=r"update 4 in .*; that of update 2 is used"):
        assert ej.load_run(copied).update == 2
    with pytest.raises(ValueError, match="update 4 in"):
        ej.load_run(copied, 4)


def widen(run):
    """Has the config of a run say that its model is wider than it is."""
    config = json.loads((run / "config.json").read_text())
    config["model"]["d_ff"] *= 2
    write_json(run_folder(run) / "config.json", config)


def task_says(text):
    return lambda run: (run / "task.json").write_text(text)


def without_checkpoints(run):
    for name in ("2", "4"):
        shutil.rmtree(run / "checkpoints" / name)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "holds no config.json, so it is no run"),
        (lambda run: (run / "task.json").unlink(), "holds no task.json"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "holds no checkpoint yet"),
        (without_checkpoints, "holds no whole checkpoint yet"),
        (task_says("{}"), "it lacks 'info'"),
        (task_says('{"info": {}, "files": {}}'), "it does not fit config"),
        (
            task_says('{"info": {}, "files": {"../run/config": "0"}}'),
            "is no name of a file",
        ),
        (widen, r"config\.json is damaged: the checkpoint holds another model"),
    ],
)
def test_what_is_missing_or_damaged_is_said(damage, says, copied):
    damage(copied)
    with pytest.raises((ValueError, OSError), match=says):
        ej.load_run(copied)


def test_texts_are_read_without_data_and_judged_by_their_own_tokens_alone(lm_run):
    run = ej.load_run(lm_run[0])
    assert run.is_of_text and run.classes == []
    together = run.predict(["99 bottles", "7"])["logits"]
    assert together.shape == (2, 16, 256)
    alone = run.predict(["7"])["logits"]
    np.testing.assert_allclose(together[1, 0], alone[0, 0], rtol=1e-5, atol=1e-6)
    read = run.read(["99 bottles", "7"])
    assert read["length"].tolist() == [10, 1]
    assert bytes(read["tokens"][0, :10].tolist()) == b"99 bottles"
    with pytest.raises(ValueError, match="a text of 17 tokens is longer than the mod"):
        run.read(["x" * 17])
    with pytest.raises(FileNotFoundError, match=r"text\.txt"):
        evaluate_run(run)


def test_images_are_read_as_in_evaluation_and_of_any_size(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    (batch, *_) = build(run.config).eval_batches()
    files = [tmp_path / f"{k}.png" for k in range(8)]
    for file, image in zip(files, batch["image"], strict=True):
        cv2.imwrite(str(file), image[..., ::-1])
    np.testing.assert_array_equal(run.read(files)["image"], batch["image"])
    wide = np.zeros((50, 90, 3), np.uint8)
    read = run.read([files[0], files[1].read_bytes(), batch["image"][2], wide])
    np.testing.assert_array_equal(read["image"][:3], batch["image"][:3])
    assert read["image"].shape == (4, 32, 32, 3)
    # Many inputs are computed as a batch is.
    found = run.predict([*batch["image"], *batch["image"], wide])["probabilities"]
    wanted = run.predict({"image": batch["image"]})["probabilities"]
    assert found.shape == (17, 8)
    np.testing.assert_allclose(found[:16], np.tile(wanted, (2, 1)), rtol=1e-5)
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-5)
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(ValueError, match=r"text\.jpg: .*not a readable image"):
        run.read([tmp_path / "text.jpg"])
    with pytest.raises(ValueError, match="there is nothing to predict"):
        run.predict([])


def test_one_input_is_no_list_of_inputs(shapes_run, lm_run):
    run = ej.load_run(shapes_run[0])
    for single in ("cat.jpg", Path("cat.jpg"), b"\xff\xd8\xff"):
        for use in (run.predict, run.read):
            with pytest.raises(ValueError, match="is a single input; give a list, \\["):
                use(single)
    with pytest.raises(ValueError, match="was trained on images, and continues no te"):
        run.generate(["x"])
    with pytest.raises(ValueError, match="'The museum was' is a single input"):
        ej.load_run(lm_run[0]).generate("The museum was")


def test_an_evaluation_is_that_of_the_training_to_the_bit(shapes_run):
    folder, summary = shapes_run
    found = evaluate_run(ej.load_run(folder))
    assert found.metrics == summary["final"]
    assert (found.metric, found.source, found.split) == ("accuracy", "synthetic", "")


def test_other_data_must_mean_the_same(lm_run, shapes_run, tmp_path):
    run = ej.load_run(lm_run[0])
    text = str(write_text(tmp_path))
    found = evaluate_run(run, source=text)
    assert found.metrics == pytest.approx(lm_run[1]["final"], rel=1e-6)
    assert found.source == text
    on_train = evaluate_run(run, source=text, split="train", max_examples=0)
    assert on_train.split == "train" and on_train.metrics != found.metrics
    assert next(iter(found.metrics)) == found.metric == "loss"
    # Other data, as far as one can tell, until it is the run's own.
    assert on_train.where == f"{text} train"
    run = replace(run, config=run.config.changed({"data.source": text}))
    on_train = evaluate_run(run, source=text, split="train")
    assert on_train.where == f"{text} train, which it was trained on"
    assert not evaluate_run(run, split="validation").was_trained_on
    with pytest.raises(ValueError, match=r"has no split 'test'; it has train, valid"):
        evaluate_run(run, source=text, split="test")
    with pytest.raises(ValueError, match=r"other vocab than .*: 257, not 256"):
        evaluate_run(run, source=str(prepare(tmp_path, block=32)))
    with pytest.raises(ValueError, match="makes all of its data"):
        evaluate_run(ej.load_run(shapes_run[0]), split="test")


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_the_model_of_replicas_is_the_one_that_is_evaluated(tmp_path):
    fields = {"mesh.data": 2, "local.sync_schedule": "every", "local.sync_every": 3}
    fields["local.outer"] = "nesterov"
    summary = run_train(lm_config(write_text(tmp_path), **fields), tmp_path / "run")
    run = ej.load_run(tmp_path / "run")
    assert all(len(array.devices()) == 1 for array in jax.tree.leaves(run.variables))
    assert evaluate_run(run).metrics == pytest.approx(summary["final"], rel=1e-5)
    assert params_sha256(run.variables["params"]) == summary["params_sha256"]
    # Between two meetings, too, where the anchor is not the mean.
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    evals = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    (then,) = (row["eval_loss"] for row in evals if row["updates"] == 2)
    found = evaluate_run(ej.load_run(tmp_path / "run", 2)).metrics["loss"]
    assert found == pytest.approx(then, rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_a_tokenizer_comes_with_the_run(tmp_path):
    data = prepare(tmp_path, tokenizer="sentencepiece", vocab=300)
    run_train(lm_config(data, **{"model.seq_len": 12}), tmp_path / "run")
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


T, VOCAB = 8, 11
SIZES = {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_ff": 8, "tied": True}
TASK = lm.LanguageModel(Transformer(vocab=VOCAB, max_len=T, **SIZES))


@pytest.fixture(scope="module")
def untrained():
    return jax.jit(TASK.init)(jax.random.key(3))


@jax.jit
def logits_of(variables, tokens):
    """Of the token behind a text, without padding."""
    return TASK.model.apply(variables, tokens[None], train=False)[0, -1]


def always(untrained, token):
    """Variables of a model that is sure of one token."""
    table = np.zeros((VOCAB, 8), np.float32)
    table[token] = 50.0
    params = {**untrained["params"], "embed": {"embedding": jnp.asarray(table)}}
    params["norm"] = {"scale": jnp.zeros(8), "bias": jnp.ones(8)}
    return {"params": params}


def continued(variables, prompts, count, *, vocab=VOCAB, eod=None, **drawn):
    info = {"vocab": vocab, "eod": eod}
    run = TrainedRun("", None, 0, TASK, variables, info, {})
    return run.continue_tokens(prompts, count, **drawn)


@pytest.mark.usefixtures("compiled_soon")
def test_the_likeliest_token_is_that_of_the_whole_text_alone(untrained):
    """By an independent way: one text, no padding, the last T tokens."""
    prompts = [[1], [5] * T, [*range(VOCAB)]]
    found = continued(untrained, prompts, 3, temperature=0.0, seed=0)
    for text, added in zip(prompts, found, strict=True):
        assert len(added) == 3
        for token in added:
            logits = logits_of(untrained, jnp.asarray(text[-T:]))
            assert token == int(logits.argmax())
            text = [*text, token]


@pytest.mark.usefixtures("compiled_soon")
def test_what_is_drawn_follows_the_probabilities_and_the_seed(untrained):
    many = [[1, 2]] * 2000
    drawn, again, other = (
        np.array(continued(untrained, many, 1, temperature=1.0, seed=seed))[:, 0]
        for seed in (5, 5, 6)
    )
    wanted = np.asarray(jax.nn.softmax(logits_of(untrained, jnp.asarray([1, 2]))))
    counted = np.bincount(drawn, minlength=VOCAB) / len(drawn)
    # Four standard deviations of a count.
    assert (np.abs(counted - wanted) < 4 * np.sqrt(wanted / len(drawn))).all()
    assert again.tolist() == drawn.tolist() != other.tolist()


@pytest.mark.usefixtures("compiled_soon")
def test_the_end_of_a_document_and_tokens_that_nothing_knows_are_left_out(untrained):
    fours, sixes = always(untrained, 4), always(untrained, 6)
    drawn = {"temperature": 0.0, "seed": 0}
    assert continued(fours, [[1], []], 3, eod=4, **drawn) == [[], []]
    assert continued(sixes, [[1], []], 3, eod=4, **drawn) == [[6] * 3] * 2
    drawn["temperature"] = 1.0
    known = continued(sixes, [[1], [2]], 40, vocab=3, **drawn)
    assert np.array(known).max() < 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"prompts": [""]}, "an empty text cannot be continued"),
    ],
)
def test_what_cannot_be_continued_is_refused(options, says, lm_run):
    run = ej.load_run(lm_run[0])
    with pytest.raises(ValueError, match=says):
        run.generate(**{"prompts": ["x"], **options})


def page_of(run, folder, **options):
    return write_evaluation(run, evaluate_run(run, **options), folder).read_text()


def test_a_classifier_shows_what_it_confused_and_its_first_images(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    page = page_of(run, tmp_path / "report")
    labels, taken, images = [], [], []
    for batch in build(run.config).eval_batches():
        is_real = batch["mask"] > 0
        found = run.predict(batch)["probabilities"].argmax(axis=1)
        labels += [run.classes[k] for k in batch["label"][is_real]]
        taken += [run.classes[k] for k in found[is_real]]
        images += [*batch["image"][is_real]]
    pairs = [*zip(labels, taken, strict=True)]
    rows = re.findall(r"<tr>((?:<td[^>]*>[^<]*</td>){3})</tr>", page)
    cells = {tuple(re.findall(r"<td[^>]*>([^<]*)</td>", row)) for row in rows}
    assert cells == {
        (a, b, f"{pairs.count((a, b))} of {labels.count(a)}")
        for a, b in pairs
        if a != b
    }
    shaded = re.findall(r"<tr><th>([^<]*)</th>((?:<td[^>]*>[^<]*</td>)+)</tr>", page)
    assert [name for name, _ in shaded] == run.classes
    for name, row in shaded:
        of_each = [pairs.count((name, b)) for b in run.classes]
        percents = 100 * (np.array(of_each) / max(labels.count(name), 1))
        assert re.findall(r">(\d+)<", row) == [f"{x:.0f}" for x in percents]
    drawn = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    assert len(drawn) == 12
    for data, image in zip(drawn, images, strict=False):
        picture = Image.open(io.BytesIO(base64.b64decode(data)))
        np.testing.assert_array_equal(np.asarray(picture), image)
    assert f"<td>{shapes_run[1]['final']['accuracy']:.6g}</td>" in page
    # It asks for nothing from elsewhere; names of a namespace are opened by nobody.
    assert not re.findall(r'(?:href|src)="(?!#|data:)([^"]*)"', page)


def test_a_language_model_goes_on_from_texts_of_the_split(lm_run, tmp_path):
    text = write_text(tmp_path)
    text.write_text(text.read_text().replace("beer", "<beer>"))
    page = page_of(ej.load_run(lm_run[0]), tmp_path / "report", source=str(text))
    assert page.count("<pre>") == 12
    assert "&lt;be" in page and "<be" not in page
    assert f"Evaluated on {text} validation." in page
