"""Third-party examples as records of bytes.

A reader returns a dict for each index. `ForeignRecords` checks the dict and packs it
like a record of a prepared folder, so that later stages see no difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from echo_jax.data.sources.entries import ENTRIES, problem_of
from echo_jax.data.sources.prepared import pack, unpack

__all__ = ["Examples", "ForeignRecords", "open_foreign", "refuse_scenes"]


class Examples(Protocol):
    """Dicts of a kind by index; must allow several threads and pickling."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ForeignRecords:
    """The records of a split; `facts` are stored in ``environment.json``."""

    examples: Examples
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


def refuse_scenes(source: str, kind: str) -> None:
    """Raises ValueError for kind coco, for sources without scenes."""
    if kind == "coco":
        raise ValueError(
            f"data.source={source!r} has images or text; scenes are read from what "
            "`echo-jax prepare coco` has made."
        )


def open_foreign(
    examples: Examples,
    kind: str,
    *,
    splits: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Any],
    **about: Any,
) -> tuple[ForeignRecords, Callable[[bytes], dict[str, Any]]]:
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
    entries = ENTRIES[info["kind"]]
    if not isinstance(example, dict) or example.keys() != entries.keys():
        found = ", ".join(example) if isinstance(example, dict) else repr(example)[:80]
        return f"is {found}; kind {info['kind']} is a dict of {', '.join(entries)}."
    if problem := problem_of(entries, example):
        return problem
    num_classes = len(info.get("classes", ()))
    if num_classes and not 0 <= example["label"] < num_classes:
        return f"has label {example['label']}; there are {num_classes} classes."
    return ""
