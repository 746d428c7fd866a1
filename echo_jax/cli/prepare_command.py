"""The command ``echo-jax prepare``: its options and its output."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from echo_jax.cli.command_end import add_number, path_argument
from echo_jax.terminal.printable import printable

_IMAGES_EPILOG = """\
A SOURCE is a folder, a .zip, .tar, .tar.gz, .tar.xz or .tar.bz2 file, or a folder
within such a file, in which every image lies in a folder with the name of its class;
an archive within an archive is such a folder, too.
Or it is a .parquet file of images and labels, as Hugging Face has them, a SOURCE for
each file (pip install 'echo-jax[parquet]'). SPLIT=SOURCE says which split it is;
without SPLIT= it is train, or, where it holds nothing but the folders train and val,
valid, validation or test, those splits. Images keep their bytes and their order.

examples:
  echo-jax prepare images train=train.tar.gz validation=test.tar.gz --out data/cifar10
  echo-jax prepare images photos/ --holdout 0.05 --out data/photos
  echo-jax prepare images train=train-00000-of-00001.parquet \\
      validation=test-00000-of-00001.parquet --out data/cifar10_hf
  echo-jax prepare images tiny-imagenet-200.zip \\
      --names tiny-imagenet-200.zip/tiny-imagenet-200/words.txt \\
      --out data/tiny_imagenet
  echo-jax prepare images train=ILSVRC2012_img_train.tar \\
      validation=ILSVRC2012_img_val.tar --classes ILSVRC2012_devkit_t12.tar.gz \\
      --out data/imagenet"""

_COCO_EPILOG = """\
A SOURCE is ANNOTATIONS:IMAGES: an instances_*.json, plain, .gz, .xz, .bz2 or within a
.zip, and a folder, .zip or tar archive of images, which need not be unpacked.
SPLIT=SOURCE says which split it is; without SPLIT= it is train.

examples:
  echo-jax prepare coco train=instances_train2017.json:train2017/ \\
      validation=instances_val2017.json:val2017/ --out data/coco
  echo-jax prepare coco \\
      train=annotations.zip/annotations/instances_train2017.json:train2017.zip \\
      validation=annotations.zip/annotations/instances_val2017.json:val2017.zip \\
      --out data/coco2017"""

_TEXT_EPILOG = """\
A SOURCE is a text file in UTF-8, plain or .gz, .xz, .bz2, or a folder of such files.
Line ends of every system are read as line feeds, and a byte-order mark is dropped.
SPLIT=SOURCE says which split it is; without SPLIT= it is train, or, where it holds
nothing but the folders train and val, valid, validation or test, those splits. A split
may have several.

examples:
  echo-jax prepare text train=train.txt.xz validation=valid.txt.xz --out data/wikitext2
  echo-jax prepare text books/ --holdout 0.05 --tokenizer bytes --out data/books
  echo-jax prepare text input.txt --holdout 0.1 --tokenizer bytes --out data/one"""

_MAX_SHOWN = 10
_EVALUATED = ("validation", "valid", "val", "test")


def add_kinds(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Adds a command for each kind of data."""
    images = add("images", "class folders of images", _IMAGES_EPILOG)
    coco = add("coco", "images with boxes in COCO's format", _COCO_EPILOG)
    text = add("text", "text, as blocks of tokens", _TEXT_EPILOG)
    for kind in (images, coco, text):
        _add_common(kind)
    text.add_argument(
        "--tokenizer",
        choices=("sentencepiece", "bytes"),
        default="sentencepiece",
        help="subwords, learnt from the train split, or bytes (default: %(default)s)",
    )
    add_number(text, "--vocab", 8192, "N", "number of subwords")
    text.add_argument(
        "--tokenizer-model",
        type=path_argument,
        metavar="FILE",
        help="a sentencepiece model to use instead of learning one",
    )
    text.add_argument(
        "--document",
        choices=("file", "line", "blank"),
        default="file",
        help="what ends with an end-of-document token: a file, a line, or what blank "
        "lines stand between (default: %(default)s)",
    )
    about = "tokens of a record: the model's sequence length"
    add_number(text, "--block", 256, "T", about)
    images.add_argument(
        "--classes",
        default="auto",
        metavar="HOW",
        help="what names the class of an image: first, the outermost folder below its "
        "SOURCE that is not the same for all; last, the folder that it lies in; a .csv "
        "or .tsv FILE with a row of file and class for each image of a split; "
        "ImageNet's ILSVRC2012_devkit_t12.tar.gz, for its validation images; auto, "
        "like last, but passes over a folder of one name in all classes, reads "
        "Tiny-ImageNet's val_annotations.txt, and refuses what looks wrong "
        "(default: %(default)s)",
    )
    images.add_argument(
        "--names",
        type=path_argument,
        metavar="FILE",
        help="what the classes are called: a .csv or .tsv file with a row of class and "
        "name for each, Tiny-ImageNet's words.txt, or ImageNet's "
        "LOC_synset_mapping.txt (default: as their folders)",
    )
    verify = add(
        "verify",
        "check that all files of a prepared folder are as they were written",
        "example:\n  echo-jax prepare verify data/cifar10",
    )
    verify.add_argument(
        "folder", type=path_argument, metavar="FOLDER", help="a prepared folder"
    )


