"""The protocol of a source of files, and the files of archives, read in place.

Nothing in an archive is written to disk under its own name. An archive is refused, with
the member's name, if it holds links, devices, names that lead out of it, or files far
larger than their packed size.
"""

import contextlib
import functools
import hashlib
import stat
import struct
import tarfile
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, cast

from echo_jax.data.compressed import (
    DAMAGED,
    PACKED_SUFFIXES,
    ForwardReader,
    unpacked_chunks,
)
from echo_jax.data.prepare.job import OnProgress, PrepareError, Progress

_MAX_NAME_CHARS = 1024
_MAX_KINDS = 20
# Names are in the archive's headers. tarfile reads at most this many bytes at once.
_MAX_HEADER_BYTES = 1024**2
_CHUNK_BYTES = 1024**2
_TAR = ".tar"
# zlib's largest ratio; a header may claim more.
_MAX_DEFLATE_RATIO = 1032
_ZIP_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_IS_ENCRYPTED = 1
# Where a header has a length of hundreds of digits, tarfile overflows.
_TAR_DAMAGED = (*DAMAGED, tarfile.TarError, OverflowError, ValueError)
_ZIP_DAMAGED = (*DAMAGED, zipfile.BadZipFile, NotImplementedError, struct.error)


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of a source: its path with ``/``, and its size in bytes."""

    name: str
    bytes: int


Readers = Iterator[Callable[[], bytes]]
"""Functions that read a file each."""


class Files(Protocol):
    """The regular files of a source, in reading order."""

    entries: list[Entry]
    folders: list[str]  # The folders that an archive or a disk lists by themselves.
    metadata: dict[str, Any]  # Their origin, as JSON that changes if the files do.

    # The functions may run in other threads and in any order. They read at most
    # ``max_bytes + 1`` bytes, and raise OSError for an unreadable file.
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


def nfc(name: str) -> str:
    """Returns a name in the form in which names are compared; keyboards differ."""
    return unicodedata.normalize("NFC", name)


def plain_name(name: str) -> str:
    """Returns a file's path in the form in which paths are compared."""
    return str(PurePosixPath(nfc(name).replace("\\", "/")))


