"""The commands ``echo-jax evaluate | predict | export``: options and output."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from rich.table import Table

from echo_jax.cli.command_end import add_number, path_argument
from echo_jax.data.plain_text import EncodingError, read_text
from echo_jax.files.folders import run_folder, typed_path, write
from echo_jax.terminal.countdown import Countdown
from echo_jax.terminal.failures import sentence
from echo_jax.terminal.printable import printable

_EVALUATE_EPILOG = """\
It evaluates on as many devices as the run was trained on, or all that are here: on the
run's own evaluation split, on another one, such as a test split that nothing was chosen
by, or on other data with the same tokens or some of its classes. Nothing in the folder
is changed.

examples:
  echo-jax evaluate runs/cifar10 --split test
  echo-jax evaluate runs/cifar10 --data data/my_photos --json found.json"""

_PREDICT_EPILOG = """\
Images are classified, or what is found in them is drawn into copies of them. Text is
continued: that of files, or what is given with --text. Of a folder the images right in
it are taken, by name. Sizes, class names and the tokenizer are those of the run; its
data need not be there.

examples:
  echo-jax predict runs/cifar10 cat.jpg ship.png
  echo-jax predict runs/cifar10 photos/
  echo-jax predict runs/coco street.jpg --out found
  echo-jax predict runs/wikitext2 --text "The museum was" --tokens 40"""

_EXPORT_EPILOG = """\
safetensors: the weights, for other programs and for --config.init_from. stablehlo: the
program with its weights, which jax.export.deserialize(data).call(batch) runs where
echo_jax is not. Needs pip install 'echo-jax[export]'.

examples:
  echo-jax export runs/cifar10 --to safetensors
  echo-jax export runs/cifar10 --to stablehlo --out cifar10.stablehlo"""

_MOST_CLASSES = 5
# The number of the prompt's characters that are shown before its continuation.
_CONTEXT = 400


def add_commands(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds the commands for trained runs."""
    evaluate = add("evaluate", "evaluate a trained run again", _EVALUATE_EPILOG)
    predict = add("predict", "use a trained run on files of yours", _PREDICT_EPILOG)
    export = add("export", "write a trained run for other programs", _EXPORT_EPILOG)
    for command in (evaluate, predict, export):
        command.add_argument(
            "workdir",
            metavar="WORKDIR",
            help="a run folder, here or gs://BUCKET/FOLDER",
        )
        command.add_argument(
            "--update",
            type=int,
            metavar="N",
            help="use the checkpoint of this update (default: the newest)",
        )
    evaluate.add_argument(
        "--split", default="", help="(default: the one that the run was evaluated on)"
    )
    evaluate.add_argument(
        "--data",
        default="",
        metavar="SOURCE",
        help="other data, as config.data.source names it (default: that of the run)",
    )
    evaluate.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="so many of the split, always the same ones; 0 for all (default: as in "
        "the run)",
    )
    evaluate.add_argument(
        "--report",
        metavar="FOLDER",
        help="also write evaluation.html there: what was confused, found or written",
    )
    predict.add_argument(
        "files", nargs="*", metavar="FILE", help="images, a folder of images, or texts"
    )
    predict.add_argument(
        "--text", action="append", default=[], help="a text to be continued"
    )
    add_number(predict, "--tokens", 128, "N", "add at most so many to each text")
    about = "0 takes the likeliest token, 1 draws by the model's own probabilities"
    add_number(predict, "--temperature", 0.8, "T", about)
    add_number(predict, "--seed", 0, "N", "of what is drawn")
    add_number(predict, "--min-score", 0.3, "P", "draw no box of a lower score")
    predict.add_argument(
        "--out",
        default="predictions",
        metavar="FOLDER",
        help="receives pictures with boxes (default: %(default)s)",
    )
    for command in (evaluate, predict):
        command.add_argument(
            "--json",
            type=path_argument,
            metavar="FILE",
            help="also write what is found as JSON",
        )
    export.add_argument(
        "--to",
        required=True,
        choices=("safetensors", "stablehlo"),
        help="weights, or a program",
    )
    export.add_argument(
        "--out",
        default="",
        metavar="FILE",
        help="(default: model.safetensors or model.stablehlo in the run folder)",
    )


def run_evaluate(args: argparse.Namespace) -> list[Any]:
    """Evaluates a run; returns the objects to print."""
    # Imported here and below: they import jax.
    from echo_jax.inference.evaluate import evaluate_run
    from echo_jax.inference.run import load_run

    with Countdown() as countdown:
        countdown.show("Loading the run", 0.0)
        run = load_run(args.workdir, args.update)
        countdown.show("Evaluating it", 0.1)
        found = evaluate_run(
            run,
            source=args.data,
            split=args.split,
            max_examples=args.examples,
            note=lambda said: countdown.show(said, 0.1),
        )
    table = Table(
        title=printable(f"{found.workdir}, update {found.update}"),
        caption=printable(found.where),
    )
    table.add_column("metric")
    table.add_column("value", justify="right")
    for name, value in found.metrics.items():
        table.add_row(printable(name), f"{value:.6g}")
    _write_json(args.json, vars(found))
    if args.report is None:
        return [table]
    from echo_jax.inference.report import write_evaluation

    return [table, printable(write_evaluation(run, found, args.report))]


