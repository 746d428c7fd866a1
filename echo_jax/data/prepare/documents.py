"""Text files as pieces of documents: bounded in size, whatever the files hold."""

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from echo_jax.data.compressed import unpacked_chunks

__all__ = ["DOCUMENTS", "Piece", "pieces"]

_PIECE_CHARS = 64 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, cut after a line wherever there is one.

    Attributes:
      document: The document's number in its file, from 0 on.
      text: The text; may be empty.
      ends: Whether the document ends here.
    """

    document: int
    text: str
    ends: bool


def pieces(path: Path, document: str) -> Iterator[Piece]:
    r"""Yields a file's documents in pieces.

    Args:
      path: A text file, plain or packed, in UTF-8.
      document: What a document is: ``"file"``, ``"line"`` (without its line end;
        blank lines are none), or ``"blank"`` (what blank lines stand between,
        without the last line end).

    Yields:
      The pieces, in order; every document has one that ends it, its last.

    Raises:
      UnicodeDecodeError: If the file is not UTF-8.
      ValueError: If it unpacks to too much.

    Example:
      >>> Path("a.txt").write_text("one\ntwo\n")
      8
      >>> [piece.text for piece in pieces(Path("a.txt"), "line")]
      ['one', 'two']
    """
    return DOCUMENTS[document](_lines(path))


def _lines(path: Path) -> Iterator[str]:
    """Yields text cut after every line end, and before lines become too long."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    for chunk in unpacked_chunks(path):
        rest += decoder.decode(chunk)
        *lines, rest = rest.split("\n")
        for line in lines:
            yield from _bounded(line + "\n")
        while len(rest) > _PIECE_CHARS:
            yield rest[:_PIECE_CHARS]
            rest = rest[_PIECE_CHARS:]
    decoder.decode(b"", final=True)
    if rest:
        yield rest


def _bounded(line: str) -> Iterator[str]:
    for start in range(0, len(line), _PIECE_CHARS):
        yield line[start : start + _PIECE_CHARS]


def _by_file(lines: Iterator[str]) -> Iterator[Piece]:
    parts, size = [], 0
    for line in lines:
        if parts and size + len(line) > _PIECE_CHARS:
            yield Piece(0, "".join(parts), ends=False)
            parts, size = [], 0
        parts.append(line)
        size += len(line)
    yield Piece(0, "".join(parts), ends=True)


def _by_line(lines: Iterator[str]) -> Iterator[Piece]:
    number, is_inside = 0, False
    for line in lines:
        text = line.removesuffix("\n")
        ends = len(text) < len(line)
        if text.strip() or is_inside or len(text) == _PIECE_CHARS:
            yield Piece(number, text, ends)
            is_inside = not ends
            number += ends
    if is_inside:
        yield Piece(number, "", ends=True)


def _by_blank(lines: Iterator[str]) -> Iterator[Piece]:
    number, parts, size, is_at_start = 0, [], 0, True
    for line in lines:
        is_blank = is_at_start and not line.strip() and len(line) < _PIECE_CHARS
        is_at_start = line.endswith("\n")
        if is_blank and parts:
            yield Piece(number, "".join(parts).removesuffix("\n"), ends=True)
            number, parts, size = number + 1, [], 0
        elif not is_blank:
            if parts and size + len(line) > _PIECE_CHARS:
                yield Piece(number, "".join(parts), ends=False)
                parts, size = [], 0
            parts.append(line)
            size += len(line)
    if parts:
        yield Piece(number, "".join(parts).removesuffix("\n"), ends=True)


DOCUMENTS: dict[str, Callable[[Iterator[str]], Iterator[Piece]]] = {
    "file": _by_file,
    "line": _by_line,
    "blank": _by_blank,
}
"""What a document may be."""
