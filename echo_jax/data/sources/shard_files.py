"""The files of each split, for a source that is a folder or a pattern of shards."""

import bisect
import errno
import functools
import glob
import hashlib
import itertools
import os
import re
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from array_record.python.array_record_module import ArrayRecordReader

from echo_jax.data.plain_text import EncodingError, read_text
from echo_jax.files.folders import typed_path

_SPLITS = ("train", "validation", "valid", "val", "test")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MAX_SHARDS = 100_000
_MAX_CLASSES_BYTES = 1 << 20
# Pieces of each file for the fingerprint. Smaller files are read as a whole.
_PIECES = 16
_PIECE_BYTES = 1 << 16


TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
"""The system's errors of a process, and of a machine, with too many open files."""

# A quarter of the limit for each split leaves room for other files.
_SHARE_OF_FILES = 4
# As the readers of Grain: a record is read by itself.
_READER = {"options": "readahead_buffer_size:0", "file_reader_buffer_size": 32768}


class ShardRecords:
    """The records of shards, by index; only some shards are open at a time."""

    def __init__(self, paths: Sequence[str], counts: Sequence[int]):
        self._paths, self._counts = paths, counts
        self._ends = [*itertools.accumulate(counts)]
        # A dropped reader is closed when the last thread has read from it.
        most = max(1, file_limit() // _SHARE_OF_FILES)
        self._open = functools.lru_cache(most)(
            functools.partial(ArrayRecordReader, **_READER)
        )

    def __reduce__(self) -> tuple[Callable[..., "ShardRecords"], tuple[Any, ...]]:
        return ShardRecords, (self._paths, self._counts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> bytes:
        shard = bisect.bisect_right(self._ends, index)
        first = self._ends[shard] - self._counts[shard]
        return self._open(self._paths[shard]).read([index - first])[0]


def file_limit() -> int:
    """Returns the number of files that this process may have open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def too_many_files(error: Exception) -> str:
    """Returns what to do about too many open files; "" for other errors."""
    # The readers of shards report the system's errors in words.
    if not any(os.strerror(number) in str(error) for number in TOO_MANY_FILES):
        return ""
    return (
        f"too many files are open, of at most {file_limit()}: raise the limit in the "
        "shell that starts this, as in 'ulimit -n 65536'."
    )


def find_shards(source: str, pattern: str, suffix: str) -> dict[str, list[Path]]:
    """Returns the files of each split, sorted; a word in the name is the split."""
    pattern = str(typed_path(pattern))
    if Path(pattern).is_dir():
        found = sorted(Path(pattern).glob(f"*{suffix}"))
    else:
        found = []
        for name in _expanded(pattern):
            paths = [name] if Path(name).is_file() else sorted(glob.glob(name))
            if not paths:
                raise ValueError(
                    f"data.source={source!r}: {name!r} is missing; name other files."
                )
            found += map(Path, paths)
    if not found:
        raise ValueError(
            f"data.source={source!r}: {pattern!r} holds no file that ends with "
            f"{suffix}; name a folder, or files: FOLDER/train-{{000..009}}{suffix}."
        )
    splits: dict[str, list[Path]] = {}
    for path in found:
        words = re.split(r"[^a-z]+", path.name.lower())
        named = [split for split in _SPLITS if split in words]
        if len(named) != 1 or not path.is_file() or path.suffix != suffix:
            raise ValueError(
                f"data.source={source!r}: {str(path)!r} must end with "
                f"{suffix} and name one split; call it as in train-000{suffix}, with "
                f"one of {', '.join(_SPLITS)}."
            )
        splits.setdefault(named[0], []).append(path)
    return splits


def _expanded(pattern: str) -> list[str]:
    parts: list[list[str]] = []
    total = 1
    for i, part in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        if i % 2 == 0:
            parts.append([part])
        elif found := _RANGE.fullmatch(part):
            first, last = found.groups()
            count = int(last) - int(first) + 1
            if count > _MAX_SHARDS:
                raise _too_many(pattern)
            numbers = range(int(first), int(last) + 1)
            parts.append([str(number).zfill(len(first)) for number in numbers])
        else:
            parts.append(part.split(","))
        total *= len(parts[-1])
        if total > _MAX_SHARDS:
            raise _too_many(pattern)
    return ["".join(each) for each in itertools.product(*parts)]


def _too_many(pattern: str) -> ValueError:
    return ValueError(
        f"{pattern!r} names more than {_MAX_SHARDS} files. Give a smaller range, or "
        "make larger shards."
    )


def read_classes(folder: Path) -> list[str] | None:
    """Returns the lines of a folder's ``classes.txt``, in label order, or None."""
    path = folder / "classes.txt"
    if not os.path.lexists(path):
        return None
    # The target of a link would appear wherever classes are named.
    is_file = path.is_file() and not path.is_symlink()
    if not is_file or path.stat().st_size > _MAX_CLASSES_BYTES:
        raise ValueError(
            f"{str(path)!r} is a link, not a file, or too large; put a file of at most "
            f"{_MAX_CLASSES_BYTES} bytes there."
        )
    try:
        return read_text(path.read_bytes()).splitlines()
    except EncodingError as error:
        raise ValueError(f"{str(path)!r} cannot be read: {error}.") from error


# Hashing whole files takes minutes. The fingerprint has names, sizes and 16 pieces of
# 64 KiB of every file, so it misses a change of equal size between two pieces.
def shards_metadata(paths: list[Path]) -> dict[str, Any]:
    """Returns the number of files, their bytes and a fingerprint."""
    digest, total = hashlib.sha256(), 0
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            size = stream.seek(0, 2)
            digest.update(f"{path.name}\0{size}\0".encode())
            for start in _starts(size):
                digest.update(os.pread(stream.fileno(), _PIECE_BYTES, start))
        total += size
    return {"files": len(paths), "bytes": total, "fingerprint": digest.hexdigest()}


def _starts(size: int) -> list[int]:
    if size <= _PIECES * _PIECE_BYTES:
        return [*range(0, size, _PIECE_BYTES)]
    last = size - _PIECE_BYTES
    return [k * last // (_PIECES - 1) for k in range(_PIECES)]
