"""Counts of uses, and tags that identify a use."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Counts:
    """Counts so far: ``fresh`` items taken, their ``uses``, and ``repeats`` of them."""

    fresh: int = 0
    uses: int = 0
    repeats: int = 0


class UseInfo(NamedTuple):
    """Identifies a use: the index of its item in the upstream, and its number from 0.

    Both are integers, or for a batch ``int64[B]`` and ``int32[B]``.
    """

    fresh_index: Any
    repeat: Any
