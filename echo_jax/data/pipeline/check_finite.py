"""Detects fresh items with NaN or infinity, and refuses or replaces them.

An item is a function of its index in the stream, so any thread or worker may make it.
Dropping a bad item would move all later items. So the item at the same place in the
next epoch replaces it, or in a later epoch if that item is bad too. The result does not
depend on engine, worker, host or restart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import grain

from echo_jax.echo.bad_items import BadItem, BadItems
from echo_jax.echo.finite import BadItemError, is_finite, what_is_bad

__all__ = ["Checked", "Gather", "RefuseBad", "ReplaceBad", "Replaced", "TakeNote"]

_MOST_EPOCHS = 100


class Replaced(NamedTuple):
    """An element to use, and the bad items that were replaced in it."""

    element: Any
    bad: Sequence[BadItem]


@dataclass(frozen=True)
class Checked:
    """Calls ``otherwise(index, item)`` if the item of a stage is not finite."""

    stage: Callable[[int, Any], Any]
    otherwise: Callable[[int, Any], Any]

    def __call__(self, index: int, item: Any) -> Any:
        made = self.stage(index, item)
        return made if is_finite(made) else self.otherwise(index, made)


@dataclass(frozen=True)
class RefuseBad:
    """Raises `BadItemError` for a bad item, with the number of its record."""

    records: grain.MapDataset

    def __call__(self, index: int, item: Any) -> NoReturn:
        raise BadItemError(
            f"{_bad(self.records, index, item)}; mend the record, or skip such items: "
            "--config.data.max_bad=1 or more, with --config.echo.after=decode, augment "
            "or batch; --config.data.check_finite=False looks for none"
        )


@dataclass(frozen=True)
class ReplaceBad:
    """Replaces a bad item by the finite item at its place in a later epoch.

    Attributes:
      items: Unchecked items by their index in the stream.
      records: Record numbers by the same index.
      num_records: Number of records in an epoch.
    """

    items: grain.MapDataset
    records: grain.MapDataset
    num_records: int

    def __call__(self, index: int, item: Any) -> Replaced:
        bad = _bad(self.records, index, item)
        for epoch in range(1, _MOST_EPOCHS + 1):
            other = self.items[index + epoch * self.num_records]
            if is_finite(other):
                return Replaced(other, (bad,))
        raise BadItemError(
            f"{bad}; neither is finite what has its place in the {_MOST_EPOCHS} epochs "
            "after it, and could be used instead; mend the records"
        )


def _bad(records: grain.MapDataset, index: int, item: Any) -> BadItem:
    record: Any = records[int(index)]
    return BadItem(int(index), int(record), what_is_bad(item))


@dataclass(frozen=True)
class Gather:
    """Gathers items to one element, which is `Replaced` if any item is."""

    gather: Callable[[Sequence[Any]], Any]

    def __call__(self, items: Sequence[Any]) -> Any:
        bad = [each for item in items if type(item) is Replaced for each in item.bad]
        if not bad:
            return self.gather(items)
        items = [item.element if type(item) is Replaced else item for item in items]
        return Replaced(self.gather(items), bad)


@dataclass(frozen=True)
class TakeNote:
    """Reports bad items in the training process; returns the element to use."""

    bad_items: BadItems

    def __call__(self, element: Any) -> Any:
        if type(element) is Replaced:
            self.bad_items.add(element.bad)
            return element.element
        return element
