"""The user's own ArrayRecord files, by index.

An image record is a dict encoded by `echo_jax.data.sources.prepared.pack`. A text
record is a UTF-8 document.
"""

from typing import Any

from array_record.python.array_record_data_source import ArrayRecordDataSource

from echo_jax.data.sources.foreign_records import Opened, open_foreign
from echo_jax.data.sources.prepared import unpack
from echo_jax.data.sources.shard_files import find_shards, read_classes, shards_metadata


class ArrayRecordData:
    """Files ``*.array_record``, and for images ``classes.txt`` beside them."""

    def __init__(self, name: str, kind: str):
        self._source, self._kind = f"arrayrecord:{name}", kind
        self._files = find_shards(self._source, name, ".array_record")
        self.splits = list(self._files)
        self._about: dict[str, Any] = {}
        if kind == "images":
            folder = next(iter(self._files.values()))[0].parent
            classes = read_classes(folder)
            if not classes:
                raise ValueError(
                    f"data.source={self._source!r} says no classes: put their names, "
                    f"in the order of labels, into {str(folder / 'classes.txt')!r}, "
                    "one a line."
                )
            self._about["classes"] = classes

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        paths = self._files[split]
        try:
            source = ArrayRecordDataSource([str(path) for path in paths])
            examples = _Unpacked(source, self._kind)
            len(examples)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"data.source={self._source!r} cannot be read: "
                f"{str(error).partition(';')[0]}; write it anew with array_record."
            ) from error
        return open_foreign(
            examples,
            self._kind,
            splits={name: {} for name in self.splits},
            facts={"source": self._source, "split": split, **shards_metadata(paths)},
            **self._about,
        )


class _Unpacked:
    """The dicts of the records."""

    def __init__(self, source: ArrayRecordDataSource, kind: str):
        self._source, self._kind = source, kind

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        record = self._source[index]
        return {"text": record} if self._kind == "text" else unpack(record)
