"""What a source of files is: a folder or an archive, whose files can be read."""

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
    "file_metadata",
    "name_problem",
    "whole",
]

_MAX_NAME_CHARS = 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a source.

    Attributes:
      name: Its path in the source, with ``/``.
      bytes: Its size.
    """

    name: str
    bytes: int


class Files(Protocol):
    """The regular files of a source.

    Attributes:
      entries: All of them, in the order in which they are read.
      metadata: Where they are from, as JSON values that change if they do.
    """

    entries: list[Entry]
    metadata: dict[str, Any]

    def contents(
        self, wanted: Sequence[int], max_bytes: int
    ) -> Iterator[Callable[[], bytes]]:
        """Yields a function for each wanted entry that returns its bytes.

        The functions may be called in other threads, in any order; one raises OSError
        if its file cannot be read.

        Args:
          wanted: Indices of entries, ascending.
          max_bytes: No more of an entry is read, but one byte that tells that
            there is more.
        """
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
        """Returns the bytes."""
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


def file_metadata(path: Path) -> dict[str, Any]:
    """Returns a file's path, size and hash, as JSON values."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}


def name_problem(name: str) -> str:
    """Returns what is wrong with the name of a file within a source."""
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of the folder"
    if len(name) > _MAX_NAME_CHARS:
        return f"has a name of more than {_MAX_NAME_CHARS} characters"
    if not name.isprintable():  # Surrogates too: bytes that are no UTF-8.
        return "has a name that is not printable UTF-8"
    return ""


def whole(value: Any) -> Any:
    """Returns a whole number that is written as a float or as text; else the value.

    pandas makes floats of a column of integers where one is missing.

    Example:
      >>> [whole(value) for value in (17.0, "17", " 17.0", 1.5, "x", None)]
      [17, 17, 17, 1.5, 'x', None]
    """
    number = value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            with contextlib.suppress(ValueError):
                number = float(value)
    # A float holds no larger integer exactly.
    is_whole = isinstance(number, float) and number.is_integer()
    return int(number) if is_whole and abs(number) <= 2**53 else value
