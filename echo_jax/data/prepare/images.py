"""Labelled images: a folder or archive of class folders becomes shards."""

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.prepare.errors import Bad, PrepareError, Skipped, allowed
from echo_jax.data.prepare.examples import Example, hold_out, is_image, write_splits
from echo_jax.data.prepare.files import Files, open_files
from echo_jax.data.prepare.job import Settings, parse_sources
from echo_jax.data.prepare.workspace import Workspace

__all__ = ["prepare_images"]

_FEATURES = {
    "image": "bytes of a JPEG or PNG file, as found",
    "label": "int, the index in classes",
    "name": "str, the file's path in the source",
}


def prepare_images(arguments: Sequence[str], settings: Settings) -> dict[str, Any]:
    """Makes a prepared folder of labelled images.

    The class of an image is the name of the folder that it lies in; labels are
    positions in the sorted class names of the train split. Images keep the order of
    their source, class after class in a folder: readers shuffle by index. They keep
    their bytes too: nothing is encoded again.

    Args:
      arguments: ``SPLIT=SOURCE`` or ``SOURCE``: folders or tar archives of class
        folders.
      settings: The rest of the command.

    Returns:
      The content of ``dataset.json``.

    Raises:
      PrepareError: If a source is not what it should be, if too much of it is bad,
        or if the folder holds anything else.

    Example:
      >>> prepare_images(["train=train.tar.gz"], Settings(out=Path("data/cifar10")))
    """
    sources = parse_sources(arguments, settings.holdout)
    options = settings.options(sources, kind="images")
    with Workspace(settings.out, options, settings.on_progress) as work:
        files = {
            split: [open_files(Path(path), settings.on_progress) for path in paths]
            for split, paths in sources.items()
        }
        metadata = {split: [part.metadata for part in files[split]] for split in files}
        if (info := work.begin(metadata)) is not None:
            return info
        found = {split: _images(split, parts) for split, parts in files.items()}
        classes = _classes(found)
        total = sum(len(images) for images in found.values())
        skipped = Skipped(allowed(settings.max_bad, total), total)
        splits = {
            split: _labelled(split, images, classes, skipped)
            for split, images in found.items()
        }
        skipped.check()
        splits = hold_out(splits, settings.holdout)
        write_splits(work, splits, settings, skipped)
        return work.publish(
            {split: {} for split in splits},
            files=[],
            info={
                "kind": "images",
                "features": _FEATURES,
                "classes": classes,
                "skipped": skipped.metadata(),
            },
        )


def _images(split: str, parts: Sequence[Files]) -> list[tuple[Files, int]]:
    """Returns the images of a split: in which source, and which entry of it."""
    images = [
        (files, index)
        for files in parts
        for index, entry in enumerate(files.entries)
        if is_image(entry.name)
    ]
    if not images:
        paths = ", ".join(repr(files.metadata["path"]) for files in parts)
        raise PrepareError(
            f"split {split!r}: there is no .jpg, .jpeg or .png file in {paths}"
        )
    return images


def _classes(found: Mapping[str, Sequence[tuple[Files, int]]]) -> list[str]:
    """Returns the class names of the train split, or of all if there is none."""
    of = [found["train"]] if "train" in found else list(found.values())
    names = {
        _class_of(files.entries[index].name) for images in of for files, index in images
    }
    return sorted(names - {""})


def _class_of(name: str) -> str:
    """Returns the name of the folder that a file lies in; empty if in none."""
    return PurePosixPath(name).parent.name


def _labelled(
    split: str,
    images: Sequence[tuple[Files, int]],
    classes: Sequence[str],
    skipped: Skipped,
) -> list[Example]:
    """Returns the images of a split with their labels."""
    labels = {name: label for label, name in enumerate(classes)}
    names, examples = set(), []
    for files, index in images:
        name = files.entries[index].name
        label = labels.get(_class_of(name))
        if label is None:
            known = "in no class folder" if not _class_of(name) else "of unknown class"
            skipped.add(Bad(split, name, known))
        elif (id(files), name) in names:
            skipped.add(Bad(split, name, "twice in the source"))
        else:
            names.add((id(files), name))
            entries = {"label": label, "name": name}
            examples.append(Example(files, index, entries))
    return examples
