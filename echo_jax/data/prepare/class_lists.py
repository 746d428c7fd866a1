"""Lists of the class of each file (ImageNet's devkit, too) and of class names."""

import contextlib
import csv
import io
import re
import struct
import zlib
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.plain_text import read_text
from echo_jax.data.prepare.archives import (
    Entry,
    Files,
    Image,
    ReadFile,
    TarFiles,
    file_metadata,
    plain_name,
)
from echo_jax.data.prepare.files import archive_of, open_files
from echo_jax.data.prepare.job import PrepareError

CLASSES = ("auto", "first", "last")
"""What may name a class, beside a list of files."""

TINY_IMAGENET = "val_annotations.txt"
"""Where Tiny-ImageNet says it of its validation images: file, class, box."""

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# pandas writes a column of integers like this if a value is missing.
_FLOAT = re.compile(r"(\d+)\.0+")
_MAX_LIST_BYTES = 256 * 1024**2

# The development kit of ImageNet 2012: the classes of its validation images.
_META = "data/meta.mat"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_MAX_KIT_BYTES = 16 * 1024**2
_CLASS_NAME = re.compile(r"n\d{8}")
# A MATLAB file's header, and the start of an element that zlib has packed.
_HEADER_BYTES, _LITTLE_ENDIAN, _PACKED = 128, b"IM", 15


def read_list(path: Path) -> dict[str, str]:
    """Returns the class by file name, from a table or ImageNet's devkit."""
    is_devkit = path.name.lower().endswith((".tar.gz", ".tar"))
    if path.suffix.lower() not in _DELIMITERS and not is_devkit:
        raise PrepareError(
            f"--classes={path} cannot be used; give one of {', '.join(CLASSES)}, a "
            ".csv or .tsv file, or the .tar.gz of ImageNet's devkit"
        )
    with _named(f"--classes={path}"):
        return _read_devkit(path) if is_devkit else _read_table(path, 1)


def read_names(path: Path) -> dict[str, str]:
    """Returns the name by class, from a table or a text file such as ``words.txt``."""
    if path.suffix.lower() not in (".txt", *_DELIMITERS):
        raise PrepareError(f"--names={path} must be a .txt, .csv or .tsv file")
    with _named(f"--names={path}"):
        return _read_table(path, 0)


@contextlib.contextmanager
def _named(what: str, fix: str = "") -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, csv.Error) as error:
        raise PrepareError(f"{what} cannot be read: {error}{fix}") from error


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


def _read_table(path: Path, column: int) -> dict[str, str]:
    archive, within = archive_of(path)
    if archive and within:
        files = open_files(archive)
        index = {entry.name: index for index, entry in enumerate(files.entries)}
        if within not in index:
            raise ValueError(f"{str(archive)!r} has no {within!r}; name a file in it")
        content = _member(files, index[within], _MAX_LIST_BYTES)
    elif len(content := ReadFile(path, 0, _MAX_LIST_BYTES + 1)()) > _MAX_LIST_BYTES:
        raise ValueError(f"it has over {_MAX_LIST_BYTES} bytes; give a shorter list")
    delimiter = _DELIMITERS.get(path.suffix.lower())
    rows = _rows(content, delimiter) if delimiter else _lines(content)
    return _pairs(_whole_classes(rows, column))


def _member(files: Files, index: int, max_bytes: int) -> bytes:
    (read,) = files.contents([index], max_bytes)
    if len(content := read()) > max_bytes:
        raise ValueError(
            f"{files.entries[index].name} is larger than {max_bytes} bytes"
        )
    return content


