"""Text that other people have written, as UTF-8 with one kind of line end."""

import codecs
import itertools
from collections.abc import Iterable, Iterator

__all__ = ["READ_AS", "EncodingError", "read_text", "text_chunks"]

READ_AS = {"encoding": "utf-8-sig", "newlines": "universal"}
"""How text is read, for ``dataset.json``: see `text_chunks`."""

# The mark of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LONGEST_MARK = max(map(len, _MARKS))


class EncodingError(ValueError):
    """Text is not in UTF-8; the message says what it is, without the file."""


def text_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    r"""Yields text without its byte-order mark, every line end as ``\n``.

    Args:
      chunks: The content of a file of text: lines end with ``\n``, ``\r\n`` or ``\r``.

    Raises:
      EncodingError: A byte-order mark says that it is UTF-16 or UTF-32.

    Example:
      >>> b"".join(text_chunks([b"\xef\xbb\xbfone\r", b"\ntwo\r"]))
      b'one\ntwo\n'
    """
    held, is_start = b"", True
    for chunk in itertools.chain(chunks, [None]):
        held += chunk or b""
        if is_start:
            if chunk is not None and len(held) < _LONGEST_MARK:
                continue
            held, is_start = _without_mark(held), False
        # The next chunk may begin with the \n of this \r.
        end = len(held) - (chunk is not None and held.endswith(b"\r"))
        text, held = held[:end], held[end:]
        if text:
            yield text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def read_text(content: bytes) -> str:
    """Decodes a whole file of text, as `text_chunks` does.

    Raises:
      EncodingError: It is not UTF-8.
    """
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
