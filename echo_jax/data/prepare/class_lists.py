"""Lists of the class of each file, and of the names of the classes."""

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.prepare.entries import Image, file_metadata
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.files import archive_of, open_files
from echo_jax.data.prepare.imagenet_devkit import is_devkit, read_devkit
from echo_jax.files.plain_text import read_text

__all__ = [
    "CLASSES",
    "TINY_IMAGENET",
    "called",
    "list_metadata",
    "listed_class",
    "read_list",
    "read_names",
    "tiny_imagenet",
]

CLASSES = ("auto", "first", "last")
"""What may name a class, beside a list of files."""

TINY_IMAGENET = "val_annotations.txt"
"""Where Tiny-ImageNet says it of its validation images: file, class, box."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# pandas writes a column of integers like this if a value is missing.
_FLOAT = re.compile(r"(\d+)\.0+")
_MAX_LIST_BYTES = 256 * 1024**2


def read_list(path: Path) -> dict[str, str]:
    """Returns the class by file name, from a table or ImageNet's devkit."""
    if path.suffix.lower() not in _DELIMITERS and not is_devkit(path):
        raise PrepareError(
            f"--classes={path} is none of {', '.join(CLASSES)}, and no .csv or .tsv "
            "file, nor the .tar.gz of ImageNet's devkit"
        )
    try:
        if is_devkit(path):
            return read_devkit(path)
        rows = _rows(_content(path), _DELIMITERS[path.suffix.lower()])
        return _pairs(_whole_classes(rows, 1))
    except (OSError, ValueError, csv.Error) as error:
        raise PrepareError(f"--classes={path} cannot be read: {error}") from error


def read_names(path: Path) -> dict[str, str]:
    """Returns the name by class, from a table or a text file such as ``words.txt``."""
    suffix = path.suffix.lower()
    if suffix not in (".txt", *_DELIMITERS):
        raise PrepareError(f"--names={path} is no .txt, .csv or .tsv file")
    try:
        content = _content(path)
        is_text = suffix == ".txt"
        rows = _lines(content) if is_text else _rows(content, _DELIMITERS[suffix])
        return _pairs(_whole_classes(rows, 0))
    except (OSError, ValueError, csv.Error) as error:
        raise PrepareError(f"--names={path} cannot be read: {error}") from error


def called(classes: Sequence[str], names: Mapping[str, str], path: Path) -> list[str]:
    """Returns the names of classes; equal names get their class added."""
    if nameless := [each for each in classes if each not in names]:
        raise PrepareError(
            f"--names={path} has no name for {len(nameless)} of {len(classes)} "
            f"classes, such as {nameless[0]!r}; add a row for each"
        )
    number = Counter(names[each] for each in classes)
    return [
        names[each] if number[names[each]] == 1 else f"{names[each]} ({each})"
        for each in classes
    ]


def list_metadata(path: Path) -> dict[str, Any]:
    """Returns the path, size and hash of a list's file or archive."""
    return {**file_metadata(archive_of(path)[0] or path), "path": str(path)}


def _content(path: Path) -> bytes:
    """Returns the content of a list, which may be in an archive."""
    archive, within = archive_of(path)
    if archive and within:
        files = open_files(archive, lambda what, part: None)
        indices = [k for k, entry in enumerate(files.entries) if entry.name == within]
        if not indices:
            raise ValueError(f"{str(archive)!r} holds no file {within!r}")
        (read,) = files.contents(indices[:1], _MAX_LIST_BYTES)
        content = read()
    else:
        with path.open("rb") as stream:
            content = stream.read(_MAX_LIST_BYTES + 1)
    if len(content) > _MAX_LIST_BYTES:
        raise ValueError(f"it is larger than {_MAX_LIST_BYTES} bytes")
    return content


def listed_class(listed: Mapping[str, str], name: str) -> str:
    """Returns the class of a file by its name, ignoring folders if necessary."""
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
                rows = _pairs(_rows(read(), "\t"))
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


def _rows(content: bytes, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number and the fields of each row of a table."""
    lines = io.StringIO(read_text(content))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    for row in reader:
        yield reader.line_num, row


def _lines(content: bytes) -> Iterator[tuple[int, list[str]]]:
    """Yields the line number, the class and its first name."""
    for number, line in enumerate(read_text(content).split("\n"), start=1):
        first, *names = line.split(maxsplit=1) or [""]
        yield number, [first, *(name.split(",")[0].strip() for name in names)]


def _whole_classes(
    rows: Iterable[tuple[int, list[str]]], column: int
) -> list[tuple[int, list[str]]]:
    """Turns a column of whole floats into integers; a title may precede them."""
    listed = [*rows]
    found = [row for _, row in listed if len(row) > column]
    if all(_FLOAT.fullmatch(row[column]) for row in found[1:] or found):
        for row in found:
            if is_float := _FLOAT.fullmatch(row[column]):
                row[column] = is_float[1]
    return listed


def _pairs(rows: Iterable[tuple[int, list[str]]]) -> dict[str, str]:
    """Returns the second column of a table by the first one."""
    pairs: dict[str, str] = {}
    for line, row in rows:
        if not any(row):
            continue
        if len(row) < 2 or not (row[0] and row[1]):
            raise ValueError(f"line {line} lacks one of its first two columns")
        if not row[1].isprintable():
            raise ValueError(f"line {line} has {row[1]!r}, which cannot be printed")
        name = str(PurePosixPath(row[0]))
        if pairs.setdefault(name, row[1]) != row[1]:
            raise ValueError(
                f"{name!r} is {pairs[name]!r} and, in line {line}, {row[1]!r}"
            )
    if not pairs:
        raise ValueError("it is empty")
    return pairs
