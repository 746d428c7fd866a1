"""The files of tar and zip archives, read where they lie.

Nothing of an archive is ever written to disk under a name of its own, and what an
honest archive of data does not hold is refused by name: links, devices, names that
lead out of it, files that would be far larger than what they are packed from.
"""

import functools
import stat
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from echo_jax.data.prepare.entries import Entry, ReadFile, file_metadata, name_problem
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.job import OnProgress, Progress
from echo_jax.files.compressed import (
    DAMAGED,
    PACKED_SUFFIXES,
    ForwardReader,
    unpacked_chunks,
)

__all__ = ["TarFiles", "ZipFiles", "plain_members"]

# Names are in the archive's headers: what tarfile reads at once is no larger.
_MAX_HEADER_BYTES = 1024**2
_CHUNK_BYTES = 1024**2
_TAR = ".tar"
# What zlib makes of a byte at most; a header may claim more.
_MAX_DEFLATE_RATIO = 1032
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IS_ENCRYPTED = 1
_ZIP_DAMAGED = (*DAMAGED, zipfile.BadZipFile, NotImplementedError, struct.error)


class TarFiles:
    """The files of a tar archive, but hidden ones.

    An archive within it, as ImageNet has one for each class, is a folder of its name:
    ``n01440764.tar`` holds the files of ``n01440764/``. One within that is a file.

    Args:
      path: A ``.tar`` file, plain or packed.
      on_progress: Told how far the scan is.

    Raises:
      PrepareError: If it is damaged, or holds what no archive of data should.
    """

    def __init__(self, path: Path, on_progress: OnProgress):
        self._path = path
        self._is_packed = path.suffix.lower() in PACKED_SUFFIXES
        self.metadata = file_metadata(path)
        self.entries: list[Entry] = []
        self._offsets: list[int] = []
        progress = Progress(on_progress, f"reading {path.name}", self.metadata["bytes"])
        for entry, stream in self._members(progress.reach):
            self.entries.append(entry)
            self._offsets.append(stream.tell())

    def contents(
        self, wanted: Sequence[int], max_bytes: int
    ) -> Iterator[Callable[[], bytes]]:
        """See `Files.contents`."""
        if not self._is_packed:
            for index in wanted:
                size = min(self.entries[index].bytes, max_bytes + 1)
                yield ReadFile(self._path, self._offsets[index], size)
            return
        rest = iter(wanted)
        index = next(rest, None)
        for number, (entry, stream) in enumerate(self._members()):
            if index is None:
                return
            if number == index:
                data = stream.take(min(entry.bytes, max_bytes + 1))
                yield functools.partial(bytes, data)
                index = next(rest, None)

    def _members(
        self, on_packed: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Entry, ForwardReader]]:
        """Yields the archive's files, and the stream at the begin of each."""
        stream = ForwardReader(
            unpacked_chunks(self._path, on_packed), max_read_bytes=_MAX_HEADER_BYTES
        )
        try:
            for entry in _tar_entries(stream):
                yield entry, stream
            # What is packed has a checksum at its end.
            while stream.take(_MAX_HEADER_BYTES):
                pass
        except (*DAMAGED, tarfile.TarError, ValueError) as error:
            raise _untrusted(self._path, error) from error


def plain_members(path: Path) -> Iterator[tuple[Entry, int]]:
    """Yields the files of an unpacked archive, and where each begins in it.

    Headers alone are read, so this takes no time in proportion to the bytes.

    Args:
      path: A ``.tar`` file.

    Raises:
      PrepareError: It is damaged or cut off, or holds what no archive of data should.
    """
    try:
        with path.open("rb") as plain:
            stream = _Headers(plain)
            with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
                while (info := archive.next()) is not None:
                    cast(Any, archive).members.clear()  # Or it keeps them all.
                    if (entry := _tar_entry(info)) is not None:
                        yield entry, info.offset_data
            if stream.last != bytes(tarfile.BLOCKSIZE):
                raise EOFError("it has no end")
    except (*DAMAGED, tarfile.TarError, ValueError) as error:
        raise _untrusted(path, error) from error


def _tar_entries(
    stream: "ForwardReader | _Within", folder: str | None = None
) -> Iterator[Entry]:
    """Yields the files of an archive; at each the stream is where its bytes begin.

    Args:
      stream: What is unpacked already.
      folder: What an archive is called that lies within another one.

    Raises:
      EOFError, OSError, ValueError, tarfile.TarError: It is damaged, or holds what no
        archive of data should.
    """
    with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
        while (info := archive.next()) is not None:
            cast(Any, archive).members.clear()  # Or it keeps them all.
            if (entry := _tar_entry(info)) is None:
                continue
            if folder is not None:
                yield Entry(f"{folder}/{entry.name}", entry.bytes)
            elif entry.name.lower().endswith(_TAR):
                within = _Within(stream, info.size)
                yield from _tar_entries(within, entry.name[: -len(_TAR)])
            else:
                yield entry
    # A header that is cut off ends an archive as well, says tarfile.
    if stream.last != bytes(tarfile.BLOCKSIZE):
        what = "it" if folder is None else f"{folder!r}, an archive in it,"
        raise EOFError(f"{what} has no end")


