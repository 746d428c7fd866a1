"""Plain, gzip, bzip2 and xz files as chunks of what is in them, within limits."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "DAMAGED",
    "PACKED_SUFFIXES",
    "ForwardReader",
    "UnpackError",
    "unpacked_chunks",
]

DAMAGED = (EOFError, OSError, zlib.error, lzma.LZMAError)
"""What reading a damaged file raises."""

# What `xz -9` needs is 65 MiB; a hostile header can ask for 4 GiB.
_MAX_XZ_MEMORY_BYTES = 256 * 1024**2
_CHUNK_BYTES = 1024**2

# Text and images shrink 10 times, a file made to exhaust a disk 1000 times.
_MAX_RATIO = 250
_ANY_RATIO_BYTES = 256 * 1024**2


class UnpackError(ValueError):
    """A small file unpacks to a huge one, as files do that are made to do harm."""


def unpacked_chunks(
    path: Path, on_packed: Callable[[int], None] | None = None
) -> Iterator[bytes]:
    """Yields what is in a file, unpacked as its suffix says.

    Args:
      path: A file; ``.gz``, ``.bz2`` and ``.xz`` are unpacked, all else is plain.
      on_packed: Told the position in the file before every chunk.

    Yields:
      Chunks of at most a MiB.

    Raises:
      UnpackError: If the file unpacks to more than 250 times its size, and to more
        than 256 MiB.
      EOFError, OSError, zlib.error, lzma.LZMAError: If it is damaged.
    """
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


class ForwardReader:
    """A file made of chunks: it is read and skipped in forward direction only.

    Args:
      chunks: The content.
      max_read_bytes: Largest `read`: a header of a hostile archive may ask for more
        than there is memory.

    Attributes:
      last: What the last `read` returned.
    """

    def __init__(self, chunks: Iterator[bytes], *, max_read_bytes: int):
        self._chunks, self._max_read_bytes = chunks, max_read_bytes
        self._chunk, self._used, self._position = b"", 0, 0
        self.last = b""

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._position

    def seek(self, position: int, whence: int = 0) -> int:
        """Skips to a position that is not behind the present one."""
        if whence or position < self._position:
            raise OSError("the archive cannot be read backwards")
        for _ in self._parts(position - self._position):
            pass
        return self._position

    def read(self, size: int) -> bytes:
        """Returns the next `size` bytes, or what is left."""
        if not 0 <= size <= self._max_read_bytes:
            raise OSError(f"a header asks for {size} bytes at once")
        self.last = self.take(size)
        return self.last

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes, however many, or what is left."""
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


def _plain_chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        yield chunk


def _gzip_chunks(stream: BinaryIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=stream) as unpacked:
        while chunk := unpacked.read(_CHUNK_BYTES):
            yield chunk


def _bzip2_chunks(stream: BinaryIO) -> Iterator[bytes]:
    with bz2.BZ2File(stream) as unpacked:
        while chunk := unpacked.read(_CHUNK_BYTES):
            yield chunk


def _xz_chunks(stream: BinaryIO) -> Iterator[bytes]:
    # Not `lzma.open`: it cannot bound the memory that a header asks for.
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
    ".gz": _gzip_chunks,
    ".xz": _xz_chunks,
    ".bz2": _bzip2_chunks,
}

PACKED_SUFFIXES = tuple(_UNPACK)
"""The suffixes of files that are unpacked."""
