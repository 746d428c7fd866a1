"""Counts of uses, and tags that identify a use."""

from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Counts", "UseInfo"]


@dataclass(frozen=True)
class Counts:
    """Counts of an echo so far.

    Attributes:
      fresh: Items taken from the upstream stage.
      uses: Items emitted downstream.
      repeats: Uses that were not the first use of their item.
    """

    fresh: int = 0
    uses: int = 0
    repeats: int = 0


class UseInfo(NamedTuple):
    """Identifies an output: the item, and the number of its use.

    Attributes:
      fresh_index: Index of the item in the upstream: an int, or ``int64[B]``.
      repeat: 0 for the first use of the item, then 1, 2, ...: an int, or ``int32[B]``.
    """

    fresh_index: Any
    repeat: Any
