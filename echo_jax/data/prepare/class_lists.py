"""Lists that say which class each file is of."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from echo_jax.data.prepare.entries import Image
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.imagenet_devkit import is_devkit, read_devkit

__all__ = ["CLASSES", "TINY_IMAGENET", "listed_class", "read_list", "tiny_imagenet"]

CLASSES = ("auto", "first", "last")
"""What may name a class, beside a list of files."""

TINY_IMAGENET = "val_annotations.txt"
"""Where Tiny-ImageNet says it of its validation images: file, class, box."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_MAX_LIST_BYTES = 256 * 1024**2


def read_list(path: Path) -> dict[str, str]:
    """Reads which class each file is of.

    Args:
      path: A ``.csv`` or ``.tsv`` file in UTF-8: a row for each image, of which the
        first column names the file, with its ending or without, with its folders or
        without, and the second its class. A row of titles does no harm. Or the
        devkit of ImageNet, ``ILSVRC2012_devkit_t12.tar.gz``.

    Returns:
      The class by file.

    Raises:
      PrepareError: If it is no such file, or gives a file two classes.
    """
    if path.suffix.lower() not in _DELIMITERS and not is_devkit(path):
        raise PrepareError(
            f"--classes={path} is none of {', '.join(CLASSES)}, and no .csv or .tsv "
            "file, nor the .tar.gz of ImageNet's devkit"
        )
    try:
        if is_devkit(path):
            return read_devkit(path)
        with path.open("rb") as stream:
            content = stream.read(_MAX_LIST_BYTES + 1)
        if len(content) > _MAX_LIST_BYTES:
            raise ValueError(f"it is larger than {_MAX_LIST_BYTES} bytes")
        return _rows(content, _DELIMITERS[path.suffix.lower()])
    except (OSError, ValueError, csv.Error) as error:
        raise PrepareError(f"--classes={path} cannot be read: {error}") from error


def listed_class(listed: Mapping[str, str], name: str) -> str:
    """Returns the class of a file by its name, whatever folders it lies in."""
    while listed and name:
        for known in (name, str(PurePosixPath(name).with_suffix(""))):
            if known in listed:
                return listed[known]
        name = name.partition("/")[2]
    return ""


def tiny_imagenet(images: Sequence[Image]) -> dict[tuple[int, int], str]:
    """Returns the classes that Tiny-ImageNet's own lists give to images."""
    found = {}
    for files in {id(files): files for files, _ in images}.values():
        lists = [
            (index, entry)
            for index, entry in enumerate(files.entries)
            if f"/{entry.name}".endswith(f"/{TINY_IMAGENET}")
        ]
        if not lists:
            continue
        of_name = {entry.name: index for index, entry in enumerate(files.entries)}
        for index, entry in lists:
            (read,) = files.contents([index], _MAX_LIST_BYTES)
            try:
                rows = _rows(read(), "\t")
            except (OSError, ValueError, csv.Error) as error:
                raise PrepareError(
                    f"{entry.name!r} of {files.metadata['path']!r} cannot be read: "
                    f"{error}; say with --classes FILE.csv what it should"
                ) from error
            for name, of_class in rows.items():
                image = of_name.get(
                    str(PurePosixPath(entry.name).parent / "images" / name)
                )
                if image is not None:
                    found[id(files), image] = of_class
    return found


def _rows(content: bytes, delimiter: str) -> dict[str, str]:
    """Returns the first two columns of a table, the one by the other."""
    rows: dict[str, str] = {}
    lines = io.StringIO(content.decode("utf-8-sig"), newline="")
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    for row in filter(None, reader):
        if len(row) < 2 or not (row[0] and row[1]):
            raise ValueError(f"line {reader.line_num} has no file and class")
        name = str(PurePosixPath(row[0]))
        if rows.setdefault(name, row[1]) != row[1]:
            raise ValueError(
                f"{name!r} is of class {rows[name]!r} and of {row[1]!r}, in line "
                f"{reader.line_num}"
            )
    if not rows:
        raise ValueError("it is empty")
    return rows
