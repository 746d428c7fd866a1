"""The whole way of a user: pictures as they are downloaded, to a model that is used."""

import json
import re
from pathlib import Path

import cv2
import jax
import numpy as np
import pytest

import echo_jax as ej
from echo_jax import cli

CONFIG = f"{Path(__file__).parents[2]}/configs/imagenet.py:small"
COLOURS = {"n01": (200, 40, 40), "n02": (40, 200, 40), "n03": (40, 40, 200)}


def picture(path, colour, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(-40, 40, (64, 64, 3))
    cv2.imwrite(str(path), np.uint8(np.array(colour) + noise))


def tiny_imagenet(folder):
    """Writes folders laid out as those of Tiny-ImageNet, of three colours."""
    for name, colour in COLOURS.items():
        for k in range(20):
            picture(folder / f"train/{name}/images/{name}_{k}.JPEG", colour, k)
    lines = []
    for k, name in enumerate(3 * list(COLOURS)):
        picture(folder / f"val/images/val_{k}.JPEG", COLOURS[name], 100 + k)
        lines.append(f"val_{k}.JPEG\t{name}\t0\t0\t62\t62\n")
    (folder / "val/val_annotations.txt").write_text("".join(lines))


def run(capsys, *argv):
    """Runs a command as it is typed; returns what it prints."""
    assert cli.main([str(each) for each in argv]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_pictures_are_prepared_trained_on_and_a_model_of_them_used(tmp_path, capsys):
    source, data, first = (tmp_path / name for name in ("source", "data", "run"))
    tiny_imagenet(source)
    splits = f"train={source}/train", f"validation={source}/val"
    run(capsys, "prepare", "images", *splits, "--out", data)
    flags = {
        "data.source": data,
        "batch_size": 16,
        "updates": 30,
        "optim.warmup_updates": 5,
        "eval_every": 30,
        "checkpoint_every": 30,
        "model.virtual_batch": 8,
        "echo.factor": 2,
        "echo.order": "spread",
        "echo.buffer": 48,
    }
    train = ["train", "--config", CONFIG]
    flags = [f"--config.{name}={value}" for name, value in flags.items()]
    run(capsys, *train, "--workdir", first, *flags)
    summary = json.loads((first / "summary.json").read_text())
    # Half of the uses, and what still has its second use before it.
    assert 240 < summary["fresh"] <= 240 + 48
    assert summary["fresh"] + summary["repeats"] == 480
    assert summary["classes"] == list(COLOURS)
    assert summary["final"]["accuracy"] == 1.0
    assert re.search(r"accuracy\W+1\W", run(capsys, "evaluate", first))
    red = source / "val/images/val_0.JPEG"
    assert re.search(r"n01 +(1|0\.[5-9])", run(capsys, "predict", first, red))
    weights = run(capsys, "export", first, "--to", "safetensors").strip()
    program = run(capsys, "export", first, "--to", "stablehlo").strip()
    trained = ej.load_run(first)
    batch = {"image": np.stack([trained.read([str(red)])["image"][0]] * 3)}
    wanted = trained.predict(batch)
    found = jax.export.deserialize(bytearray(Path(program).read_bytes())).call(batch)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)
    second = tmp_path / "tuned"
    tuned = [*flags, "--config.updates=2", f"--config.init_from={weights}"]
    run(capsys, *train, "--workdir", second, *tuned, "--config.optim.warmup_updates=0")
    assert json.loads((second / "summary.json").read_text())["updates"] == 2
    assert ej.load_run(second).update == 2
