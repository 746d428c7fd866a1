"""Fresh items that are not finite, and what takes their places.

An item is a function of its index in the stream, so that any thread or worker of any
process may make it. So a bad one is not left out, which would move all that follow it:
the item of the same place in the next epoch takes its place, or in a later one if that
is bad, too. What is used then depends on no engine, worker, host or restart.
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
    """An element of which some took the places of bad items.

    Attributes:
      element: What is used.
      bad: What is not.
    """

    element: Any
    bad: Sequence[BadItem]


@dataclass(frozen=True)
class Checked:
    """A stage whose items are looked at before they are used.

    Attributes:
      stage: Makes the item of an index.
      otherwise: Is called where it is not finite, and returns what is used.
    """

    stage: Callable[[int, Any], Any]
    otherwise: Callable[[int, Any], Any]

    def __call__(self, index: int, item: Any) -> Any:
        """Returns what the stage makes of an item, or what is used instead."""
        made = self.stage(index, item)
        return made if is_finite(made) else self.otherwise(index, made)


@dataclass(frozen=True)
class RefuseBad:
    """Ends a stream at a bad item.

    Attributes:
      records: The numbers of the records of the stream.
    """

    records: grain.MapDataset

    def __call__(self, index: int, item: Any) -> NoReturn:
        """Refuses the item of an index.

        Raises:
          BadItemError: Always.
        """
        raise BadItemError(
            f"{_bad(self.records, index, item)}; mend the record, or skip such items: "
            "--config.data.max_bad=1 or more, with --config.echo.after=decode, augment "
            "or batch; --config.data.check_finite=False looks for none"
        )


@dataclass(frozen=True)
class ReplaceBad:
    """Puts finite items in the places of others.

    Attributes:
      items: All of them, unchecked, by their index in the stream.
      records: The numbers of their records.
      num_records: In an epoch.
    """

    items: grain.MapDataset
    records: grain.MapDataset
    num_records: int

    def __call__(self, index: int, item: Any) -> Replaced:
        """Returns what takes the place of the item of an index.

        Raises:
          BadItemError: Nothing can.
        """
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
    """Makes one element of many items, some of which may be `Replaced`.

    Attributes:
      gather: Does so for items alone.
    """

    gather: Callable[[Sequence[Any]], Any]

    def __call__(self, items: Sequence[Any]) -> Any:
        """Returns the element, `Replaced` if one of the items is."""
        bad = [each for item in items if type(item) is Replaced for each in item.bad]
        if not bad:
            return self.gather(items)
        items = [item.element if type(item) is Replaced else item for item in items]
        return Replaced(self.gather(items), bad)


@dataclass(frozen=True)
class TakeNote:
    """Hands on what is used, in the process that trains.

    Attributes:
      bad_items: Is told what is not.
    """

    bad_items: BadItems

    def __call__(self, element: Any) -> Any:
        """Returns the element, of a `Replaced` what is used of it."""
        if type(element) is Replaced:
            self.bad_items.add(element.bad)
            return element.element
        return element