def _add_common(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("sources", nargs="+", metavar="SOURCE", help="see below")
    kind.add_argument(
        "--out",
        required=True,
        type=path_argument,
        metavar="FOLDER",
        help="receives the data; the same command goes on where it was stopped",
    )
    kind.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="make a validation split of this share of train, chosen by a hash of "
        "names; of a single text file that is one document, its end (default: none)",
    )
    kind.add_argument(
        "--max-bad",
        default="0.1%",
        metavar="N",
        help="skip and count what cannot be used, up to this number, or share as in "
        "1%% (default: 0.1%%, rounded down)",
    )
    kind.add_argument(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="threads; changes nothing in the result (default: one per core)",
    )
    about = (
        "size of a shard, roughly; a stopped command resumes at its unfinished shard"
    )
    add_number(kind, "--shard-mb", 256.0, "MB", about)


def run(args: argparse.Namespace, on_progress: Callable[[str, float], None]) -> str:
    """Runs the command and returns the text to print at the end."""
    # Imported here: `--help` does not need it.
    from echo_jax.data import prepare
    from echo_jax.data.sources.prepared import verify

    if args.kind == "verify":
        number = verify(args.folder)
        return f"{printable(args.folder)}: all {number} files are as written"
    settings = prepare.Settings(
        out=args.out,
        holdout=args.holdout,
        max_bad=args.max_bad,
        workers=args.workers,
        shard_mb=args.shard_mb,
        on_progress=on_progress,
    )
    if args.kind == "images":
        info = prepare.prepare_images(args.sources, settings, args.classes, args.names)
    elif args.kind == "coco":
        info = prepare.prepare_coco(args.sources, settings)
    else:
        text = prepare.TextSettings(
            tokenizer=args.tokenizer,
            vocab=args.vocab,
            tokenizer_model=args.tokenizer_model,
            document=args.document,
            block=args.block,
        )
        info = prepare.prepare_text(args.sources, settings, text)
    lines = [*_summary(info), "", str(args.out / "dataset.json")]
    return "\n".join(map(printable, lines))


def _summary(info: Mapping[str, Any]) -> list[str]:
    lines = []
    if layout := info.get("layout"):
        found = (
            f"{path} is left out, as nothing names its classes"
            if split in info.get("left_out", ())
            else f"{path} is {split}"
            for path, split in layout.items()
        )
        lines.append(f"folders of splits: {', '.join(found)}")
    for split, metadata in info["splits"].items():
        size = sum(shard["bytes"] for shard in metadata["shards"]) / 1e6
        shards = len(metadata["shards"])
        known = [name for name in ("boxes", "documents", "tokens") if name in metadata]
        more = "".join(f", {metadata[name]} {name}" for name in known)
        lines.append(
            f"{split}: {metadata['examples']} examples{more}{_classes(metadata)}, "
            f"{size:.1f} MB in {shards} shard{'s' if shards > 1 else ''}"
        )
    if clipped := info.get("clipped_boxes"):
        lines.append(f"boxes clipped to their image: {clipped}")
    lines += info.get("notes", [])
    skipped = info["skipped"]
    if skipped["count"]:
        reasons = (f"{number} {why}" for why, number in skipped["reasons"].items())
        lines.append(f"skipped: {', '.join(reasons)}")
        lines += [
            f"  {bad['split']}: {bad['name']} ({bad['reason']})"
            for bad in skipped["first"][:_MAX_SHOWN]
        ]
        if skipped["count"] > _MAX_SHOWN:
            lines.append("  and more: see skipped in dataset.json")
    if not any(split in _EVALUATED for split in info["splits"]):
        lines.append(
            "no validation split, which training evaluates on: add validation=SOURCE "
            "or --holdout 0.05, with another --out"
        )
    return lines


def _classes(metadata: Mapping[str, Any]) -> str:
    counts = metadata.get("of_class")
    if counts is None:
        return ""
    least, most = min(filter(None, counts)), max(counts)
    here, known = sum(map(bool, counts)), len(counts)
    of = f"{known}" if here == known else f"{here} of {known}"
    each = f"{most}" if least == most else f"{least} to {most}"
    return f" in {of} class{'es' if known > 1 else ''} of {each} each"
