"""The entries of examples of each kind, and third-party examples as such records.

A reader returns a dict for each index. `ForeignRecords` checks the dict and packs it
like a record of a prepared folder, so that later stages see no difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from echo_jax.data.sources.prepared import pack, unpack

# As `echo_jax.data.sources.source` describes them.
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
    """Returns the fault of an example, or an empty text."""
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
    """Returns the fault of an example's values, or an empty text."""
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
        entries = {"tokens": bytes} if self.kind == "text" else _ENTRIES[self.kind]
        example = unpack(record)
        if missing := entries.keys() - example.keys():
            problem = f"has no {', '.join(sorted(missing))}."
        else:
            problem = _fault_of(entries, example)
        if problem:
            raise ValueError(
                f"A record of {len(record)} bytes {problem} It is damaged, or not of "
                f"kind {self.kind}: prepare it again, with `echo-jax prepare`, into "
                "another folder."
            )
        return example
