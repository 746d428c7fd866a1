"""Opens record sources: prepared folders and third-party datasets.

    data.source                       source
    FOLDER                            output of `echo-jax prepare`
    tfds:NAME                         tensorflow-datasets
    hf:NAME, hf:FOLDER                Hugging Face datasets
    wds:FOLDER, wds:PATTERN           shards of WebDataset
    arrayrecord:FOLDER, :PATTERN      the user's own ArrayRecord files
    python:package.module:Class       the user's own class

A workload asks for a split and a kind of data. Every example is a dict with the same
entries, whatever the source:

    kind      entries
    images    image: encoded bytes; label: int; name: str
    coco      image: encoded bytes, or uint8[H, W, 3]; image_id, height, width: int;
              boxes: float32 bytes [n, 4] (ymin, xmin, ymax, xmax in pixels);
              labels: int32 bytes [n]; crowd: uint8 bytes [n]; area: float32 bytes [n]
    text      tokens: bytes, from a prepared folder; text: bytes, from other sources
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from echo_jax.data.pipeline.stages import RecordSource
from echo_jax.data.sources.prepared import open_prepared, pack, read_info, unpack

Kind = Literal["images", "coco", "text"]

# The module and the class of each scheme; imports take time or extra packages.
_SCHEMES = {
    "tfds": ("tfds", "TfdsData"),
    "hf": ("hf", "HuggingFaceData"),
    "wds": ("wds", "WebData"),
    "arrayrecord": ("own", "ArrayRecordData"),
    "python": ("own", "PythonData"),
}
# The entries of an example of each kind, as the module describes them.
_ENTRIES: dict[str, dict[str, type]] = {
    "images": {"image": bytes, "label": int, "name": str},
    "text": {"text": bytes},
    "coco": {
        "image": bytes,
        "image_id": int,
        "height": int,
        "width": int,
        "boxes": bytes,
        "labels": bytes,
        "crowd": bytes,
        "area": bytes,
    },
}
_LARGEST_LABEL = 2**31 - 1
_LARGEST_INT = 2**63 - 1
# The names that sources give to a split, the best name first.
_ALSO_CALLED = {"validation": ("validation", "valid", "val", "test")}


class DescribedSource(RecordSource, Protocol):
    """Records with a description.

    Attributes:
      info: JSON values: ``kind``, ``splits``, and, where they exist, ``classes``
        (names in label order) or ``categories`` (``{"id", "name"}`` in label order).
        A prepared folder gives its complete ``dataset.json``.
    """

    @property
    def info(self) -> dict[str, Any]:
        """The description of the records; see the class."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Returns the facts about the source, for ``environment.json``."""
        ...


@dataclass(frozen=True)
class Subset:
    """Some of the records of a source.

    Attributes:
      source: All records.
      indices: The indices of the records to use, in this order.

    Example:
      >>> Subset([b"ab", b"cd", b"ef"], (2, 0))[0]
      b'ef'
    """

    source: RecordSource
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> bytes:
        return self.source[self.indices[index]]


def open_source(
    source: str, split: str, kind: Kind
) -> tuple[DescribedSource, Callable[[bytes], dict[str, Any]]]:
    """Opens a split of the data that ``data.source`` names.

    Args:
      source: A prepared folder or a third-party dataset, see the module.
        ``"tfds:NAME"`` must be prepared as ``array_record``.
      split: ``"train"`` or ``"validation"``. If the source has no split
        ``validation``, it is ``valid``, ``val`` or ``test``.
      kind: The kind of the records.

    Returns:
      The records, and a function that turns a record into the dict of its kind, see
      the module. Both can be pickled, and called from several threads.

    Raises:
      ValueError: The data or the split does not exist, or is of another kind.

    Example:
      >>> records, decode_record = open_source("data/cifar10", "train", "images")
      >>> decode_record(records[0])["label"]
      3
    """
    if is_made_by_others(source):
        scheme, _, name = source.partition(":")
        if kind == "coco" and scheme not in ("tfds", "python"):
            raise ValueError(
                f"data.source={source!r} has images or text; scenes are read from what "
                "`echo-jax prepare coco` has made."
            )
        module, reader = _SCHEMES[scheme]
        found = importlib.import_module(f"echo_jax.data.sources.{module}")
        data = getattr(found, reader)(name, kind)
        return data.open(_split_of(source, split, data.splits))
    if not source:
        raise ValueError(
            "data.source is empty; name a folder that `echo-jax prepare` has written, "
            "as in --config.data.source=data/cifar10, or tfds:NAME."
        )
    info = read_info(source)
    if info["kind"] != kind:
        raise ValueError(
            f"data.source={source!r} holds {info['kind']}, and this workload reads "
            f"{kind}; prepare such data with `echo-jax prepare {kind}`."
        )
    records = open_prepared(source, _split_of(source, split, info["splits"]))
    return records, DecodeRecord(kind)


