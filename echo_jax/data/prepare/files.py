"""The files of a folder or a tar archive, in a fixed order, without unpacking it.

Nothing of an archive is ever written to disk under a name of its own, and what an
honest archive of data does not hold is refused by name: links, devices, names that
lead out of it.
"""

import functools
import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

from echo_jax.data.compressed import (
    DAMAGED,
    PACKED_SUFFIXES,
    ForwardReader,
    unpacked_chunks,
)
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.job import OnProgress, Progress

__all__ = ["Entry", "Files", "file_metadata", "open_files", "plain_members"]

_MAX_NAME_CHARS = 1024
# Names are in the archive's headers: what tarfile reads at once is no larger.
_MAX_HEADER_BYTES = 1024**2


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

        The functions may be called in other threads, in any order.

        Args:
          wanted: Indices of entries, ascending.
          max_bytes: No more of an entry is read, but one byte that tells that
            there is more.
        """
        ...


def open_files(path: Path, on_progress: OnProgress) -> Files:
    """Lists a source.

    Args:
      path: A folder, or a ``.tar``, ``.tar.gz``, ``.tar.bz2`` or ``.tar.xz`` file.
      on_progress: Told how far the scan is.

    Returns:
      Its files: of a folder sorted by name, of an archive as they lie in it.

    Raises:
      PrepareError: If it is neither, if an archive is damaged, or if it holds what
        no archive of data should.
    """
    if path.is_dir():
        return _Folder(path)
    if not path.is_file():
        raise PrepareError(f"{str(path)!r}: there is no such file or folder")
    endings = (".tar", *(f".tar{suffix}" for suffix in PACKED_SUFFIXES))
    if not path.name.lower().endswith(endings):
        raise PrepareError(
            f"{str(path)!r} is neither a folder nor a file named {', '.join(endings)}; "
            "unpack it, and name the folder"
        )
    return _Tar(path, on_progress)


def file_metadata(path: Path) -> dict[str, Any]:
    """Returns a file's path, size and hash, as JSON values."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}


class _Folder:
    """The files below a folder, but hidden ones; links are followed."""

    def __init__(self, path: Path):
        self._path = path
        found = sorted(_walk(path))
        self.entries = [Entry(name, size) for name, size in found]
        listing = "".join(f"{name}\0{size}\n" for name, size in found)
        self.metadata = {
            "path": str(path),
            "files": len(found),
            "bytes": sum(size for _, size in found),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }

    def contents(
        self, wanted: Sequence[int], max_bytes: int
    ) -> Iterator[Callable[[], bytes]]:
        for index in wanted:
            path = self._path / self.entries[index].name
            yield _ReadFile(path, 0, max_bytes + 1)


def _walk(
    folder: Path, above: frozenset[tuple[int, int]] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, int]]:
    """Yields the name and size of every regular file below a folder."""
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:  # A link to a folder that it lies in.
        return
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            name = prefix + entry.name
            try:
                status = entry.stat()
            except OSError as error:
                raise PrepareError(f"{entry.path!r} leads nowhere: {error}") from error
            if stat.S_ISDIR(status.st_mode):
                yield from _walk(Path(entry.path), above | {here}, f"{name}/")
            elif not stat.S_ISREG(status.st_mode):
                raise PrepareError(
                    f"{entry.path!r} is neither a file nor a folder; remove it"
                )
            else:
                if problem := _name_problem(name):
                    raise PrepareError(f"{entry.path!r} {problem}; rename it")
                yield name, status.st_size


@dataclass(frozen=True, slots=True)
class _ReadFile:
    """Reads a part of a file when called."""

    path: Path
    offset: int
    size: int

    def __call__(self) -> bytes:
        with self.path.open("rb") as stream:
            stream.seek(self.offset)
            return stream.read(self.size)


class _Tar:
    """The files of a tar archive, but hidden ones."""

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
        if not self._is_packed:
            for index in wanted:
                size = min(self.entries[index].bytes, max_bytes + 1)
                yield _ReadFile(self._path, self._offsets[index], size)
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
            # Mode "r:" is for what is unpacked already.
            with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
                while (info := archive.next()) is not None:
                    cast(Any, archive).members.clear()  # Or it keeps them all.
                    if (entry := _entry(info)) is not None:
                        yield entry, stream
            # A header that is cut off ends an archive as well, says tarfile.
            if stream.last != bytes(tarfile.BLOCKSIZE):
                raise EOFError("it has no end")
            # What is packed has a checksum at its end.
            while stream.take(_MAX_HEADER_BYTES):
                pass
        except (*DAMAGED, tarfile.TarError, ValueError) as error:
            raise PrepareError(
                f"{str(self._path)!r} is damaged, cut off, or not to be trusted: "
                f"{error}"
            ) from error


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
            size = plain.seek(0, os.SEEK_END)
            plain.seek(0)
            stream = _Headers(plain)
            with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
                while (info := archive.next()) is not None:
                    cast(Any, archive).members.clear()  # Or it keeps them all.
                    if info.offset_data + info.size > size:
                        raise EOFError("it has no end")
                    if (entry := _entry(info)) is not None:
                        yield entry, info.offset_data
            if stream.last != bytes(tarfile.BLOCKSIZE):
                raise EOFError("it has no end")
    except (*DAMAGED, tarfile.TarError, ValueError) as error:
        raise PrepareError(
            f"{str(path)!r} is damaged, cut off, or not to be trusted: {error}"
        ) from error


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


def _entry(info: tarfile.TarInfo) -> Entry | None:
    """Returns a member of an archive; None if it is a folder or hidden."""
    problem = _name_problem(info.name)
    if not problem and (info.issparse() or not (info.isdir() or info.isreg())):
        problem = "is a link, a device or a sparse file"
    if problem:
        raise ValueError(f"its member {info.name!r} {problem}")
    path = PurePosixPath(info.name)
    if info.isdir() or any(part.startswith(".") for part in path.parts):
        return None
    return Entry(str(path), info.size)


def _name_problem(name: str) -> str:
    """Returns what is wrong with the name of a file within a source."""
    if name.startswith("/") or ".." in name.split("/"):
        return "leads out of the folder"
    if len(name) > _MAX_NAME_CHARS:
        return f"has a name of more than {_MAX_NAME_CHARS} characters"
    if not name.isprintable():  # Surrogates too: bytes that are no UTF-8.
        return "has a name that is not printable UTF-8"
    return ""
