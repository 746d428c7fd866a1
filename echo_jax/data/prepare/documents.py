"""Splits text files into pieces of documents, and their tokens into blocks."""

import codecs
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo_jax.data.compressed import unpacked_chunks
from echo_jax.data.plain_text import text_chunks
from echo_jax.data.prepare.job import ordered_map
from echo_jax.data.prepare.tokenizer import Tokenizer, token_dtype
from echo_jax.data.sources.prepared import pack

_PIECE_CHARS = 64 * 1024
# The counts of a `BlockStream`, with tokens that end documents and bytes between them.
_COUNTS = ("pieces", "documents", "tokens", "bytes")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a document, cut after a line if possible."""

    document: int  # Its number in the file.
    text: str
    ends: bool  # Whether the document ends here.
    # Bytes of the file between documents: line ends and blank lines after the piece,
    # and before the first document.
    apart: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of the file that the piece accounts for."""
        return len(self.text.encode()) + self.apart


# Every document has one piece that ends it, its last. Every byte of the file's text is
# counted once. A file of blank lines gives one piece without a text that ends nothing.
def pieces(path: Path, document: str) -> Iterator[Piece]:
    """Yields a file's documents in pieces; `document` is "file", "line" or "blank"."""
    last, apart = None, 0
    for found in DOCUMENTS[document](_lines(path)):
        if isinstance(found, int):
            apart += found
            continue
        if last is not None:
            yield Piece(last.document, last.text, last.ends, apart)
            apart = 0
        last = found
    if last is None and apart:
        last = Piece(0, "", ends=False)
    if last is not None:
        yield Piece(last.document, last.text, last.ends, apart)


def cut(found: Iterable[Piece], at: int, *, is_before: bool) -> Iterator[Piece]:
    """Yields the pieces before or after byte `at`, cut after a line if possible."""
    position, last = 0, None
    for piece in found:
        start, position = position, position + piece.bytes
        if position <= at:
            part = piece if is_before else None
        elif start >= at:
            part = None if is_before else piece
        else:
            text = piece.text.encode()[: at - start].decode(errors="ignore")
            ends = text.rfind("\n") + 1, text.rfind(" ") + 1, len(text)
            head = piece.text[: next(filter(None, ends), 0)]
            tail = piece.text[len(head) :]
            part = (
                Piece(piece.document, head, ends=True)
                if is_before
                else Piece(piece.document, tail, piece.ends, piece.apart)
            )
        if part is not None:
            last = part
            yield part
        if is_before and position >= at:
            break
    if is_before and last is not None and not last.ends:
        yield Piece(last.document, "", ends=True)


def _lines(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    for chunk in text_chunks(unpacked_chunks(path)):
        rest += decoder.decode(chunk)
        *lines, rest = rest.split("\n")
        for line in lines:
            line += "\n"
            for start in range(0, len(line), _PIECE_CHARS):
                yield line[start : start + _PIECE_CHARS]
        while len(rest) > _PIECE_CHARS:
            yield rest[:_PIECE_CHARS]
            rest = rest[_PIECE_CHARS:]
    decoder.decode(b"", final=True)
    if rest:
        yield rest


def _by_file(lines: Iterator[str]) -> Iterator[Piece | int]:
    parts, size = [], 0
    for line in lines:
        if parts and size + len(line) > _PIECE_CHARS:
            yield Piece(0, "".join(parts), ends=False)
            parts, size = [], 0
        parts.append(line)
        size += len(line)
    yield Piece(0, "".join(parts), ends=True)


def _by_line(lines: Iterator[str]) -> Iterator[Piece | int]:
    number, is_inside = 0, False
    for line in lines:
        text = line.removesuffix("\n")
        ends = len(text) < len(line)
        if text.strip() or is_inside or len(text) == _PIECE_CHARS:
            yield Piece(number, text, ends)
            is_inside = not ends
            number += ends
            yield int(ends)
        else:
            yield len(line.encode())
    if is_inside:
        yield Piece(number, "", ends=True)


def _by_blank(lines: Iterator[str]) -> Iterator[Piece | int]:
    number, parts, size, is_at_start = 0, [], 0, True
    for line in lines:
        is_blank = is_at_start and not line.strip() and len(line) < _PIECE_CHARS
        is_at_start = line.endswith("\n")
        if is_blank and parts:
            yield from _ended(number, parts)
            number, parts, size = number + 1, [], 0
        if is_blank:
            yield len(line.encode())
        else:
            if parts and size + len(line) > _PIECE_CHARS:
                yield Piece(number, "".join(parts), ends=False)
                parts, size = [], 0
            parts.append(line)
            size += len(line)
    if parts:
        yield from _ended(number, parts)


def _ended(number: int, parts: list[str]) -> Iterator[Piece | int]:
    whole = "".join(parts)
    text = whole.removesuffix("\n")
    yield Piece(number, text, ends=True)
    yield len(whole) - len(text)


DOCUMENTS: dict[str, Callable[[Iterator[str]], Iterator[Piece | int]]] = {
    "file": _by_file,
    "line": _by_line,
    "blank": _by_blank,
}
"""What a document may be: its pieces, and between them the bytes that are in none."""


class BlockStream:
    """Cuts the tokens of documents into blocks, which overlap by one token."""

    def __init__(
        self,
        pieces: Iterator[Piece],
        tokenizer: Tokenizer,
        block: int,
        workers: int,
        note: dict[str, Any] | None,
    ):
        self._tokenizer, self._block = tokenizer, block
        self._dtype = token_dtype(tokenizer.vocab_size)
        note = note or {"rest": ""} | dict.fromkeys(_COUNTS, 0)
        # The last token of the latest block, and later tokens.
        self._rest = np.frombuffer(bytes.fromhex(note["rest"]), self._dtype)
        self.pieces, self.documents, self.tokens, self.bytes = (
            note[name] for name in _COUNTS
        )
        self.is_done = False
        self._encoded = ordered_map(
            self._encode,
            itertools.islice(pieces, self.pieces, None),
            num_bytes=lambda piece: len(piece.text),
            workers=workers,
        )
        self._fill()

    def blocks(self, number: int) -> Iterator[bytes]:
        """Yields the records of the next `number` blocks, or of the remaining ones."""
        for _ in range(number):
            if self.is_done:
                return
            yield pack({"tokens": self._rest[: self._block + 1].tobytes()})
            self._rest = self._rest[self._block :]
            self._fill()

    def note(self) -> dict[str, Any]:
        """Returns the JSON values that a stream needs to continue from here."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"rest": self._rest.tobytes().hex(), **counts}

    def close(self) -> None:
        """Stops the threads."""
        self._encoded.close()

    def _fill(self) -> None:
        parts = [self._rest]
        size = len(self._rest)
        while size <= self._block:
            if (found := next(self._encoded, None)) is None:
                self.is_done = True
                break
            tokens, num_bytes, ends = found
            parts.append(tokens)
            size += len(tokens)
            self.pieces += 1
            self.documents += ends
            self.tokens += len(tokens)
            self.bytes += num_bytes
        self._rest = np.concatenate(parts)

    def _encode(self, piece: Piece) -> tuple[np.ndarray, int, bool]:
        tokens = self._tokenizer.encode(piece.text)
        if piece.ends:
            tokens = np.append(tokens, self._tokenizer.eod)
        return tokens.astype(self._dtype), piece.bytes, piece.ends
