"""The user's own data: ArrayRecord files by index, or a class named as ``python:``.

An image record is a dict encoded by `echo_jax.data.sources.prepared.pack`. A text
record is a UTF-8 document. Importing a class runs its module: only the config of the
run itself may name one, and the config in a run folder is refused.
"""

import importlib
from typing import Any

from echo_jax.data.sources.prepared import count_records, unpack
from echo_jax.data.sources.shard_files import (
    ShardRecords,
    find_shards,
    read_classes,
    shards_metadata,
    too_many_files,
)
from echo_jax.data.sources.source import Opened, open_foreign


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
            counts = [count_records(path) for path in paths]
            records = ShardRecords([str(path) for path in paths], counts)
            examples = _Unpacked(records, self._kind)
        except (OSError, RuntimeError, ValueError) as error:
            said = str(error).partition(";")[0]
            what = too_many_files(error) or f"{said}; write it again with array_record."
            raise ValueError(
                f"data.source={self._source!r} cannot be read: {what}"
            ) from error
        return open_foreign(
            examples,
            self._kind,
            splits={name: {} for name in self.splits},
            facts={"source": self._source, "split": split, **shards_metadata(paths)},
            **self._about,
        )


class _Unpacked:
    def __init__(self, records: ShardRecords, kind: str):
        self._records, self._kind = records, kind

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        record = self._records[index]
        return {"text": record} if self._kind == "text" else unpack(record)


class PythonData:
    """A user's class with random access: ``C(split)[index]`` is the dict of its kind.

    The class has ``__len__``, ``__getitem__`` and ``splits``, the names of the splits,
    for images also ``classes``, and for scenes ``categories`` (see `DescribedSource`).
    ``metadata()`` is optional and returns JSON values. Worker processes need pickling.
    """

    def __init__(self, name: str, kind: str):
        """Imports ``package.module:Class``."""
        self._source, self._kind = f"python:{name}", kind
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"data.source={self._source!r} cannot be imported ({error}); write "
                "python:package.module:Class, and see that PYTHONPATH leads to it."
            ) from error
        # Check the class before the call: one with these attributes was made for this.
        needed = ["splits", "__len__", "__getitem__", *_ABOUT[kind]]
        missing = [each for each in needed if not hasattr(found, each)]
        if missing or not isinstance(found, type):
            what = f"has no {missing[0]}" if missing else "is not a class"
            raise ValueError(
                f"data.source={self._source!r} {what}. Name a class with "
                f"{', '.join(needed)}."
            )
        self._class: Any = found
        self.splits = [str(split) for split in self._class.splits]

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        examples = self._class(split)
        own = examples.metadata() if hasattr(examples, "metadata") else {}
        return open_foreign(
            examples,
            self._kind,
            splits={name: {} for name in self.splits},
            facts={**own, "source": self._source, "split": split},
            **{name: list(getattr(self._class, name)) for name in _ABOUT[self._kind]},
        )


# The attribute that a class needs for its kind of examples.
_ABOUT = {"images": ("classes",), "coco": ("categories",), "text": ()}
