"""Shows the first examples of a training and their uses."""

import html
import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.files.folders import run_folder, write
from echo_jax.inference.pictures import draw_boxes, embedded, png_of
from echo_jax.inference.run import class_names, tokenizer_of
from echo_jax.studies.page import items, page
from echo_jax.training.feeds.uses import Use, first_uses
from echo_jax.workloads.base import Workload

_EXAMPLES = 8
# The number of uses of an example; if there are more, the last one is also shown.
_SHOWN = 8
_PICTURE_PIXELS = 144


def write_examples(
    config: RunSpec,
    workload: Workload,
    folder: str | os.PathLike[str],
    *,
    most_updates: int,
    on_progress: Callable[[str, float], None] = lambda what, done: None,
) -> epath.Path:
    """Writes ``examples.html``: the first examples, each with all its uses."""
    found = first_uses(
        config,
        workload,
        examples=_EXAMPLES,
        most_updates=most_updates,
        on_progress=on_progress,
    )
    said = str(config.echo)
    parts = [items(_counts(found, config)), *_rows(found, workload)]
    title = f"The first examples of {config.workload}, as updates see them"
    file = run_folder(folder) / "examples.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, page(title, f"{said[:1].upper()}{said[1:]}.", parts))
    return file


def _counts(found: Sequence[Sequence[Use]], config: RunSpec) -> Iterator[str]:
    repeats = [(uses[0], use) for uses in found for use in uses[1:]]
    if not repeats:
        yield f"{len(found)} examples, none of which is used again"
        return
    changed = sum(
        not all(np.array_equal(first.example[k], use.example[k]) for k in first.example)
        for first, use in repeats
    )
    last = max(use.update for _, use in repeats)
    yield (
        f"{len(repeats)} repeats of {len(found)} examples up to update {last}: "
        f"{changed} differ from the first use, {len(repeats) - changed} are the same "
        "to the bit"
    )
    waits = np.concatenate([np.diff([use.update for use in uses]) for uses in found])
    yield (
        f"From a use to the next one: {waits.min()} to {waits.max()} updates, "
        f"{waits.mean():.1f} in the mean"
    )
    if config.echo.mode == "adaptive":
        yield (
            "Nothing was trained between two updates, so an adaptive echo repeated as "
            "much as it may"
        )


def _rows(found: Sequence[Sequence[Use]], workload: Workload) -> Iterator[str]:
    for number, uses in enumerate(found, 1):
        label = uses[0].example.get("label")
        about = "" if label is None else class_names(workload.task_info)[int(label)]
        yield f"<h2>Example {number}{': ' * bool(about)}{html.escape(about)}</h2>"
        if "tokens" in uses[0].example:
            yield from _texts(uses, workload)
            continue
        if "image" not in uses[0].example:
            yield items(map(_numbers, uses))
            continue
        left_out = len(uses) - _SHOWN
        shown = uses if left_out <= 0 else [*uses[: _SHOWN - 1], uses[-1]]
        yield f"<div>{''.join(_picture(use, workload) for use in shown)}</div>"
        if left_out > 0:
            yield items([f"{left_out} more uses lie before the last one"])


def _picture(use: Use, workload: Workload) -> str:
    said = f"update {use.update}, {_which(use)}"
    pixels = use.example["image"]
    if "boxes" not in use.example:
        return embedded(png_of(pixels), _PICTURE_PIXELS, said)
    is_real = use.example["box_mask"] > 0
    labels = use.example["box_labels"][is_real].tolist()
    names = [class_names(workload.task_info)[label] for label in labels]
    drawn = draw_boxes(pixels, use.example["boxes"][is_real], labels, names)
    return embedded(drawn, 2 * _PICTURE_PIXELS, said)


def _numbers(use: Use) -> str:
    arrays = use.example.items()
    first = {name: [f"{v:.3g}" for v in np.ravel(x)[:6]] for name, x in arrays}
    said = ", ".join(f"{name}: {' '.join(values)}" for name, values in first.items())
    return f"update {use.update}, {_which(use)}: {said}"


def _which(use: Use) -> str:
    return f"repeat {use.repeat}" if use.repeat else "fresh"


def _texts(uses: Sequence[Use], workload: Workload) -> Iterator[str]:
    tokenizer = tokenizer_of(workload.task_info, workload.task_files)
    seen: dict[tuple[int, ...], list[Use]] = {}
    for use in uses:
        seen.setdefault(tuple(use.example["tokens"].tolist()), []).append(use)
    for tokens, found in seen.items():
        yield f"<pre>{html.escape(tokenizer.decode(tokens))}</pre>"
        yield items(["; ".join(f"update {u.update}, {_which(u)}" for u in found)])