class _Within:
    """A part of a stream, from where it is on, beyond which nothing is read.

    Attributes:
      last: What was read last.
    """

    def __init__(self, stream: Any, size: int):
        self._stream, self._end = stream, stream.tell() + size
        self.last = b""

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int, whence: int = 0) -> int:
        if not self.tell() <= position <= self._end:
            raise EOFError("an archive in it is none, or claims more than there is")
        return self._stream.seek(position, whence)

    def read(self, size: int) -> bytes:
        self.last = self._stream.read(min(size, self._end - self.tell()))
        return self.last


class _Headers:
    """A file of which no more than a header is read at once.

    Attributes:
      last: What was read last.
    """

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.last = b""

    def tell(self) -> int:
        return self._stream.tell()

    def seek(self, position: int, whence: int = 0) -> int:
        return self._stream.seek(position, whence)

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes is too long")
        self.last = self._stream.read(size)
        return self.last


class ZipFiles:
    """The files of a zip archive, but hidden ones.

    Args:
      path: A ``.zip`` file.

    Raises:
      PrepareError: If it is damaged, or holds what no archive of data should.
    """

    def __init__(self, path: Path):
        self._path = path
        self.metadata = file_metadata(path)
        self.entries: list[Entry] = []
        self._members: list[zipfile.ZipInfo] = []
        try:
            # Open as long as this object is: its functions may be called at any time.
            self._archive = zipfile.ZipFile(path)
            for member in self._archive.infolist():
                if (entry := _zip_entry(member)) is not None:
                    self.entries.append(entry)
                    self._members.append(member)
            if sum(m.compress_size for m in self._members) > self.metadata["bytes"]:
                raise ValueError("its members are packed from the same bytes")
        except (*_ZIP_DAMAGED, ValueError) as error:
            raise _untrusted(path, error) from error

    def contents(
        self, wanted: Sequence[int], max_bytes: int
    ) -> Iterator[Callable[[], bytes]]:
        """See `Files.contents`."""
        for index in wanted:
            yield functools.partial(self._read, self._members[index], max_bytes + 1)

    def packed_bytes(self, index: int) -> int:
        """Returns how many bytes of the archive a file takes."""
        return self._members[index].compress_size

    def chunks(self, index: int) -> Iterator[bytes]:
        """Yields what is in a file, in chunks of at most a MiB.

        Raises:
          OSError: If it is damaged.
        """
        member = self._members[index]
        try:
            with self._archive.open(member) as stream:
                while chunk := stream.read(_CHUNK_BYTES):
                    yield chunk
        except _ZIP_DAMAGED as error:
            raise OSError(f"{member.filename!r} is damaged: {error}") from error

    def _read(self, member: zipfile.ZipInfo, size: int) -> bytes:
        try:
            with self._archive.open(member) as stream:
                return stream.read(size)
        except _ZIP_DAMAGED as error:
            raise OSError(f"{member.filename!r} is damaged: {error}") from error


def _tar_entry(info: tarfile.TarInfo) -> Entry | None:
    """Returns a member of an archive; None if it is a folder or hidden."""
    problem = name_problem(info.name)
    if not problem and (info.issparse() or not (info.isdir() or info.isreg())):
        problem = "is a link, a device or a sparse file"
    if problem:
        raise ValueError(f"its member {info.name!r} {problem}")
    return None if info.isdir() else _unhidden(info.name, info.size)


def _zip_entry(member: zipfile.ZipInfo) -> Entry | None:
    """Returns a member of an archive; None if it is a folder or hidden."""
    problem = name_problem(member.filename)
    # Where an archive was made on Unix, the kind of file stands in the upper half.
    kind = stat.S_IFMT(member.external_attr >> 16)
    if not problem and kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        problem = "is a link or a device"
    elif member.flag_bits & _IS_ENCRYPTED:
        problem = "is encrypted"
    elif member.compress_type not in _ZIP_METHODS:
        problem = "is packed by another method than deflate"
    elif member.file_size > member.compress_size * _MAX_DEFLATE_RATIO:
        problem = f"claims to unpack to {member.file_size} bytes"
    if problem:
        raise ValueError(f"its member {member.filename!r} {problem}")
    return None if member.is_dir() else _unhidden(member.filename, member.file_size)


def _unhidden(name: str, size: int) -> Entry | None:
    """Returns the entry of a file; None if it is hidden."""
    path = PurePosixPath(name)
    is_hidden = any(part.startswith(".") for part in path.parts)
    return None if is_hidden else Entry(str(path), size)


def _untrusted(path: Path, error: Exception) -> PrepareError:
    return PrepareError(
        f"{str(path)!r} is damaged, cut off, or not to be trusted: {error}"
    )
