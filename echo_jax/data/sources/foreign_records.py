"""Examples that other people's code or files hold, as records of bytes.

What reads them gives a dict for each index; here it is looked at, and packed as a
record of a prepared folder is, so that the stages behind see no difference.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from echo_jax.data.sources.entries import ENTRIES, problem_of
from echo_jax.data.sources.prepared import pack, unpack

__all__ = ["Examples", "ForeignRecords", "open_foreign", "refuse_scenes"]


class Examples(Protocol):
    """Dicts of a kind by index; called from several threads, and pickled."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ForeignRecords:
    """The records of a split.

    Attributes:
      examples: What reads them.
      info: See `echo_jax.data.sources.source.DescribedSource`.
      facts: What was read, for ``environment.json``.
    """

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
        """Returns what was read."""
        return dict(self.facts)


def refuse_scenes(source: str, kind: str) -> None:
    """Refuses scenes, for sources that have none.

    Raises:
      ValueError: The kind is coco.
    """
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
    """Returns the records of a split, and what turns one into the dict of its kind.

    The first one is read, so that examples of another kind are refused at the start.

    Args:
      examples: What reads the dicts.
      kind: Of the examples.
      splits: All splits of the source, and what is known of each.
      facts: ``source`` and ``split``, and what else says what was read.
      **about: ``classes`` or ``categories``, see
        `echo_jax.data.sources.source.DescribedSource`.

    Raises:
      ValueError: There is no example, or the first one is none of that kind.
    """
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
    """Says what is wrong with an example; nothing if it is one of its kind."""
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
