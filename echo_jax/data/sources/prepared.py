"""Prepared folders: the output of ``echo-jax prepare``, by index.

A folder holds shards of records, and ``dataset.json``, which is written last. A folder
without this file is unfinished, and is not read.
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex, cast

import msgpack
from array_record.python.array_record_module import ArrayRecordReader
from etils import epath

from echo_jax.data.sources.shard_files import ShardRecords, too_many_files
from echo_jax.files.folders import FolderError, run_folder, typed_path
from echo_jax.files.json_files import DamagedFileError, read_json

DATASET_FILE = "dataset.json"
FORMAT = 1

Value = int | float | str | bytes
"""What an entry of a record may be."""

_KINDS = ("images", "coco", "text")
# A shard's name is joined to the folder's path, and must not lead out of the folder.
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MAX_ENTRIES = 64


class PreparedError(ValueError):
    """A folder is not a finished output of ``echo-jax prepare``."""


def open_prepared(folder: str | Path, split: str) -> "Prepared":
    """Opens one split of a prepared folder.

    Args:
      folder: The ``--out`` of ``echo-jax prepare``.
      split: One of the folder's splits, by its own name.

    Returns:
      The records of the split.

    Raises:
      PreparedError: The folder is unfinished or of another format, it lacks the
        split, or a shard is missing, or of another size.

    Example:
      >>> records = open_prepared("data/cifar10", "train")
      >>> len(records), unpack(records[0])["label"]
      (50000, 3)
    """
    folder = typed_path(folder)
    info = read_info(folder)
    if split not in info["splits"]:
        raise PreparedError(
            f"{str(folder)!r} has no split {split!r}; it has "
            f"{', '.join(info['splits'])}."
        )
    return Prepared(folder, split, info)


def read_info(folder: str | Path) -> dict[str, Any]:
    """Reads a folder's ``dataset.json``, and checks that its shards exist.

    Args:
      folder: The ``--out`` of ``echo-jax prepare``.

    Returns:
      The content of ``dataset.json``.

    Raises:
      PreparedError: The folder is unfinished or of another format, or a file is
        missing, or of another size than when it was written.
    """
    folder = typed_path(folder)
    path = run_folder(folder) / DATASET_FILE
    try:
        info = read_json(path)
    except NotADirectoryError:
        info = None
    except DamagedFileError as error:
        raise PreparedError(f"{path} is damaged: {error.what}. {_AGAIN}") from error
    except FolderError as error:
        raise PreparedError(f"{error}. {_AGAIN}") from error
    if info is None:
        raise PreparedError(
            f"{str(folder)!r} is not a prepared folder: it has no {DATASET_FILE}, "
            "which is written last. Run `echo-jax prepare` to make it, or to finish it."
        )
    if (found := info.get("format")) != FORMAT:
        raise PreparedError(
            f"{str(path)!r} has format {found!r}; this version reads {FORMAT}. {_AGAIN}"
        )
    try:
        if info["kind"] not in _KINDS:
            raise ValueError(f"kind {info['kind']!r} is none of {', '.join(_KINDS)}")
        for file in _files(info):
            _check_file(folder, file)
        for split in info["splits"].values():
            counted = sum(shard["examples"] for shard in split["shards"])
            if counted != split["examples"] or not counted:
                raise ValueError(f"shards hold {counted} of {split['examples']}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PreparedError):
            raise
        raise PreparedError(f"{str(path)!r} is damaged: {error!r}. {_AGAIN}") from error
    return info


class Prepared:
    """The records of one split, by index; several threads may read at the same time.

    It is pickled as folder and split, and a worker process opens it again.

    Attributes:
      folder: The prepared folder.
      split: The split's name.
      info: The content of ``dataset.json``.
    """

    def __init__(self, folder: Path, split: str, info: dict[str, Any]):
        self.folder, self.split, self.info = folder, split, info
        shards = info["splits"][split]["shards"]
        paths = [str(folder / shard["file"]) for shard in shards]
        self._records = ShardRecords(paths, [shard["examples"] for shard in shards])

    def __reduce__(self) -> tuple[Callable[..., "Prepared"], tuple[Path, str]]:
        return open_prepared, (self.folder, self.split)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        position = index.__index__()
        if not 0 <= position < len(self):
            raise IndexError(
                f"record {position} of {len(self)} in split {self.split!r} of "
                f"{str(self.folder)!r}"
            )
        try:
            return self._records[position]
        except (OSError, RuntimeError) as error:
            # Records carry checksums.
            what = too_many_files(error) or (
                f"{str(error).partition(';')[0]}. Find the file with "
                f"`echo-jax prepare verify {self.folder}`. {_AGAIN}"
            )
            raise PreparedError(
                f"record {position} in split {self.split!r} of {str(self.folder)!r} "
                f"cannot be read: {what}"
            ) from error

    def read_file(self, name: str) -> bytes:
        """Reads a file beside the shards; raises PreparedError if it was changed."""
        for file in self.info.get("files", []):
            if file["file"] == name:
                path = run_folder(self.folder) / name
                content = path.read_bytes()
                _check_hash(path, hashlib.sha256(content).hexdigest(), file)
                return content
        raise PreparedError(f"{str(self.folder)!r} has no file {name!r}. {_AGAIN}")

    def metadata(self) -> dict[str, Any]:
        """Returns the sizes and one hash of all shards, as JSON values."""
        shards = self.info["splits"][self.split]["shards"]
        hashes = "".join(shard["sha256"] for shard in shards)
        return {
            "source": str(self.folder),
            "kind": self.info["kind"],
            "split": self.split,
            "examples": len(self),
            "sha256": hashlib.sha256(hashes.encode()).hexdigest(),
        }


def verify(folder: str | Path) -> int:
    """Checks the hash of every file of a prepared folder, and counts its records.

    Args:
      folder: The ``--out`` of ``echo-jax prepare``.

    Returns:
      The number of checked files.

    Raises:
      PreparedError: A file has another hash, or another number of records.
    """
    files = _files(read_info(folder))
    for file in files:
        path = run_folder(folder) / file["file"]
        with open(path, "rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
        _check_hash(path, found, file)
        if "examples" in file and (number := count_records(path)) != file["examples"]:
            raise PreparedError(
                f"{str(path)!r} holds {number} records, and {DATASET_FILE} says "
                f"{file['examples']}. {_AGAIN}"
            )
    return len(files)


def count_records(shard: str | os.PathLike[str]) -> int:
    """Returns the number of records in a shard's index."""
    with contextlib.closing(ArrayRecordReader(os.fspath(shard))) as reader:
        return reader.num_records()


