"""The first examples of a training, with all of their uses."""

import base64
import io
import re

import numpy as np
import pytest
from PIL import Image
from trained_runs import lm_config, shapes_config, write_text

from echo_jax import cli
from echo_jax.config import RunSpec
from echo_jax.runs import show_examples
from echo_jax.training.feeds import first_uses
from echo_jax.workloads import build

ECHO = {"echo.factor": 3.0, "echo.order": "spread", "echo.buffer": 16}
LOAD = {"echo.fetch.start": 0.5, "echo.fetch.end": 0.5}
STOCHASTIC = {"echo.mode": "stochastic", "echo.buffer": 16, **LOAD}


def uses_of(config):
    return first_uses(RunSpec.of(config), build(config), examples=8, most_updates=60)


def picture(data):
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("after", ["decode", "batch"])
def test_every_use_is_what_the_pipeline_hands_out(after):
    config = shapes_config(**ECHO, **{"echo.stage": after})
    if after == "batch":
        config.echo.order = "consecutive"
    wanted = {}
    spec = RunSpec.of(config).echo.spec(config.batch_size)
    batches = iter(build(config).train_dataset(spec))
    for update in range(1, 40):
        batch = next(batches)
        for row, index in enumerate(batch["fresh_index"].tolist()):
            item = (index, row if after == "batch" else 0)
            use = (update, int(batch["repeat"][row]), batch["image"][row])
            wanted.setdefault(item, []).append(use)
    found = uses_of(config)
    assert len(found) == 8
    for uses, expected in zip(found, [*wanted.values()][:8], strict=True):
        assert [use.repeat for use in uses] == [0, 1, 2]
        for use, (update, repeat, image) in zip(uses, expected, strict=True):
            assert (use.update, use.repeat) == (update, repeat)
            np.testing.assert_array_equal(use.example["image"], image)
            assert use.example.keys() == {"image", "label"}


@pytest.mark.parametrize("mode", [ECHO, STOCHASTIC], ids=["fixed", "stochastic"])
def test_a_slot_that_another_example_has_taken_is_not_mistaken_for_a_use(mode):
    where = {"echo.buffer_on": "device", "echo.stage": "augment"}
    found = uses_of(shapes_config(**mode, **where))
    images = [uses[0].example["image"] for uses in found]
    assert len({image.tobytes() for image in images}) == 8
    assert any(len(uses) > 1 for uses in found)
    for uses, image in zip(found, images, strict=True):
        assert [use.repeat for use in uses] == [*range(len(uses))]
        for use in uses:
            np.testing.assert_array_equal(use.example["image"], image)


def test_every_use_is_a_picture_with_its_update(tmp_path):
    config = shapes_config(
        **ECHO, **{"echo.buffer_on": "device", "echo.stage": "decode"}
    )
    page = show_examples(config, tmp_path, updates=60).read_text()
    # The devices augment each use.
    assert re.search(r"16 repeats of 8 examples up to update \d+: 16 differ", page)
    assert "from the first use, 0 are the same to the bit" in page
    said = re.findall(r'base64,([^"]*)"><figcaption>([^<]*)<', page)
    flat = [use for uses in uses_of(config) for use in uses]
    for (data, caption), use in zip(said, flat, strict=True):
        image = picture(base64.b64decode(data))
        np.testing.assert_array_equal(image, use.example["image"])
        which = f"repeat {use.repeat}" if use.repeat else "fresh"
        assert caption == f"update {use.update}, {which}"
    page = show_examples(shapes_config(), tmp_path).read_text()
    assert "8 examples, none of which is used again" in page


def test_a_text_stands_once_with_all_of_its_uses(tmp_path):
    source = write_text(tmp_path)
    source.write_text(source.read_text().replace("beer", "<beer>"))
    page = show_examples(lm_config(source, **ECHO), tmp_path / "page").read_text()
    assert page.count("<pre>") == 8
    assert len(re.findall(r"update \d+, (?:fresh|repeat [12])", page)) == 24
    assert "16 are the same to the bit" in page
    assert "&lt;beer" in page and "<beer" not in page


def test_the_examples_of_a_run_are_drawn_into_it(shapes_run, capsys):
    folder = shapes_run[0]
    assert cli.main(["report", "examples", str(folder), "--updates", "5"]) == 0
    assert capsys.readouterr().out == f"{folder / 'examples.html'}\n"
    assert "as updates see them" in (folder / "examples.html").read_text()


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("examples", "one of the arguments RUN --config is required"),
        ("examples --config shapes:tiny", "add --workdir FOLDER"),
        ("examples --config quickstart:tiny --workdir X", "name a config to train"),
        ("examples --config shapes:tiny --workdir X --updates 0", "must be at least 1"),
        ("examples X", "holds no config.json, so it is no run folder"),
    ],
)
def test_what_cannot_be_drawn_is_said(typed, says, tmp_path, capsys):
    argv = typed.replace("X", str(tmp_path / "x")).split()
    try:
        status = cli.main(["report", *argv])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
