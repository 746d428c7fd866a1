"""Shards of WebDataset, read in place and by index.

An example is a run of neighbouring members of an archive whose names are equal up to
the first dot. Their offsets are read once, from the headers alone, so that any example
is one read. A stream could be neither shuffled as a whole nor resumed. Nothing is
unpacked, and no name in an archive becomes a path.
"""

import codecs
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from echo_jax.data.prepare.archives import Entry, plain_members, whole
from echo_jax.data.sources.shard_files import find_shards, read_classes, shards_metadata
from echo_jax.data.sources.source import Opened, open_foreign

# Endings of the member with the content of each kind.
_CONTENT = {
    "images": (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".ppm"),
    "text": (".txt",),
}
_LABEL = ".cls"
_MAX_LABEL_BYTES = 16
_MAX_CLASSES = 1_000_000
_MAX_CONTENT_BYTES = 256 * 1024**2


class WebData:
    """Archives ``*.tar`` whose examples have an image and a label, or a text.

    A member ``.cls`` holds the label, a number. ``classes.txt`` beside the archives
    holds the names of classes; without it they are the numbers up to the largest label.
    """

    def __init__(self, name: str, kind: str):
        """Finds the archives (see `find_shards`), and indexes their examples."""
        self._source, self._kind = f"wds:{name}", kind
        self._files = find_shards(self._source, name, ".tar")
        self.splits = list(self._files)
        self._indices = {
            split: [_indexed(path, kind) for path in paths]
            for split, paths in self._files.items()
        }
        self._about: dict[str, Any] = {}
        if kind == "images":
            every = itertools.chain.from_iterable(self._indices.values())
            labels = [sample.label for index in every for sample in index]
            folder = next(iter(self._files.values()))[0].parent
            count = max(labels, default=-1) + 1
            classes = read_classes(folder) or [str(i) for i in range(count)]
            self._about["classes"] = classes

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        paths, indices = self._files[split], self._indices[split]
        facts = {"source": self._source, "split": split, **shards_metadata(paths)}
        digest = hashlib.sha256()
        for index in indices:
            digest.update(repr([tuple(sample) for sample in index]).encode())
        return open_foreign(
            _Members(paths, indices, self._kind),
            self._kind,
            splits={
                name: {"examples": sum(map(len, indices))}
                for name, indices in self._indices.items()
            },
            facts={**facts, "examples_fingerprint": digest.hexdigest()},
            **self._about,
        )


class _Sample(NamedTuple):
    offset: int
    bytes: int
    label: int
    name: str


class _Members:
    def __init__(self, paths: list[Path], indices: list[list[_Sample]], kind: str):
        self._paths, self._kind = paths, kind
        sizes = [len(index) for index in indices]
        self._shard = np.repeat(np.arange(len(paths), dtype=np.int32), sizes)
        columns = [column for index in indices for column in index]
        self._places = np.array([s[:3] for s in columns], np.int64).reshape(-1, 3)
        self._names = [s.name for s in columns]

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        path = self._paths[self._shard[index]]
        offset, size, label = self._places[index].tolist()
        with path.open("rb", buffering=0) as stream:
            content = os.pread(stream.fileno(), size, offset)
        if len(content) != size:
            raise ValueError(
                f"{str(path)!r} ends within {self._names[index]!r}: it was changed "
                "while it was read; start again."
            )
        if self._kind == "text":
            return {"text": content}
        return {"image": content, "label": label, "name": self._names[index]}


def _indexed(path: Path, kind: str) -> list[_Sample]:
    status = path.stat()
    return _index(path, kind, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _index(path: Path, kind: str, size: int, changed: int) -> list[_Sample]:
    del size, changed  # They only extend the cache's key.
    with path.open("rb") as stream:
        return [
            _sample(path, stream.fileno(), key, members, kind)
            for key, members in _examples(path)
        ]


def _examples(path: Path) -> Iterator[tuple[str, dict[str, tuple[Entry, int]]]]:
    key, members = "", {}
    for entry, offset in plain_members(path):
        folder, slash, name = entry.name.rpartition("/")
        stem, dot, ending = name.partition(".")
        now, ending = folder + slash + stem, (dot + ending).lower()
        if now != key and members:
            yield key, members
            members = {}
        if ending in members:
            raise ValueError(
                f"{str(path)!r} has two members {entry.name!r}, of one example; write "
                "it again with names of their own."
            )
        key = now
        members[ending] = entry, offset
    if members:
        yield key, members


def _sample(
    path: Path, file: int, key: str, members: dict[str, tuple[Entry, int]], kind: str
) -> _Sample:
    found = [ending for ending in _CONTENT[kind] if ending in members]
    needed = [f"one of {', '.join(_CONTENT[kind])}"] if len(found) != 1 else []
    if kind == "images" and _LABEL not in members:
        needed.append(f"{_LABEL}, its label")
    if needed:
        raise ValueError(
            f"example {key!r} in {str(path)!r} has {', '.join(members)}, and kind "
            f"{kind} needs {' and '.join(needed)}."
        )
    entry, offset = members[found[0]]
    if entry.bytes > _MAX_CONTENT_BYTES:
        raise ValueError(
            f"member {entry.name!r} in {str(path)!r} has {entry.bytes} bytes, more "
            f"than {_MAX_CONTENT_BYTES}; leave it out."
        )
    label = 0
    if kind == "images":
        text, at = members[_LABEL]
        digits = os.pread(file, min(text.bytes, _MAX_LABEL_BYTES), at)
        digits = digits.removeprefix(codecs.BOM_UTF8).strip()
        label = whole(digits.decode(errors="replace"))
        if not (isinstance(label, int) and 0 <= label < _MAX_CLASSES):
            raise ValueError(
                f"member {text.name!r} in {str(path)!r} is {digits!r}; a label is a "
                f"number from 0 to {_MAX_CLASSES - 1}."
            )
    return _Sample(offset, entry.bytes, label, entry.name)
