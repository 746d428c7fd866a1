"""The entries of an example of each kind of data, and their checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_jax.data.sources.prepared import unpack

__all__ = ["ENTRIES", "DecodeRecord", "problem_of"]

# As `echo_jax.data.sources.source` describes them.
ENTRIES: dict[str, dict[str, type]] = {
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


def problem_of(entries: Mapping[str, type], example: Mapping[str, Any]) -> str:
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
        entries = {"tokens": bytes} if self.kind == "text" else ENTRIES[self.kind]
        example = unpack(record)
        if missing := entries.keys() - example.keys():
            problem = f"has no {', '.join(sorted(missing))}."
        else:
            problem = problem_of(entries, example)
        if problem:
            raise ValueError(
                f"A record of {len(record)} bytes {problem} It is damaged, or not of "
                f"kind {self.kind}: prepare it again, with `echo-jax prepare`, into "
                "another folder."
            )
        return example