def listed_class(listed: Mapping[str, str], name: str) -> str:
    """Returns the class of a file by its name, ignoring folders if necessary."""
    name = plain_name(name)
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
        if not (lists := _ending(files, TINY_IMAGENET)):
            continue
        of_name = {plain_name(e.name): index for index, e in enumerate(files.entries)}
        for index, entry in lists:
            what = f"{entry.name!r} of {files.metadata['path']!r}"
            with _named(what, "; say with --classes FILE.csv what it should"):
                rows = _pairs(_rows(_member(files, index, _MAX_LIST_BYTES), "\t"))
            folder = PurePosixPath(entry.name).parent / "images"
            for name, of_class in rows.items():
                image = of_name.get(plain_name(str(folder / name)))
                if image is not None:
                    found[id(files), image] = of_class
    return found


def _rows(content: bytes, delimiter: str) -> Iterator[tuple[int, list[str]]]:
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
    pairs: dict[str, str] = {}
    for line, row in rows:
        if not any(row):
            continue
        if len(row) < 2 or not (row[0] and row[1]):
            raise ValueError(f"line {line} needs two columns; add the missing one")
        if not row[1].isprintable():
            raise ValueError(f"line {line} has {row[1]!r}; use printable characters")
        name = plain_name(row[0])
        if pairs.setdefault(name, row[1]) != row[1]:
            raise ValueError(
                f"{name!r} is {pairs[name]!r} and, in line {line}, {row[1]!r}; keep one"
            )
    if not pairs:
        raise ValueError("it is empty; give a row for each file or class")
    return pairs


def _ending(files: Files, name: str) -> list[tuple[int, Entry]]:
    every = enumerate(files.entries)
    return [(k, entry) for k, entry in every if f"/{entry.name}".endswith(f"/{name}")]


def _read_devkit(path: Path) -> dict[str, str]:
    files = TarFiles(path, lambda what, part: None)
    names = _class_names(_kit_file(files, _META))
    numbers = read_text(_kit_file(files, _TRUTH)).split()
    if unknown := {*numbers} - names.keys():
        raise ValueError(
            f"{_TRUTH} has the class {min(unknown)!r:.20}, which {_META} does not "
            "list. Download the development kit again."
        )
    return {
        f"ILSVRC2012_val_{image:08}": names[number]
        for image, number in enumerate(numbers, start=1)
    }


def _kit_file(files: TarFiles, name: str) -> bytes:
    if not (found := _ending(files, name)):
        raise ValueError(f"it holds no {name}, as ImageNet's devkit does")
    return _member(files, found[0][0], _MAX_KIT_BYTES)


def _class_names(mat: bytes) -> dict[str, str]:
    # This import takes seconds on a slow disk, and only ImageNet needs it.
    from scipy.io import loadmat

    try:
        found: Any = loadmat(
            io.BytesIO(_unpacked(mat)), squeeze_me=True, variable_names=["synsets"]
        )["synsets"]
        names = {str(each["ILSVRC2012_ID"]): str(each["WNID"]) for each in found}
    # It raises exceptions of all types on other files.
    except Exception as error:
        raise ValueError(
            f"{_META} is not a list of classes ({error!r:.200})"
        ) from error
    if strange := [name for name in names.values() if not _CLASS_NAME.fullmatch(name)]:
        raise ValueError(f"{_META} has a class {strange[0]!r:.40}, and no n01440764")
    return names


def _unpacked(mat: bytes) -> bytes:
    """Returns a MATLAB file without zlib, which scipy would unpack to any size."""
    if mat[_HEADER_BYTES - 2 : _HEADER_BYTES] != _LITTLE_ENDIAN:
        raise ValueError("no MATLAB file of version 5")
    parts, at, left = [mat[:_HEADER_BYTES]], _HEADER_BYTES, _MAX_KIT_BYTES
    while at + 8 <= len(mat):
        kind, size = struct.unpack_from("<II", mat, at)
        part = mat[at : at + 8 + size]
        if kind == _PACKED:
            part = zlib.decompressobj().decompress(part[8:], left + 1)
        parts.append(part)
        at, left = at + 8 + size, left - len(part)
        if left < 0:
            raise ValueError(f"it unpacks to more than {_MAX_KIT_BYTES} bytes")
    return b"".join(parts)
