"""The class of each image, and checks that the classes look right."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_jax.data.prepare.class_lists import (
    TINY_IMAGENET,
    listed_class,
    tiny_imagenet,
)
from echo_jax.data.prepare.entries import Image
from echo_jax.data.prepare.examples import is_image
from echo_jax.data.prepare.files import (
    first_difference,
    folders_of,
    several_splits,
    split_folders,
)
from echo_jax.data.prepare.job import PrepareError

__all__ = ["ClassNames", "check_classes", "class_names"]

_HOW = "--classes first, --classes last or --classes FILE.csv"


@dataclass(frozen=True)
class ClassNames:
    """The classes of the images of a split.

    Attributes:
      names: The class of each image; empty if it is unknown.
      without: Describes an image without a class, in a few words.
      where: Describes the origin of the classes, in a few words.
    """

    names: Sequence[str]
    without: str
    where: str


# "first" is the outermost folder that differs between images, and "last" is the folder
# of the image. "auto" is "last", or the innermost folder above that differs.
def class_names(
    images: Mapping[str, Sequence[Image]], how: str, listed: Mapping[str, str]
) -> dict[str, ClassNames]:
    """Returns the classes of each split, by folder (`how`) or by a list of files."""
    found: dict[str, ClassNames] = {}
    for split, of in images.items():
        if how == "auto":
            _refuse_splits(of)
        by_list = [listed_class(listed, files.entries[i].name) for files, i in of]
        if any(by_list):
            name = Path(how).name
            found[split] = ClassNames(by_list, f"not in {name}", name)
        elif how == "auto" and (notes := tiny_imagenet(of)):
            names = [notes.get((id(files), i), "") for files, i in of]
            found[split] = ClassNames(names, f"not in {TINY_IMAGENET}", TINY_IMAGENET)
        else:
            names = _by_folder(of, "auto" if listed else how)
            found[split] = ClassNames(names, "in no class folder", "their folders")
    if listed and not any(names.where == Path(how).name for names in found.values()):
        files, index = next(iter(images.values()))[0]
        raise PrepareError(
            f"--classes={how} names no image: its first file is "
            f"{next(iter(listed))!r}, and the first image {files.entries[index].name!r}"
        )
    return found


def check_classes(
    found: Mapping[str, ClassNames], classes: Sequence[str], how: str, may_skip: int
) -> None:
    """Refuses a single class, and splits with different classes."""
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
    """Returns the class of each image by its folders; empty without folders."""
    folders = [folders_of(files.entries[index].name) for files, index in images]
    if how == "first":
        depths = {}
        for (files, _), of in zip(images, folders, strict=True):
            depths.setdefault(id(files), []).append(of)
        depths = {key: first_difference(of) for key, of in depths.items()}
        return [
            of[min(depths[id(files)], len(of) - 1)] if of else ""
            for (files, _), of in zip(images, folders, strict=True)
        ]
    if how == "last":
        return [of[-1] if of else "" for of in folders]
    level = _level(folders)
    _refuse_nested(images, folders, level)
    return [of[-level] if len(of) >= level else "" for of in folders]


def _level(folders: Sequence[tuple[str, ...]]) -> int:
    """Returns how far above the images the folders differ."""
    for level in range(1, 1 + max(map(len, folders))):
        if len({of[-level] for of in folders if len(of) >= level}) > 1:
            return level
    return 1


def _refuse_splits(images: Sequence[Image]) -> None:
    """Refuses a source that holds a folder for each split."""
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
    """Refuses class folders that are nested or share a name."""
    known: dict[int, dict[tuple[str, ...], None]] = defaultdict(dict)
    for (files, _), of in zip(images, folders, strict=True):
        if len(of) >= level:
            known[id(files)][of[: len(of) - level + 1]] = None
    for paths in known.values():
        for one, other in _suspicious(paths):
            raise PrepareError(
                f"it is not plain which folder names the class of an image, as there "
                f"are {'/'.join(one)!r} and {'/'.join(other)!r}: --classes first takes "
                f"the outermost that differ, --classes last the innermost"
            )


def _suspicious(
    paths: Mapping[tuple[str, ...], None],
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Yields pairs of class folders that are nested or have the same name."""
    by_name: dict[str, tuple[str, ...]] = {}
    for path in paths:
        if (other := by_name.setdefault(path[-1], path)) != path:
            yield other, path
        for depth in range(1, len(path)):
            if path[:depth] in paths:
                yield path[:depth], path
