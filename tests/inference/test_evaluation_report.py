import base64
import io
import re

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image
from trained_runs import write_text

import echo_jax as ej
from echo_jax.inference.evaluate import evaluate_run
from echo_jax.inference.report import write_evaluation
from echo_jax.workloads import build


def page_of(run, folder, **options):
    return write_evaluation(run, evaluate_run(run, **options), folder).read_text()


def pictures(page):
    for data in re.findall(r'src="data:image/png;base64,([^"]*)"', page):
        yield np.asarray(Image.open(io.BytesIO(base64.b64decode(data))))


@pytest.mark.slow
def test_a_classifier_shows_what_it_confused_and_its_first_images(shapes_run, tmp_path):
    run = ej.load_run(shapes_run[0])
    with mpl.rc_context({"text.usetex": True}):  # As a matplotlibrc may have it.
        page = page_of(run, tmp_path / "report")
    batches = build(run.config).eval_batches()
    labels, taken, images = [], [], []
    for batch in batches:
        is_real = batch["mask"] > 0
        found = run.predict(batch)["probabilities"].argmax(axis=1)
        labels += batch["label"][is_real].tolist()
        taken += found[is_real].tolist()
        images += [*batch["image"][is_real]]
    wrong = {(a, b) for a, b in zip(labels, taken, strict=True) if a != b}
    rows = re.findall(r"<tr>((?:<td[^>]*>[^<]*</td>){3})</tr>", page)
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in rows]
    assert {(is_, taken_for) for is_, taken_for, _ in cells} == {
        (run.classes[a], run.classes[b]) for a, b in wrong
    }
    for is_, taken_for, said in cells:
        pair = run.classes.index(is_), run.classes.index(taken_for)
        count = sum(pair == both for both in zip(labels, taken, strict=True))
        assert said == f"{count} of {labels.count(pair[0])}"
    drawn = [*pictures(page)]
    assert len(drawn) == 12
    for picture, image in zip(drawn, images, strict=False):
        np.testing.assert_array_equal(picture, image)
    accuracy = np.mean(np.equal(labels, taken))
    assert f"<td>{accuracy:.6g}</td>" in page


def test_a_language_model_goes_on_from_texts_of_the_split(lm_run, tmp_path):
    text = write_text(tmp_path)
    text.write_text(text.read_text().replace("beer", "<beer>"))
    run = ej.load_run(lm_run[0])
    page = page_of(run, tmp_path / "report", source=str(text))
    assert page.count("<pre>") == 12
    assert "&lt;be" in page and "<be" not in page
    assert f"Evaluated on {text}." in page


def test_a_page_asks_for_nothing_from_elsewhere(shapes_run, tmp_path):
    page = page_of(ej.load_run(shapes_run[0]), tmp_path / "report", max_examples=8)
    # But the names of a namespace, which nobody opens.
    links = re.findall(r'(?:href|src)="(?!#|data:)([^"]*)"', page)
    assert not links
