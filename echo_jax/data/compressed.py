"""Reads plain, gzip, bzip2 and xz files as unpacked chunks, within limits."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, BinaryIO

DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises."""

# `xz -9` needs 65 MiB; a hostile header can ask for 4 GiB.
_MAX_XZ_MEMORY_BYTES = 256 * 1024**2
_CHUNK_BYTES = 1024**2

# The ratio is 10 for text and images, and 1000 for a file made to exhaust a disk.
_MAX_RATIO = 250
_ANY_RATIO_BYTES = 256 * 1024**2


class UnpackError(ValueError):
    """A small file unpacks to a huge one, like a file made to exhaust a disk."""


# `on_packed` gets the position in the packed file before every chunk. A damaged file
# raises one of `DAMAGED`, a file that unpacks to a huge one an `UnpackError`.
def unpacked_chunks(
    path: Path, on_packed: Callable[[int], None] | None = None
) -> Generator[bytes]:
    """Yields a file's content in chunks of at most a MiB, unpacked by its suffix."""
    unpack = _UNPACK.get(path.suffix.lower(), _plain_chunks)
    limit = max(path.stat().st_size * _MAX_RATIO, _ANY_RATIO_BYTES)
    num_unpacked = 0
    with path.open("rb") as stream:
        for chunk in unpack(stream):
            num_unpacked += len(chunk)
            if unpack is not _plain_chunks and num_unpacked > limit:
                raise UnpackError(
                    f"{str(path)!r} unpacks to more than {_MAX_RATIO} times its size; "
                    "if that is meant, unpack it by hand and name the result."
                )
            if on_packed:
                on_packed(stream.tell())
            yield chunk


# `max_read_bytes` limits `read`: a header of a hostile archive may ask for more than
# the memory.
class ForwardReader:
    """A file over chunks that can only be read and skipped forwards.

    Attributes:
      last: The result of the last `read`.
    """

    def __init__(self, chunks: Iterator[bytes], *, max_read_bytes: int):
        self._chunks, self._max_read_bytes = chunks, max_read_bytes
        self._chunk, self._used, self._position = b"", 0, 0
        self.last = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        """Skips forwards to a position."""
        if whence or position < self._position:
            raise OSError("the archive cannot be read backwards")
        for _ in self._parts(position - self._position):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, or fewer at the end."""
        if not 0 <= size <= self._max_read_bytes:
            raise OSError(f"a header asks for {size} bytes at once")
        self.last = self.take(size)
        return self.last

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes, or fewer at the end; has no limit."""
        return b"".join(self._parts(size))

    def _parts(self, size: int) -> Iterator[bytes]:
        while size:
            if self._used == len(self._chunk):
                self._chunk, self._used = next(self._chunks, b""), 0
                if not self._chunk:
                    return
            part = self._chunk[self._used : self._used + size]
            self._used += len(part)
            self._position += len(part)
            size -= len(part)
            yield part


def _plain_chunks(stream: Any) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def _xz_chunks(stream: BinaryIO) -> Iterator[bytes]:
    # Not `lzma.open`: it cannot limit the memory that a header asks for.
    unused = b""
    while packed := unused or stream.read(_CHUNK_BYTES):
        # Streams may follow one another, with zero bytes between them.
        packed, unused = packed.lstrip(b"\0"), b""
        if not packed:
            continue
        decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_XZ_MEMORY_BYTES)
        while not decoder.eof:
            yield decoder.decompress(packed, max_length=_CHUNK_BYTES)
            packed = b""
            if decoder.needs_input and not decoder.eof:
                packed = stream.read(_CHUNK_BYTES)
                if not packed:
                    raise EOFError("the file ends before its stream does")
        unused = decoder.unused_data


_UNPACK: dict[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": lambda stream: _plain_chunks(gzip.GzipFile(fileobj=stream)),
    ".xz": _xz_chunks,
    ".bz2": lambda stream: _plain_chunks(bz2.BZ2File(stream)),
}

PACKED_SUFFIXES = tuple(_UNPACK)
"""The suffixes of files that are unpacked."""