def counted(said: str, left_out: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a sentence with the number of each kind and an example, if there are."""
    numbers, examples = Counter[str](), {}
    for kind, name in left_out:
        kind = kind if kind in examples or len(examples) < _MAX_KINDS else "others"
        numbers[kind] += 1
        examples.setdefault(kind, name)
    each = (f"{numbers[k]} {k} (such as {name})" for k, name in examples.items())
    return [f"{said}: {', '.join(each)}"] * bool(examples)


def respelt(names: Iterable[str]) -> list[str]:
    """Returns a sentence about names that differ only in their form, if there are."""
    forms = Counter(map(nfc, {*names}))
    several = sorted(name for name, number in forms.items() if number > 1)
    said = f"one class each, in several forms of Unicode: {', '.join(several)}"
    return [said] * bool(several)


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


# A tar archive within the archive (ImageNet has one for each class) is a folder of its
# name: ``n01440764.tar`` holds the files of ``n01440764/``. A third level is a file.
class TarFiles:
    """The visible files of a tar archive, plain or packed; see `Files`."""

    def __init__(self, path: Path, on_progress: OnProgress):
        self._path = path
        self._is_packed = path.suffix.lower() in PACKED_SUFFIXES
        self.metadata = file_metadata(path)
        self.entries: list[Entry] = []
        self.folders: list[str] = []
        self._offsets: list[int] = []
        progress = Progress(on_progress, f"reading {path.name}", self.metadata["bytes"])
        for entry, stream in self._members(progress.reach, self.folders):
            self.entries.append(entry)
            self._offsets.append(stream.tell())

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
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
        self, on_packed: Callable[[int], None] | None = None, folders: Any = None
    ) -> Iterator[tuple[Entry, ForwardReader]]:
        stream = ForwardReader(
            unpacked_chunks(self._path, on_packed), max_read_bytes=_MAX_HEADER_BYTES
        )
        try:
            for entry in _tar_entries(stream, [] if folders is None else folders):
                yield entry, stream
            # Read to the end, where a packed archive has its checksum.
            while stream.take(_MAX_HEADER_BYTES):
                pass
        except _TAR_DAMAGED as error:
            raise _untrusted(self._path, error) from error


def plain_members(path: Path) -> Iterator[tuple[Entry, int]]:
    """Yields the files of an unpacked archive and their offsets; reads only headers."""
    try:
        with path.open("rb") as plain:
            stream = _Within(plain, path.stat().st_size)
            for entry in _tar_entries(stream, [], folder=""):
                yield entry, stream.tell()
    except _TAR_DAMAGED as error:
        raise _untrusted(path, error) from error


def _tar_entries(
    stream: Any, folders: list[str], folder: str | None = None
) -> Iterator[Entry]:
    """Yields files, with the stream at the start of each; lists folders."""
    with tarfile.open(fileobj=cast(Any, stream), mode="r:") as archive:
        while (info := archive.next()) is not None:
            cast(Any, archive).members.clear()  # Or it keeps them all.
            if (entry := _tar_entry(info)) is None:
                continue
            if info.isdir():
                folders.append(entry.name)
            elif folder is not None:
                yield Entry(f"{folder}/{entry.name}".lstrip("/"), entry.bytes)
            elif entry.name.lower().endswith(_TAR):
                within = _Within(stream, info.size)
                yield from _tar_entries(within, [], entry.name[: -len(_TAR)])
            else:
                yield entry
    # tarfile accepts a cut-off header as the end of an archive.
    if stream.last != bytes(tarfile.BLOCKSIZE):
        what = f"{folder!r}, an archive in it," if folder else "it"
        raise EOFError(f"{what} has no end")


class _Within:
    """A part of a stream, from the current position; nothing beyond it is read."""

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
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes is too long")
        self.last = self._stream.read(min(size, self._end - self.tell()))
        return self.last


class ZipFiles:
    """The visible files of a zip archive; see `Files`."""

    def __init__(self, path: Path):
        self._path = path
        self.metadata = file_metadata(path)
        self.entries: list[Entry] = []
        self.folders: list[str] = []
        self._members: list[zipfile.ZipInfo] = []
        try:
            # Keep the file open: the functions of `contents` may be called at any time.
            self._archive = zipfile.ZipFile(path)
            for member in self._archive.infolist():
                if (entry := _zip_entry(member)) is None:
                    continue
                if member.filename.endswith(("/", "\\")):
                    self.folders.append(entry.name)
                else:
                    self.entries.append(entry)
                    self._members.append(member)
            if sum(m.compress_size for m in self._members) > self.metadata["bytes"]:
                raise ValueError("its members are packed from the same bytes")
        except (*_ZIP_DAMAGED, ValueError) as error:
            raise _untrusted(path, error) from error

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        for index in wanted:
            yield lambda i=index: next(self.chunks(i, max_bytes + 1), b"")

    def close(self) -> None:
        self._archive.close()

    def packed_bytes(self, index: int) -> int:
        """Returns the packed size of a file."""
        return self._members[index].compress_size

    def chunks(self, index: int, size: int = _CHUNK_BYTES) -> Iterator[bytes]:
        """Yields a file's content in chunks of at most `size`."""
        member = self._members[index]
        try:
            with self._archive.open(member) as stream:
                while chunk := stream.read(size):
                    yield chunk
        except _ZIP_DAMAGED as error:
            raise OSError(f"{member.filename!r} is damaged: {error}") from error


def _tar_entry(info: tarfile.TarInfo) -> Entry | None:
    problem = name_problem(info.name)
    if not problem and (info.issparse() or not (info.isdir() or info.isreg())):
        problem = "is a link, a device or a sparse file"
    if problem:
        raise ValueError(f"its member {info.name!r} {problem}")
    return _unhidden(info.name, info.size)


def _zip_entry(member: zipfile.ZipInfo) -> Entry | None:
    # Some programs of Windows separate folders by a backslash.
    name = member.filename.replace("\\", "/")
    problem = name_problem(name)
    # Archives made on Unix store the file type in the upper half.
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
    return _unhidden(name, member.file_size)


def _unhidden(name: str, size: int) -> Entry | None:
    path = PurePosixPath(name)
    is_hidden = any(part.startswith(".") for part in path.parts)
    return None if is_hidden else Entry(str(path), size)


def _untrusted(path: Path, error: Exception) -> PrepareError:
    return PrepareError(
        f"{str(path)!r} is damaged, cut off, or not to be trusted: {error}"
    )
