"""The files of a folder or an archive, or of a folder within it, in a fixed order."""

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from echo_jax.data.prepare.archives import TarFiles, ZipFiles
from echo_jax.data.prepare.entries import Entry, Files, ReadFile, name_problem
from echo_jax.data.prepare.errors import PrepareError
from echo_jax.data.prepare.job import OnProgress
from echo_jax.data.prepare.parquet import ParquetFiles
from echo_jax.files.compressed import PACKED_SUFFIXES

__all__ = ["FilesBelow", "archive_of", "open_files"]

_ARCHIVES = (
    ".zip",
    ".tar",
    *(f".tar{suffix}" for suffix in PACKED_SUFFIXES),
    ".parquet",
)
_MAX_SHOWN = 5


def open_files(path: Path, on_progress: OnProgress) -> Files:
    """Lists a folder, an archive, a folder in an archive, or a Parquet file."""
    if path.is_dir():
        return _Folder(path)
    archive, folder = archive_of(path)
    if archive is None:
        raise PrepareError(f"{str(path)!r}: there is no such file or folder")
    if not archive.name.lower().endswith(_ARCHIVES):
        raise PrepareError(
            f"{str(archive)!r} is neither a folder nor a file named "
            f"{', '.join(_ARCHIVES)}; unpack it, and name the folder"
        )
    files: Files
    match archive.suffix.lower():
        case ".zip":
            files = ZipFiles(archive)
        case ".parquet":
            files = ParquetFiles(archive)
        case _:
            files = TarFiles(archive, on_progress)
    return FilesBelow(files, folder) if folder else files


def archive_of(path: Path) -> tuple[Path | None, str]:
    """Returns the file that a path leads to or through, and the path within it."""
    for file in (path, *path.parents):
        if file.is_file():
            within = path.relative_to(file).as_posix()
            return file, "" if within == "." else within
    return None, ""


class FilesBelow:
    """The files of a source that are below one of its folders."""

    def __init__(self, files: Files, folder: str):
        self._files, prefix = files, f"{folder}/"
        self._indices = [
            index
            for index, entry in enumerate(files.entries)
            if entry.name.startswith(prefix)
        ]
        if not self._indices:
            tops = {e.name.partition("/")[0] for e in files.entries if "/" in e.name}
            shown = ", ".join(map(repr, sorted(tops)[:_MAX_SHOWN]))
            raise PrepareError(
                f"{files.metadata['path']!r} holds no folder {folder!r}; name one that "
                f"it has, and its outermost are {shown or 'none'}"
            )
        found = (files.entries[index] for index in self._indices)
        self.entries = [Entry(e.name.removeprefix(prefix), e.bytes) for e in found]
        path = f"{files.metadata['path']}/{folder}"
        self.metadata: dict[str, Any] = {**files.metadata, "path": path}

    def contents(
        self, wanted: Sequence[int], max_bytes: int
    ) -> Iterator[Callable[[], bytes]]:
        return self._files.contents([self._indices[i] for i in wanted], max_bytes)


class _Folder:
    """The visible files below a folder; links are followed."""

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
            yield ReadFile(path, 0, max_bytes + 1)


def _walk(
    folder: Path, above: frozenset[tuple[int, int]] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, int]]:
    """Yields the name and size of every regular file below a folder."""
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:  # A link leads back to a folder above it.
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
                if problem := name_problem(name):
                    raise PrepareError(f"{entry.path!r} {problem}; rename it")
                yield name, status.st_size