def is_made_by_others(source: str) -> bool:
    """Returns whether ``data.source`` names a third-party dataset or a user's class.

    Example:
      >>> is_made_by_others("hf:rotten_tomatoes"), is_made_by_others("data/cifar10")
      (True, False)
    """
    scheme, colon, _ = source.partition(":")
    return bool(colon) and scheme in _SCHEMES


def _split_of(source: str, wanted: str, splits: Iterable[str]) -> str:
    splits = list(splits)
    for name in _ALSO_CALLED.get(wanted, (wanted,)):
        if name in splits:
            return name
    raise ValueError(
        f"data.source={source!r} has no split {wanted!r}; it has {', '.join(splits)}. "
        f"Name one with --config.data.train_split or eval_split, if the workload has "
        "them, or make one of that name."
    )


@dataclass(frozen=True)
class ForeignRecords:
    """The records of a split; `facts` are stored in ``environment.json``."""

    examples: Any  # Dicts by index, from any thread; can be pickled.
    info: dict[str, Any]
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> bytes:
        example = self.examples[index]
        if problem := _problem(self.info, example):
            raise ValueError(
                f"example {index} in split {self.facts['split']!r} of "
                f"data.source={self.facts['source']!r} {problem}"
            )
        return pack(example)

    def metadata(self) -> dict[str, Any]:
        """Returns the facts."""
        return dict(self.facts)


Opened = tuple[ForeignRecords, Callable[[bytes], dict[str, Any]]]
"""The records of a split, and their decoder."""


def open_foreign(
    examples: Any,
    kind: str,
    *,
    splits: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Any],
    **about: Any,
) -> Opened:
    """Returns the records of a split and their decoder; checks the first record."""
    facts = {**facts, "kind": kind, "examples": len(examples)}
    if not len(examples):
        raise ValueError(
            f"data.source={facts['source']!r} has no example in split "
            f"{facts['split']!r}; name data that has."
        )
    info = {"kind": kind, "splits": dict(splits), **about}
    records = ForeignRecords(examples, info, facts)
    records[0]
    return records, unpack


def _problem(info: dict[str, Any], example: Any) -> str:
    entries = _ENTRIES[info["kind"]]
    if not isinstance(example, dict) or example.keys() != entries.keys():
        found = ", ".join(example) if isinstance(example, dict) else repr(example)[:80]
        return f"is {found}; kind {info['kind']} is a dict of {', '.join(entries)}."
    if problem := _fault_of(entries, example):
        return problem
    num_classes = len(info.get("classes", ()))
    if num_classes and not 0 <= example["label"] < num_classes:
        return f"has label {example['label']}; there are {num_classes} classes."
    return ""


def _fault_of(entries: Mapping[str, type], example: Mapping[str, Any]) -> str:
    if missing := entries.keys() - example.keys():
        return f"has no {', '.join(sorted(missing))}."
    for name, kind in entries.items():
        value = example[name]
        if type(value) is not kind:
            return f"has {name!r} of type {type(value).__name__}; give {kind.__name__}."
        if kind is int:
            most = _LARGEST_LABEL if name == "label" else _LARGEST_INT
            if not 0 <= value <= most:
                return f"has {name!r} {value}, outside of [0, {most}]."
    return ""


@dataclass(frozen=True)
class DecodeRecord:
    """Turns a record of a prepared folder into the dict of its kind."""

    kind: str

    def __call__(self, record: bytes) -> dict[str, Any]:
        """Returns the checked entries of a record."""
        entries = {"tokens": bytes} if self.kind == "text" else _ENTRIES[self.kind]
        example = unpack(record)
        if problem := _fault_of(entries, example):
            raise ValueError(
                f"A record of {len(record)} bytes {problem} It is damaged, or not of "
                f"kind {self.kind}: prepare it again, with `echo-jax prepare`, into "
                "another folder."
            )
        return example