def run_predict(args: argparse.Namespace) -> list[Any]:
    """Predicts for files; returns the objects to print."""
    from echo_jax.inference.run import load_run

    run = load_run(args.workdir, args.update)
    if args.text and not run.is_of_text:
        raise ValueError(
            f"--text is for models of text, and {args.workdir} was trained on images; "
            "name files"
        )
    args.text = [_typed_text(text) for text in args.text]
    if not args.files and not args.text:
        raise ValueError("there is nothing to predict; name files after WORKDIR")
    if run.is_of_text:
        return _continue_texts(run, args)
    args.files = [each for named in args.files for each in _images_of(named)]
    outputs, unread = _predicted(run, args)
    if "boxes" in outputs:
        return [*_draw_detections(run, args, outputs), *unread]
    return [*_name_classes(run, args, outputs["probabilities"]), *unread]


def _predicted(run: Any, args: argparse.Namespace) -> tuple[Any, list[str]]:
    try:
        return run.predict(args.files), []
    except (OSError, ValueError):
        unread = {}
        for file in args.files:
            try:
                run.read([file])
            except (OSError, ValueError) as error:
                unread[file] = printable(f"left out: {sentence(error)}")
        if len(unread) in (0, len(args.files)):
            raise
        args.files = [file for file in args.files if file not in unread]
        return run.predict(args.files), [*unread.values()]


def run_export(args: argparse.Namespace) -> list[Any]:
    """Exports a run; returns the objects to print."""
    from echo_jax.inference.export import export_run
    from echo_jax.inference.run import load_run

    run = load_run(args.workdir, args.update)
    return [printable(export_run(run, args.to, args.out))]


def _images_of(named: str) -> list[str]:
    folder = typed_path(named)
    if not folder.is_dir():
        return [named]
    # Imported here: it imports OpenCV.
    from echo_jax.data.prepare.examples import is_image

    images = sorted(
        str(path)
        for path in folder.iterdir()
        if is_image(path.name) and not path.name.startswith(".") and path.is_file()
    )
    if not images:
        raise ValueError(
            f"the folder {named} holds no image right in it, such as .jpg or .png; "
            "name one that does, or files"
        )
    return images


def _continue_texts(run: Any, args: argparse.Namespace) -> list[Any]:
    prompts = [*map(_text_of, args.files), *args.text]
    added = run.generate(
        prompts, tokens=args.tokens, temperature=args.temperature, seed=args.seed
    )
    names = [*args.files, *args.text]
    found = [{"of": o, "text": text} for o, text in zip(names, added, strict=True)]
    _write_json(args.json, found)
    said = []
    for prompt, text in zip(prompts, added, strict=True):
        # Line by line: a model's text may contain any character.
        lines = f"{prompt[-_CONTEXT:]}{text}".split("\n")
        said.append("\n".join(map(printable, lines)) + "\n")
    return said


def _text_of(file: str) -> str:
    path = typed_path(file)
    if path.is_dir():
        raise ValueError(f"{file} is a folder; name the files of text in it")
    try:
        return read_text(path.read_bytes())
    except EncodingError as error:
        raise ValueError(f"{file} cannot be read: {error}") from error


def _typed_text(text: str) -> str:
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text={text!r} is not UTF-8: {error}") from error


def _name_classes(
    run: Any, args: argparse.Namespace, probabilities: np.ndarray
) -> list[Any]:
    best = np.argsort(-probabilities, axis=1)[:, :_MOST_CLASSES]
    table = Table(title=printable(f"{args.workdir}, update {run.update}"))
    for heading in ("file", "class", "others"):
        table.add_column(heading, overflow="fold")
    found = {}
    for file, order, row in zip(args.files, best, probabilities, strict=True):
        named = [(run.classes[index], float(row[index])) for index in order]
        found[file] = [{"class": name, "probability": p} for name, p in named]
        first, *others = (f"{printable(name)} {p:.1%}" for name, p in named)
        table.add_row(printable(file), first, ", ".join(others))
    _write_json(args.json, found)
    return [table]


def _draw_detections(
    run: Any, args: argparse.Namespace, outputs: dict[str, np.ndarray]
) -> list[Any]:
    from echo_jax.data.images.decode import decode_image
    from echo_jax.inference.pictures import draw_boxes

    folder = run_folder(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    said, found, names_taken = [], {}, Counter[str]()
    for row, file in enumerate(args.files):
        is_sure = outputs["scores"][row] >= max(args.min_score, 1e-9)
        boxes, scores, labels = (
            outputs[name][row][is_sure] for name in ("boxes", "scores", "labels")
        )
        found[file] = [
            {"class": run.classes[label], "score": float(score), "box": box.tolist()}
            for label, score, box in zip(labels, scores, boxes, strict=True)
        ]
        texts = [f"{printable(x['class'])} {x['score']:.2f}" for x in found[file]]
        image = decode_image(typed_path(file).read_bytes())
        # Files with one name in several folders get separate pictures.
        stem = Path(file).stem
        names_taken[stem] += 1
        number = f"-{names_taken[stem]}" if names_taken[stem] > 1 else ""
        picture: epath.Path = folder / f"{stem}{number}.png"
        write(picture, draw_boxes(image, boxes, labels.tolist(), texts))
        said.append(f"{printable(picture)}  {', '.join(texts) or 'nothing found'}")
    _write_json(args.json, found)
    return said


def _write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
