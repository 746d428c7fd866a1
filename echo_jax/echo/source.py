"""The upstream of an echo: reads its values, and always knows its position.

Nothing that the upstream gave is lost or counted twice. An error is raised, and never
becomes an end. After a read that was interrupted at an unknown place, the source
refuses to go on.
"""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice, repeat, starmap
from typing import Any, Protocol

__all__ = ["INTERRUPTED", "AsItIs", "Element", "Intake", "Source", "is_resumable"]

# One element: the result of `prepare` for a value, and the first and the end of its
# rows. It is a plain tuple because one is made for every item.
Element = tuple[Any, int, int]


class Intake(Protocol):
    """Prepares values when they are read; ``in_bulk`` allows several rows at once."""

    @property
    def in_bulk(self) -> bool: ...

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns the elements of some values; called in the thread that reads."""
        # An error here is final.
        ...


class AsItIs:
    """Keeps values as they are, each as one row."""

    in_bulk = True

    def prepare(self, values: list[Any]) -> list[Element]:
        return [(value, 0, 1) for value in values]


INTERRUPTED = InterruptedError("it was interrupted in the middle")


class Source:
    """The upstream and its position; used by one thread at a time."""

    def __init__(
        self,
        iterator: Iterator[Any],
        intake: Intake,
        next_anchor: Callable[[int], int] | None,
    ):
        self.iterator: Any = iterator
        # The next row, and the state before it if needed: both change in one step.
        self.upcoming: tuple[int, Any] = (0, None)
        self.started = self.ended = False
        # Why the position is unknown. The caller resets it when it has kept the values.
        self.lost: BaseException | None = None
        # Calls ``next`` in code that no signal can interrupt.
        self._values = starmap(self.iterator.__next__, repeat(()))
        self._intake = intake
        self._next_anchor = next_anchor
        # The first row whose state may be needed later.
        self._unsaved: float = math.inf
        self._failed: Exception | None = None  # by the upstream, in its last read
        self._is_told = True

    def start(self) -> None:
        """Saves the state before the first row."""
        self.upcoming = (0, self._state_at(0) if self._next_anchor else None)
        self.started = True

    def pull(self, count: int) -> list[Any]:
        """Returns the next ``count`` values, or fewer before an end or an error."""
        # If the upstream fails after some values, these are returned, and the next call
        # raises. An error is raised once; the call after it asks the upstream again.
        if self._failed is not None or self.lost is not None:
            self._check()
        failed, values = self._failed, []
        self.lost = INTERRUPTED
        try:
            # Takes values and keeps them; no signal can come in between.
            values.extend(islice(self._values, count))
        except Exception as error:
            self._failed, self._is_told = error, not values
            if not values:
                self.lost = None
                raise
            return values
        if failed is not None:
            if not values:
                self.lost = failed
                raise RuntimeError(
                    "the upstream of this echo failed, and then ended: it does not go "
                    "on after an error; go to a saved state, or start anew"
                ) from failed
            self._failed = None
        self.ended = len(values) < count
        return values

    def _check(self) -> None:
        if self.lost is not None:
            raise RuntimeError(
                "the last read of the upstream was interrupted, or its element was "
                "refused, so it is not known which item comes next; go to a saved "
                "state, or start anew"
            ) from self.lost
        if self._failed is not None and not self._is_told:
            self._is_told = True
            raise self._failed

    def read(self, count: int) -> list[Element]:
        """Returns at most ``count`` next elements; none at the end."""
        intake, (first, _) = self._intake, self.upcoming
        if not intake.in_bulk:
            count = 1
        elif first + count > self._unsaved:
            # The state before a row is saved between two reads.
            count = max(int(self._unsaved) - first, 1)
        values = self.pull(count)
        if not values:
            return values
        try:
            elements = intake.prepare(values)
        except BaseException as error:
            self.lost = error
            raise
        row = first + sum(end for _, _, end in elements)
        self.upcoming = (row, self._state_at(row) if row >= self._unsaved else None)
        return elements

    def state(self) -> Any:
        """Returns a copy of the upstream's state."""
        return copy.deepcopy(self.iterator.get_state())

    def _state_at(self, row: int) -> Any:
        """Returns the upstream's state before a row that a restore may go back to."""
        assert self._next_anchor is not None
        state = self.state()
        self._unsaved = self._next_anchor(row + 1)
        return state

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.lost = INTERRUPTED
        self.iterator.set_state(copy.deepcopy(state))
        self.upcoming = (row, copy.deepcopy(state))
        if self._next_anchor is not None:
            self._unsaved = self._next_anchor(row + 1)
        self.started, self.ended, self._is_told = True, False, True
        self._failed = self.lost = None


def is_resumable(iterator: Any) -> bool:
    """Returns whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )
