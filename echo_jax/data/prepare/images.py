"""Labelled images: turns folders, archives or a list of files into shards."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from echo_jax.data.prepare.archives import Files, Image, counted, nfc, respelt
from echo_jax.data.prepare.class_lists import (
    CLASSES,
    TINY_IMAGENET,
    called,
    list_metadata,
    listed_class,
    read_list,
    read_names,
    tiny_imagenet,
)
from echo_jax.data.prepare.examples import Example, images_of, is_image, write_splits
from echo_jax.data.prepare.files import (
    by_split,
    first_difference,
    folders_of,
    open_files,
    several_splits,
    split_folders,
)
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

_FEATURES = {
    "image": "bytes of a JPEG, PNG, WebP, BMP, GIF or PPM file, as found",
    "label": "int, the index in classes",
    "name": "str, the file's path in the source",
}
_IGNORED = "left out, as no images"
_MAX_SHOWN = 3
_HOW = "--classes first, --classes last or --classes FILE.csv"


class _ClassNames(NamedTuple):
    """The class of each image (or an empty text), what others lack, and the origin."""

    names: Sequence[str]
    without: str
    where: str


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
        found = _class_names(images, classes, listed)
        notes = respelt(name for of in found.values() for name in of.names)
        found = {
            split: of._replace(names=[*map(nfc, of.names)])
            for split, of in found.items()
        }
        of_train = [found["train"]] if "train" in found else found.values()
        known = sorted({name for of in of_train for name in of.names} - {""})
        left_out = layout and "test" in found and not {*found["test"].names} & {*known}
        if left_out:
            del images["test"], found["test"]
        total = sum(map(len, images.values()))
        skipped = Skipped(allowed(settings.max_bad, total), total)
        _check_classes(found, known, classes, skipped.limit)
        shown = called(known, names_of, names) if names else known
        splits = {
            split: _labelled(split, of, found[split], known, skipped)
            for split, of in images.items()
        }
        about = {}
        for split, usable in write_splits(work, splits, settings, skipped).items():
            counts = Counter(example.entries["label"] for example in usable)
            about[split] = {"of_class": [counts[i] for i in range(len(known))]}
        return work.publish(
            about,
            files=[],
            info={
                "kind": "images",
                "features": _FEATURES,
                "classes": shown,
                "skipped": skipped.metadata(),
                "notes": [*counted(_IGNORED, _ignored(files, images)), *notes],
                **({"layout": layout} if layout else {}),
                **({"left_out": ["test"]} if left_out else {}),
            },
        )


def _images(split: str, parts: Sequence[Files]) -> list[Image]:
    images = [(files, index) for files in parts for index in images_of(files)]
    if not images:
        paths = ", ".join(repr(files.metadata["path"]) for files in parts)
        suffixes = Counter(
            _ending(entry.name) for files in parts for entry in files.entries
        ).most_common(_MAX_SHOWN)
        there = ", ".join(f"{number} {suffix}" for suffix, number in suffixes)
        raise PrepareError(
            f"split {split!r}: there is no image file, such as .jpg or .png, in "
            f"{paths}, where there are {there or 'none'}; unpack or convert what holds "
            "the images"
        )
    return images


def _ending(name: str) -> str:
    return PurePosixPath(name).suffix.lower() or "without an ending"


def _ignored(
    files: Mapping[str, Sequence[Files]], images: Mapping[str, Sequence[Image]]
) -> Iterator[tuple[str, str]]:
    """Yields the kind and the name of every file and folder without an image."""
    for split, of in images.items():
        taken = {(id(part), index) for part, index in of}
        for part in files[split]:
            full, others = set(), {*part.folders}
            for index, entry in enumerate(part.entries):
                folder = entry.name.rpartition("/")[0]
                if (id(part), index) in taken:
                    full.add(folder)
                else:
                    others.add(folder)
                    yield _ending(entry.name), f"{split}: {entry.name}"
            above = {PurePosixPath(folder, "x").parents for folder in full}
            full = {PurePosixPath("."), *itertools.chain(*above)}
            for folder in sorted({*map(PurePosixPath, others)} - full):
                if folder.parent in full:
                    yield "folders without an image", f"{split}: {folder}"


def _labelled(
    split: str,
    images: Sequence[Image],
    of_class: _ClassNames,
    classes: Sequence[str],
    skipped: Skipped,
) -> list[Example]:
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


# "first" is the outermost folder that differs between images, and "last" is the folder
# of the image. "auto" is "last", or the innermost folder above that differs.
def _class_names(
    images: Mapping[str, Sequence[Image]], how: str, listed: Mapping[str, str]
) -> dict[str, _ClassNames]:
    """Returns the classes of each split, by folder (`how`) or by a list of files."""
    found: dict[str, _ClassNames] = {}
    for split, of in images.items():
        if how == "auto":
            _refuse_splits(of)
        by_list = [listed_class(listed, files.entries[i].name) for files, i in of]
        if any(by_list):
            name = Path(how).name
            found[split] = _ClassNames(by_list, f"not in {name}", name)
        elif how == "auto" and (notes := tiny_imagenet(of)):
            names = [notes.get((id(files), i), "") for files, i in of]
            found[split] = _ClassNames(names, f"not in {TINY_IMAGENET}", TINY_IMAGENET)
        else:
            names = _by_folder(of, "auto" if listed else how)
            found[split] = _ClassNames(names, "in no class folder", "their folders")
    if listed and not any(names.where == Path(how).name for names in found.values()):
        files, index = next(iter(images.values()))[0]
        raise PrepareError(
            f"--classes={how} names no image: its first file is "
            f"{next(iter(listed))!r}, and the first image {files.entries[index].name!r}"
        )
    return found


def _check_classes(
    found: Mapping[str, _ClassNames], classes: Sequence[str], how: str, may_skip: int
) -> None:
    known = {"", *classes}
    for split, of in found.items():
        if not any(of.names):
            raise PrepareError(
                f"no image of split {split!r} lies in a folder below its source, which "
                f"would name its class; say with --classes FILE.csv, a row of file and "
                f"class for each image, of which class they are"
            )
        unknown = [name for name in of.names if name not in known]
        if len(unknown) > may_skip:
            raise PrepareError(
                f"split {split!r} has {len(unknown)} images of "
                f"{len(set(unknown))} classes that train has not, such as "
                f"{min(unknown)!r}, by {of.where}, and train has {len(classes)}, such "
                f"as {classes[0]!r}; say with {_HOW} what names the class, or leave "
                f"such images out with --max-bad={len(unknown)}"
            )
    if len(classes) == 1 and how == "auto":
        split, of = next((s, of) for s, of in found.items() if classes[0] in of.names)
        raise PrepareError(
            f"all {len(of.names)} images of split {split!r} are of one class, "
            f"{classes[0]!r}, by {of.where}; name the folder in which the folders of "
            f"the classes lie, or say with {_HOW} what names the class"
        )


def _by_folder(images: Sequence[Image], how: str) -> list[str]:
    folders = [folders_of(files.entries[index].name) for files, index in images]
    if how == "first":
        of_source = defaultdict(list)
        for (files, _), of in zip(images, folders, strict=True):
            of_source[id(files)].append(of)
        depths = {key: first_difference(of) for key, of in of_source.items()}
        return [
            of[min(depths[id(files)], len(of) - 1)] if of else ""
            for (files, _), of in zip(images, folders, strict=True)
        ]
    level = 1
    if how == "auto":  # The innermost folder that differs.
        levels = range(1, 1 + max(map(len, folders)))
        differ = (
            n for n in levels if len({of[-n] for of in folders if of[n - 1 :]}) > 1
        )
        _refuse_nested(images, folders, level := next(differ, 1))
    return [of[-level] if len(of) >= level else "" for of in folders]


def _refuse_splits(images: Sequence[Image]) -> None:
    for files in {id(files): files for files, _ in images}.values():
        folders, _ = split_folders(files, is_image, of_classes=True)
        if len(folders) > 1:
            path = files.metadata["path"]
            raise PrepareError(
                f"{several_splits(path, folders)}, or say that they are classes: "
                f"train={path} --classes first"
            )


def _refuse_nested(
    images: Sequence[Image], folders: Sequence[tuple[str, ...]], level: int
) -> None:
    known: dict[int, dict[tuple[str, ...], None]] = defaultdict(dict)
    for (files, _), of in zip(images, folders, strict=True):
        if len(of) >= level:
            known[id(files)][of[: len(of) - level + 1]] = None
    for paths in known.values():
        by_name: dict[str, tuple[str, ...]] = {}
        for path in paths:
            above = [path[:n] for n in range(1, len(path)) if path[:n] in paths]
            for other in (by_name.setdefault(path[-1], path), *above):
                if other != path:
                    raise PrepareError(
                        f"it is not plain which folder names the class of an image, as "
                        f"there are {'/'.join(other)!r} and {'/'.join(path)!r}: "
                        f"--classes first takes the outermost that differ, --classes "
                        f"last the innermost"
                    )
