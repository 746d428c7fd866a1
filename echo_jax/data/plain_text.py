"""Reads text that other people have written, as UTF-8 with one kind of line end."""

import codecs
import itertools
from collections.abc import Iterable, Iterator

READ_AS = {"encoding": "utf-8-sig", "newlines": "universal"}
"""How text is read, for ``dataset.json``: see `text_chunks`."""

# The mark of UTF-32 begins with the mark of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LONGEST_MARK = max(map(len, _MARKS))


class EncodingError(ValueError):
    """Text is not UTF-8; the message does not name the file."""


def text_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields text without its byte-order mark and with line feeds as line ends."""
    held, is_start = b"", True
    for chunk in itertools.chain(chunks, [None]):
        held += chunk or b""
        if is_start:
            if chunk is not None and len(held) < _LONGEST_MARK:
                continue
            held, is_start = _without_mark(held), False
        # The next chunk may begin with the \n that belongs to this \r.
        end = len(held) - (chunk is not None and held.endswith(b"\r"))
        text, held = held[:end], held[end:]
        if text:
            yield text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def read_text(content: bytes) -> str:
    """Decodes a whole file of text in the same way as `text_chunks`."""
    try:
        return b"".join(text_chunks([content])).decode()
    except UnicodeDecodeError as error:
        raise EncodingError(f"it is not text in UTF-8 ({error}); convert it") from error


def _without_mark(start: bytes) -> bytes:
    for mark, name in _MARKS.items():
        if start.startswith(mark):
            raise EncodingError(
                f"it is {name} text; convert it to UTF-8: "
                f"iconv -f {name} -t UTF-8 FILE > NEW_FILE"
            )
    return start.removeprefix(codecs.BOM_UTF8)
