"""The files of a folder, archive or Parquet file in order, and folders of splits."""

import functools
import hashlib
import json
import os
import stat
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from echo_jax.data.compressed import PACKED_SUFFIXES
from echo_jax.data.prepare.archives import (
    Entry,
    Files,
    Readers,
    ReadFile,
    TarFiles,
    ZipFiles,
    file_metadata,
    name_problem,
    whole,
)
from echo_jax.data.prepare.job import OnProgress, PrepareError

_ARCHIVES = (
    ".zip",
    ".tar",
    *(f".tar{suffix}" for suffix in PACKED_SUFFIXES),
    ".parquet",
)
_MAX_SHOWN = 5
_ROWS = 256
# Largest row group. It is read as a whole, and its images are already compressed.
_MAX_GROUP_BYTES = 2 * 1024**3
_SPLITS = {
    "train": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}


def open_files(path: Path, on_progress: OnProgress = lambda what, part: None) -> Files:
    """Lists a folder, an archive, a folder in an archive, or a Parquet file."""
    if path.is_dir():
        return _Folder(path)
    archive, folder = archive_of(path)
    if archive is None:
        raise PrepareError(f"{str(path)!r} does not exist; name a file or folder")
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
            files = _Parquet(archive)
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
        below = (name for name in files.folders if name.startswith(prefix))
        self.folders = [name.removeprefix(prefix) for name in below]
        path = f"{files.metadata['path']}/{folder}"
        self.metadata: dict[str, Any] = {**files.metadata, "path": path}

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        return self._files.contents([self._indices[i] for i in wanted], max_bytes)


class _Folder:
    """The visible files below a folder; links are followed."""

    def __init__(self, path: Path):
        self._path = path
        every = sorted(_walk(path))
        self.folders = [name[:-1] for name, _ in every if name.endswith("/")]
        self.entries = [Entry(*each) for each in every if not each[0].endswith("/")]
        listing = "".join(f"{each.name}\0{each.bytes}\n" for each in self.entries)
        self.metadata = {
            "path": str(path),
            "files": len(self.entries),
            "bytes": sum(entry.bytes for entry in self.entries),
            "listing_sha256": hashlib.sha256(listing.encode()).hexdigest(),
        }

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        for index in wanted:
            path = self._path / self.entries[index].name
            yield ReadFile(path, 0, max_bytes + 1)


def _walk(
    folder: Path, above: frozenset[tuple[int, int]] = frozenset(), prefix: str = ""
) -> Iterator[tuple[str, int]]:
    """Yields the names of all files and, with a slash, folders; and the sizes."""
    status = folder.stat()
    here = status.st_dev, status.st_ino
    if here in above:  # A link leads back to a folder above it.
        return
    if prefix:
        yield prefix, 0
    with os.scandir(folder) as found:
        for entry in found:
            if entry.name.startswith("."):
                continue
            name = prefix + entry.name
            try:
                status = entry.stat()
            except OSError as error:
                raise PrepareError(
                    f"{entry.path!r} cannot be opened: {error}; mend or remove it"
                ) from error
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


def split_folders(
    files: Files, is_wanted: Callable[[str], bool], *, of_classes: bool
) -> tuple[dict[str, str], bool]:
    """Returns the folder of each split, and whether the source holds only these."""
    every = [folders_of(e.name) for e in files.entries if is_wanted(e.name)]
    depth = first_difference(every)
    paths = sorted({of[: depth + 1] for of in every})
    named = {
        _SPLITS[path[depth].lower()]: path
        for path in paths
        if len(path) > depth and path[depth].lower() in _SPLITS
    }
    train = named.get("train")
    is_plain = not of_classes or all(
        len(of) > depth + 1 for of in every if of[: depth + 1] == train
    )
    is_layout = train is not None and 1 < len(named) == len(paths) and is_plain
    in_order = [split for split in dict.fromkeys(_SPLITS.values()) if split in named]
    return {split: "/".join(named[split]) for split in in_order}, is_layout


def by_split(
    parts: Sequence[Files], is_wanted: Callable[[str], bool], *, of_classes: bool
) -> tuple[dict[str, list[Files]], dict[str, str]]:
    """Returns the sources of each split, and the split of each folder."""
    sources, layout = defaultdict(list), {}
    for part in parts:
        folders, is_layout = split_folders(part, is_wanted, of_classes=of_classes)
        # In Parquet the folders are always classes.
        if not is_layout or isinstance(part, _Parquet):
            sources["train"].append(part)
            continue
        for split, folder in folders.items():
            sources[split].append(below := FilesBelow(part, folder))
            layout[below.metadata["path"]] = split
    return dict(sources), layout


