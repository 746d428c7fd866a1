"""The protocol of a source of files: a folder or an archive."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

__all__ = [
    "Entry",
    "Files",
    "Image",
    "ReadFile",
    "Readers",
    "file_metadata",
    "name_problem",
    "whole",
]

_MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a source: its path with ``/``, and its size in bytes."""

    name: str
    bytes: int


Readers = Iterator[Callable[[], bytes]]
"""Functions that read a file each."""


class Files(Protocol):
    """The regular files of a source.

    Attributes:
      entries: All files, in reading order.
      metadata: Their origin, as JSON values that change if the files do.

    The functions of `contents` may run in other threads and in any order. They read
    at most ``max_bytes + 1`` bytes, and raise OSError for an unreadable file.
    """

    entries: list[Entry]
    metadata: dict[str, Any]

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        """Yields a function for each wanted index, in order, that returns bytes."""
        ...


Image = tuple[Files, int]
"""An image file: its source, and which entry of it."""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """Reads a part of a file when called."""

    path: Path
    offset: int
    size: int

    def __call__(self) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


def file_metadata(path: Path) -> dict[str, Any]:
    """Returns a file's path, size and hash, as JSON values."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}


def name_problem(name: str) -> str:
    """Returns the fault of a file's name within a source, or an empty text."""
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of the folder"
    if len(name) > _MAX_NAME_CHARS:
        return f"has a name of more than {_MAX_NAME_CHARS} characters"
    if not name.isprintable():  # This includes surrogates: bytes that are not UTF-8.
        return "has a name that is not printable UTF-8"
    return ""


def whole(value: Any) -> Any:
    """Returns a whole number that is written as a float or as text; else the value."""
    number = value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            with contextlib.suppress(ValueError):
                number = float(value)
    # Floats hold integers exactly up to this limit.
    is_whole = isinstance(number, float) and number.is_integer()
    return int(number) if is_whole and abs(number) <= 2**53 else value
