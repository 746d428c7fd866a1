"""``echo-jax evaluate | predict | export`` as they are typed."""

import json

import cv2
import jax
import numpy as np
import pytest
from trained_runs import write_text

import echo_jax as ej
from echo_jax import cli


def said(capsys, *argv):
    with jax.transfer_guard("disallow"):
        assert cli.main([str(each) for each in argv]) == 0
    return capsys.readouterr().out


def refused(capsys, *argv):
    assert cli.main([str(each) for each in argv]) == 2
    return capsys.readouterr().err


@pytest.fixture
def images(tmp_path):
    files = [tmp_path / "a.png", tmp_path / "b.jpg"]
    for number, file in enumerate(files):
        pixels = np.random.default_rng(number).integers(0, 255, (40, 60, 3), np.uint8)
        cv2.imwrite(str(file), pixels)
    return files


def test_an_evaluation_is_printed_and_written(shapes_run, lm_run, tmp_path, capsys):
    folder, summary = shapes_run
    out = said(capsys, "evaluate", folder, "--json", tmp_path / "found.json")
    assert f"{summary['final']['accuracy']:.6g}" in out and "update 2" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["metrics"] == summary["final"]
    assert found["metric"] == "accuracy"
    text = write_text(tmp_path)
    out = said(capsys, "evaluate", lm_run[0], "--data", text, "--report", tmp_path)
    assert "perplexity" in out and (tmp_path / "evaluation.html").exists()
    line = refused(capsys, "evaluate", lm_run[0], "--data", text, "--split", "test")
    assert "has no split 'test'; it has train, validation" in line


def test_images_and_those_in_folders_are_classified(
    shapes_run, lm_run, images, tmp_path, capsys
):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for name in ("b.png", "a.PNG", ".hidden.png", "more/c.png"):
        (folder / name).write_bytes(images[0].read_bytes())
    (folder / "notes.txt").write_text("no image")
    json_file = tmp_path / "found.json"
    out = said(capsys, "predict", shapes_run[0], folder, images[1], "--json", json_file)
    found = json.loads(json_file.read_text())
    wanted = [folder / "a.PNG", folder / "b.png", images[1]]
    assert [*found] == [*map(str, wanted)]
    run = ej.load_run(shapes_run[0])
    for file, row in zip(wanted, run.predict(wanted)["probabilities"], strict=True):
        best = [run.classes[index] for index in np.argsort(-row)[:5]]
        assert [each["class"] for each in found[str(file)]] == best
        assert found[str(file)][0]["probability"] == pytest.approx(row.max())
        assert f"{best[0]} {row.max():.1%}" in out
    # One that cannot be read is left out, wherever it is named, and said.
    (folder / "bad.jpg").write_text("no image")
    files = (folder, tmp_path / "no.jpg", images[1])
    out = said(capsys, "predict", shapes_run[0], *files, "--json", json_file)
    assert json.loads(json_file.read_text()) == found
    assert f"left out: {folder}/bad.jpg: " in out
    assert f"left out: {tmp_path}/no.jpg: No such file or directory" in out
    line = refused(capsys, "predict", shapes_run[0], folder / "bad.jpg", files[1])
    assert "bad.jpg: " in line and "not a readable image" in line
    (tmp_path / "empty").mkdir()
    line = refused(capsys, "predict", shapes_run[0], tmp_path / "empty")
    assert "empty holds no image right in it" in line
    line = refused(capsys, "predict", lm_run[0], folder)
    assert "photos is a folder; name the files of text in it" in line


def test_texts_are_continued_and_steer_no_terminal(lm_run, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"\xef\xbb\xbf99 bottles\x1b[2J\r\n")
    command = ["predict", lm_run[0], prompt, "--text", "7 of", "--tokens", 5]
    out = said(capsys, *command, "--temperature", 0, "--json", tmp_path / "f.json")
    found = json.loads((tmp_path / "f.json").read_text())
    run = ej.load_run(lm_run[0])
    prompts = ["99 bottles\x1b[2J\n", "7 of"]
    wanted = run.generate(prompts, tokens=5, temperature=0.0)
    names = [str(prompt), "7 of"]
    assert found == [{"of": n, "text": t} for n, t in zip(names, wanted, strict=True)]
    assert "99 bottles\\x1b[2J\n" in out and "\x1b" not in out
    assert "\\ufeff" not in out


@pytest.mark.parametrize(("to", "name"), [("safetensors", None), ("stablehlo", "m.x")])
def test_a_run_is_exported(to, name, lm_run, tmp_path, capsys):
    out = ["--out", tmp_path / name] if name else []
    file = tmp_path / name if name else lm_run[0] / f"model.{to}"
    assert said(capsys, "export", lm_run[0], "--to", to, *out) == f"{file}\n"
    assert file.stat().st_size > 1000
    file.unlink()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["evaluate", "nowhere"], "nowhere holds no config.json, so it is no run"),
        (
            ["evaluate", "{shapes}", "--bogus"],
            "'--bogus'; see echo-jax evaluate --help",
        ),
        (["predict", "{shapes}"], "there is nothing to predict; name files after WORK"),
        (["predict", "{lm}", "{shapes}/model.bin"], "it is UTF-16 text; convert it to"),
        (["predict", "{shapes}", "no.jpg"], "no.jpg: No such file or directory"),
        (["predict", "{shapes}", "--text", "x"], "--text is for models of text"),
        (["predict", "{lm}", "--text", "a\udcff"], "--text='a\\udcff' is not UTF-8"),
        (["predict", "{lm}", "--update", "9", "--text", "x"], "no checkpoint of updat"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(argv, says, lm_run, shapes_run, capsys):
    (shapes_run[0] / "model.bin").write_bytes(b"\xff\xfe")
    argv = [each.format(lm=lm_run[0], shapes=shapes_run[0]) for each in argv]
    assert says in refused(capsys, *argv).splitlines()[-1]
