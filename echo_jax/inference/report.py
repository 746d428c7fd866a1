"""The page of an evaluation: confusion matrix, detections, or texts."""

import html
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath
from PIL import Image

from echo_jax.files.folders import run_folder, write
from echo_jax.inference.evaluate import Evaluation, open_evaluation
from echo_jax.inference.pictures import draw_boxes, embedded, png_of
from echo_jax.inference.run import TrainedRun
from echo_jax.studies.page import page, table

# A larger matrix is not readable.
_MOST_CLASSES = 30
_MOST_CONFUSED = 12
_EXAMPLES = 12
_DRAWN = 6
_PICTURE_PIXELS = 160
_MIN_SCORE = 0.3
_PROMPTS, _PROMPT_SHARE, _ADDED = 4, 0.5, 64


def write_evaluation(
    run: TrainedRun, found: Evaluation, folder: str | os.PathLike[str]
) -> epath.Path:
    """Writes a page about an evaluation, which opens offline.

    For a classifier it shows the confusion matrix and the first images. For a detector
    it shows the first images with boxes, and for a language model continuations of the
    split's texts.

    Args:
      run: The evaluated run.
      found: From `echo_jax.inference.evaluate.evaluate_run`.
      folder: Receives ``evaluation.html``.

    Returns:
      The page.

    Raises:
      ValueError, OSError: See `evaluate_run`; or the page cannot be written.
    """
    asked = found.source, found.asked_split, found.max_examples
    _, workload = open_evaluation(run, *asked)
    batches = workload.eval_batches()
    if run.is_of_text:
        shown = _texts(run, batches)
    elif "categories" in run.task_info:
        shown = _detections(run, batches)
    else:
        shown = _classes(run, batches) if run.classes else ()
    values = [(name, f"{value:.6g}") for name, value in found.metrics.items()]
    title = f"{found.workdir}, update {found.update}"
    parts = [table(("metric", "value"), values, texts=1), *shown]
    file = run_folder(folder) / "evaluation.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, page(title, f"Evaluated on {found.where}.", parts))
    return file


def _classes(run: TrainedRun, batches: Iterable[Any]) -> Iterator[str]:
    counts = np.zeros([len(run.classes)] * 2, np.int64)
    pictures: list[str] = []
    for batch in batches:
        is_real = batch["mask"] > 0
        probabilities = run.predict(batch)["probabilities"][is_real]
        images, labels = batch["image"][is_real], batch["label"][is_real]
        taken = probabilities.argmax(axis=1)
        np.add.at(counts, (labels, taken), 1)
        for row in range(min(len(labels), _EXAMPLES - len(pictures))):
            name, label = run.classes[taken[row]], run.classes[labels[row]]
            said = f"{name} {probabilities[row, taken[row]]:.0%}"
            said += "" if name == label else f", is {label}"
            pictures.append(embedded(png_of(images[row]), _PICTURE_PIXELS, said))
    yield "<h2>Which class was taken for which</h2>"
    if len(run.classes) <= _MOST_CLASSES:
        yield _matrix(counts, run.classes)
    yield table(("is", "taken for", "images"), _confused(counts, run.classes), texts=2)
    yield "<h2>The first images</h2>"
    yield f"<div>{''.join(pictures)}</div>"


def _confused(counts: np.ndarray, names: list[str]) -> Iterator[tuple[str, str, str]]:
    wrong = counts - np.diag(np.diag(counts))
    for index in np.argsort(-wrong, axis=None, kind="stable")[:_MOST_CONFUSED]:
        label, taken = np.unravel_index(index, wrong.shape)
        if wrong[label, taken]:
            of = counts[label].sum()
            yield names[label], names[taken], f"{wrong[label, taken]:,} of {of:,}"


def _matrix(counts: np.ndarray, names: list[str]) -> str:
    """Returns a table of the percent of each class's images, shaded."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    names = [html.escape(name) for name in names]
    heads = (f'<th style="writing-mode: vertical-rl">{name}</th>' for name in names)
    rows = ["<th>is, and % taken for</th>" + "".join(heads)]
    cell = '<td style="background: rgb(31 119 180 / {0:.2f})">{1:.0f}</td>'
    for name, row in zip(names, shares.tolist(), strict=True):
        cells = (cell.format(share, 100 * share) for share in row)
        rows.append(f"<th>{name}</th>{''.join(cells)}")
    table_rows = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="scroll"><table>{table_rows}</table></div>'


def _detections(run: TrainedRun, batches: Iterable[Any]) -> Iterator[str]:
    yield f"<h2>What was found with a score of at least {_MIN_SCORE}</h2>"
    pictures: list[str] = []
    for batch in batches:
        if len(pictures) >= _DRAWN:
            break
        found = run.predict({"image": batch["image"]})
        for row in np.flatnonzero(batch["mask"])[: _DRAWN - len(pictures)]:
            is_sure = found["scores"][row] >= _MIN_SCORE
            labels = found["labels"][row][is_sure].tolist()
            names = [run.classes[label] for label in labels]
            image = np.asarray(Image.fromarray(batch["image"][row]).resize((480, 480)))
            drawn = draw_boxes(image, found["boxes"][row][is_sure], labels, names)
            pictures.append(embedded(drawn, 480, ", ".join(names) or "nothing"))
    yield f"<div>{''.join(pictures)}</div>"


def _texts(run: TrainedRun, batches: Iterable[Any]) -> Iterator[str]:
    tokens = next(iter(batches))["tokens"][:_PROMPTS]
    cut = max(1, int(tokens.shape[1] * _PROMPT_SHARE))
    decode = run.tokenizer.decode
    prompts = [decode(row[:cut].tolist()) for row in tokens]
    yield "<h2>How texts of the split go on</h2>"
    for temperature in (0.0, 0.8):
        added = run.generate(prompts, tokens=_ADDED, temperature=temperature)
        yield f"<h3>By the model, temperature {temperature:g}</h3>"
        for prompt, text in zip(prompts, added, strict=True):
            yield f"<pre>{html.escape(prompt)}<b>{html.escape(text)}</b></pre>"
    yield "<h3>In the text itself</h3>"
    for row in tokens:
        yield f"<pre>{html.escape(decode(row.tolist()))}</pre>"
