"""Labelled images: turns folders, archives or a list of files into shards."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.prepare.class_lists import (
    CLASSES,
    called,
    list_metadata,
    read_list,
    read_names,
)
from echo_jax.data.prepare.classes import ClassNames, check_classes, class_names
from echo_jax.data.prepare.entries import Files, Image
from echo_jax.data.prepare.examples import Example, hold_out, is_image, write_splits
from echo_jax.data.prepare.files import by_split, open_files
from echo_jax.data.prepare.job import (
    Bad,
    PrepareError,
    Settings,
    Skipped,
    allowed,
    check_holdout,
    names_no_split,
    parse_sources,
)
from echo_jax.data.prepare.workspace import Workspace
from echo_jax.files.folders import typed_path

__all__ = ["prepare_images"]

_FEATURES = {
    "image": "bytes of a JPEG, PNG, WebP, BMP or GIF file, as found",
    "label": "int, the index in classes",
    "name": "str, the file's path in the source",
}
_MAX_SHOWN = 3


def prepare_images(
    arguments: Sequence[str],
    settings: Settings,
    classes: str = "auto",
    names: Path | None = None,
) -> dict[str, Any]:
    """Makes a prepared folder of labelled images.

    Labels are positions in the sorted classes of the train split. Images keep the order
    of their source, because readers shuffle by index. They also keep their bytes:
    nothing is encoded again.

    Args:
      arguments: ``SPLIT=SOURCE`` or ``SOURCE``: folders, tar or zip archives, or
        folders within archives. A single ``SOURCE`` may hold the folders ``train``
        and ``val``, ``valid``, ``validation`` or ``test``, perhaps within one more
        folder. These are its splits, if it holds nothing else. A ``test`` without
        classes is ignored.
      settings: The other options of the command.
      classes: The origin of the class of an image:

        - ``"last"``: the folder of the image.
        - ``"first"``: the outermost folder below the source that differs between
          images.
        - ``"auto"``: like ``"last"``, but skips a folder that has one name in all
          classes, reads Tiny-ImageNet's list of validation images, and refuses a
          result that looks wrong.
        - A ``.csv`` or ``.tsv`` file with a row of file and class for each image. It
          applies to the splits of which it names an image.
        - The devkit of ImageNet, which does so for the validation images.
      names: A file with the names of the classes, see `read_names`; None uses the
        classes themselves.

    Returns:
      The content of ``dataset.json``.

    Raises:
      PrepareError: A source is invalid, too much of it is bad, or the folder holds
        something else.

    Example:
      >>> prepare_images(["train=train.tar.gz"], Settings(out=Path("data/cifar10")))
    """
    sources = parse_sources(arguments, settings.holdout)
    listed = {} if classes in CLASSES else read_list(typed_path(classes))
    names_of = read_names(names) if names else {}
    more = {} if classes == "auto" else {"classes": classes}
    more |= {"names": str(names)} if names else {}
    options = settings.options(sources, kind="images", **more)
    with Workspace(settings.out, options, settings.on_progress) as work:
        files = {
            split: [
                open_files(typed_path(path), settings.on_progress) for path in paths
            ]
            for split, paths in sources.items()
        }
        layout: dict[str, str] = {}
        if names_no_split(arguments):
            files, layout = by_split(files["train"], is_image, of_classes=not listed)
            check_holdout(files, settings.holdout)
        metadata = {split: [part.metadata for part in files[split]] for split in files}
        if listed:
            metadata["classes"] = [list_metadata(typed_path(classes))]
        if names:
            metadata["names"] = [list_metadata(names)]
        if (info := work.begin(metadata)) is not None:
            return info
        images = {split: _images(split, parts) for split, parts in files.items()}
        found = class_names(images, classes, listed)
        of_train = [found["train"]] if "train" in found else found.values()
        known = sorted({name for of in of_train for name in of.names} - {""})
        left_out = layout and "test" in found and not {*found["test"].names} & {*known}
        if left_out:
            del images["test"], found["test"]
        total = sum(map(len, images.values()))
        skipped = Skipped(allowed(settings.max_bad, total), total)
        check_classes(found, known, classes, skipped.limit)
        shown = called(known, names_of, names) if names else known
        splits = {
            split: _labelled(split, of, found[split], known, skipped)
            for split, of in images.items()
        }
        skipped.check()
        splits = hold_out(splits, settings.holdout)
        unusable = write_splits(work, splits, settings, skipped)
        about = {}
        for split, examples in splits.items():
            good = [e for e in examples if (split, e.name) not in unusable]
            counts = Counter(example.entries["label"] for example in good)
            about[split] = {"of_class": [counts[i] for i in range(len(known))]}
        return work.publish(
            about,
            files=[],
            info={
                "kind": "images",
                "features": _FEATURES,
                "classes": shown,
                "skipped": skipped.metadata(),
                **({"layout": layout} if layout else {}),
                **({"left_out": ["test"]} if left_out else {}),
            },
        )


def _images(split: str, parts: Sequence[Files]) -> list[Image]:
    """Returns the images of a split: the source and the entry of each."""
    images = [
        (files, index)
        for files in parts
        for index, entry in enumerate(files.entries)
        if is_image(entry.name)
    ]
    if not images:
        paths = ", ".join(repr(files.metadata["path"]) for files in parts)
        suffixes = Counter(
            PurePosixPath(entry.name).suffix.lower() or "without an ending"
            for files in parts
            for entry in files.entries
        ).most_common(_MAX_SHOWN)
        there = ", ".join(f"{number} {suffix}" for suffix, number in suffixes)
        raise PrepareError(
            f"split {split!r}: there is no image file, such as .jpg or .png, in "
            f"{paths}, where there are {there or 'none'}; unpack or convert what holds "
            "the images"
        )
    return images


def _labelled(
    split: str,
    images: Sequence[Image],
    of_class: ClassNames,
    classes: Sequence[str],
    skipped: Skipped,
) -> list[Example]:
    """Returns the images of a split with their labels."""
    labels = {name: label for label, name in enumerate(classes)}
    names, examples = set(), []
    for (files, index), class_name in zip(images, of_class.names, strict=True):
        name = files.entries[index].name
        label = labels.get(class_name)
        if label is None:
            reason = "of unknown class" if class_name else of_class.without
            skipped.add(Bad(split, name, reason))
        elif (id(files), name) in names:
            skipped.add(Bad(split, name, "twice in the source"))
        else:
            names.add((id(files), name))
            entries = {"label": label, "name": name}
            examples.append(Example(files, index, entries))
    return examples