def pack(entries: Mapping[str, Value]) -> bytes:
    """Returns the record of these entries; `unpack` is its inverse."""
    return cast(bytes, msgpack.packb(dict(entries)))


def unpack(record: bytes) -> dict[str, Value]:
    """Returns the entries of a record of a prepared folder.

    Args:
      record: The bytes of the record.

    Returns:
      Entries by name. Arrays are the bytes of their elements, little-endian.

    Raises:
      ValueError: The bytes are not such a record.

    Example:
      >>> unpack(pack({"image": b"...", "label": 3, "name": "cat/1.jpg"}))
      {'image': b'...', 'label': 3, 'name': 'cat/1.jpg'}
    """
    try:
        entries = msgpack.unpackb(
            record,
            strict_map_key=True,
            max_map_len=_MAX_ENTRIES,
            max_array_len=0,
            max_ext_len=0,
        )
    except (ValueError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(
            f"A record of {len(record)} bytes, beginning with {record[:8]!r}, is none "
            f"of a prepared folder: {error}. {_AGAIN}"
        ) from error
    if not isinstance(entries, dict):
        raise ValueError(f"A record holds {type(entries).__name__}, not entries.")
    for name, value in entries.items():
        if type(name) is not str or type(value) not in (int, float, str, bytes):
            raise ValueError(
                f"Entry {name!r} of a record is a {type(value).__name__}; entries "
                "are numbers, text or bytes."
            )
    return entries


_AGAIN = "Prepare it again, with `echo-jax prepare`, into another folder."


def _files(info: dict[str, Any]) -> list[dict[str, Any]]:
    shards = [split["shards"] for split in info["splits"].values()]
    return [*info.get("files", []), *itertools.chain(*shards)]


def _check_file(folder: Path, file: dict[str, Any]) -> None:
    name = file["file"]
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"file {name!r} lies outside of the folder")
    path = folder / name
    size = path.stat().st_size if path.is_file() else None
    if size != file["bytes"]:
        raise PreparedError(
            f"{str(path)!r} is {'missing' if size is None else f'{size} bytes long'}; "
            f"it was written with {file['bytes']} bytes. {_AGAIN}"
        )


def _check_hash(path: epath.Path, found: str, file: Mapping[str, Any]) -> None:
    if found != file["sha256"]:
        raise PreparedError(
            f"{str(path)!r} has the hash {found}, and was written with "
            f"{file['sha256']}: it was changed since. {_AGAIN}"
        )