def several_splits(path: str, folders: Mapping[str, str]) -> str:
    """Returns the error message for a source with these folders of splits."""
    example = " ".join(f"{split}={path}/{name}" for split, name in folders.items())
    return (
        f"{path!r} holds folders of several splits; name those that you want one by "
        f"one, as in {example}"
    )


def folders_of(name: str) -> tuple[str, ...]:
    """Returns the folders of a file, the outermost first."""
    return tuple(name.split("/")[:-1])


def first_difference(folders: Sequence[tuple[str, ...]]) -> int:
    """Returns the depth of the outermost folder that differs."""
    within = [of for of in folders if of]
    last = min(map(len, within), default=1) - 1
    differing = (n for n in range(last) if len({of[n] for of in within}) > 1)
    return next(differing, last)


class _Parquet:
    """Images of a Parquet file, each as a file in a folder named after its class."""

    def __init__(self, path: Path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise PrepareError(
                f"{str(path)!r} is read by pyarrow, which is not installed: "
                "pip install 'echo-jax[parquet]'"
            ) from error
        self._path = path
        self.folders: list[str] = []
        # The file's own metadata may be invalid too.
        damaged = (pyarrow.ArrowException, OSError, ValueError, TypeError)
        self.metadata = file_metadata(path)
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                self._image, label, names = _columns(file.schema_arrow)
                every = range(file.num_row_groups)
                groups = [file.metadata.row_group(number) for number in every]
                if any(g.total_byte_size > _MAX_GROUP_BYTES for g in groups):
                    raise ValueError(f"a row group takes over {_MAX_GROUP_BYTES} bytes")
            self._group_rows = [group.num_rows for group in groups]
            rows = self._rows(every, [self._image, label])
            self.entries = [
                _entry(number, _class_name(of_class, names), *_image(value))
                for number, (value, of_class) in enumerate(rows)
            ]
        except (*damaged, AttributeError) as error:
            raise PrepareError(f"{str(path)!r} cannot be read: {error}") from error

    def contents(self, wanted: Sequence[int], max_bytes: int) -> Readers:
        start = 0
        for group, rows in enumerate(self._group_rows):
            here = {index - start for index in wanted if 0 <= index - start < rows}
            start += rows
            if not here:
                continue
            for index, (value,) in enumerate(self._rows([group], [self._image])):
                if index in here:
                    data, _ = _image(value)
                    yield functools.partial(bytes, data[: max_bytes + 1])

    def _rows(
        self, groups: Sequence[int], columns: list[str]
    ) -> Iterator[tuple[Any, ...]]:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._path) as file:
            for batch in file.iter_batches(_ROWS, groups, columns, use_threads=False):
                values = [batch.column(name).to_pylist() for name in columns]
                yield from zip(*values, strict=True)


def _columns(schema: Any) -> tuple[str, str, list[str] | None]:
    import pyarrow

    def holds_bytes(kind: Any) -> bool:
        if pyarrow.types.is_struct(kind):
            return kind.get_field_index("bytes") >= 0
        return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)

    images = [field.name for field in schema if holds_bytes(field.type)]
    about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    features = about.get("info", {}).get("features", {})
    named = [name for name in schema.names if "names" in (features.get(name) or {})]
    label = named[0] if named else "label"
    if len(images) != 1 or label not in schema.names:
        raise ValueError(
            f"of its columns {', '.join(schema.names)}, one must hold images and one "
            "be called label"
        )
    return images[0], label, features[label]["names"] if named else None


def _image(value: Any) -> tuple[bytes, str]:
    if isinstance(value, dict):
        return value["bytes"] or b"", value.get("path") or ""
    return value or b"", ""


def _class_name(value: Any, names: list[str] | None) -> str:
    if names is not None and value is not None:
        label = whole(value)
        if not (isinstance(label, int) and 0 <= label < len(names)):
            raise ValueError(
                f"label {label!r:.40} must be an integer below {len(names)}, the "
                "number of its classes. Mend the label, or leave the row out."
            )
        value = names[label]
    elif isinstance(value, float):
        value = whole(value)
    return "" if value is None else str(value).replace("/", "_")


def _entry(row: int, of_class: str, image: bytes, path: str) -> Entry:
    suffix = PurePosixPath(path).suffix or ".png"
    name = str(PurePosixPath(of_class, f"{row:08}{suffix}"))
    if problem := name_problem(name):
        raise ValueError(f"class {of_class!r} {problem}")
    return Entry(name, len(image))
