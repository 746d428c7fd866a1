"""How many fresh items and uses there were: counted, never computed."""

from dataclasses import dataclass

__all__ = ["Counts"]


@dataclass(frozen=True)
class Counts:
    """Counts of an echo so far.

    Attributes:
      fresh: Items taken from the upstream stage.
      uses: Items emitted downstream.
      repeats: Those of the uses that were not the first of their item.
    """

    fresh: int = 0
    uses: int = 0
    repeats: int = 0
