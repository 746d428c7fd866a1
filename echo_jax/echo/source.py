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

# The result of `prepare` for one or more values, and the first and the end of its rows.
# It is a plain tuple because one is made for every item.
Element = tuple[Any, int, int]


class Intake(Protocol):
    """Prepares values when they are read; ``in_bulk`` allows several at once."""

    @property
    def in_bulk(self) -> bool: ...

    def prepare(self, values: list[Any]) -> tuple[Any, int]:
        """Returns some values prepared, and their rows; called where they are read."""
        # An error here is final.
        ...


INTERRUPTED = InterruptedError("it was interrupted in the middle")


class Source:
    """The upstream and its position; used by one thread at a time."""

    def __init__(
        self,
        iterator: Iterator[Any],
        intake: Intake | None = None,
        next_anchor: Callable[[int], int] | None = None,
    ):
        # Without an intake every value is one row, as it is.
        self.iterator: Any = iterator
        self.row = 0  # the next one
        self._is_exhausted = False
        # Why the position is unknown. The caller resets it when it has kept the values.
        self.lost: BaseException | None = None
        # Calls ``next`` in code that no signal can interrupt.
        self._values = starmap(self.iterator.__next__, repeat(()))
        self._intake = intake
        self.next_anchor = next_anchor
        # The first row whose state may be needed later.
        self._unsaved: float = math.inf
        self._failed: Exception | None = None  # by the upstream, in its last read
        self._untold: Exception | None = None

    def pull(self, count: int) -> list[Any]:
        """Returns the next ``count`` values, or fewer before an end or an error."""
        # If the upstream fails after some values, these are returned, and the next call
        # raises. An error is raised once; the call after it asks the upstream again.
        if self.lost is not None:
            raise self.unknown_place() from self.lost
        if self._untold is not None:
            error, self._untold = self._untold, None
            raise error
        failed, values = self._failed, []
        self.lost = INTERRUPTED
        try:
            # Takes values and keeps them; no signal can come in between.
            values.extend(islice(self._values, count))
        except Exception as error:
            self._failed = error
            if not values:
                self.lost = None
                raise
            self._untold = error
            return values
        if failed is not None:
            if not values:
                self.lost = failed
                raise RuntimeError(
                    "the upstream of this echo failed, and then ended: it does not go "
                    "on after an error; go to a saved state, or start anew"
                ) from failed
            self._failed = None
        self._is_exhausted = len(values) < count
        return values

    @property
    def ended(self) -> bool:
        """Whether the upstream has ended, and all of its values are kept."""
        return self._is_exhausted and self.lost is None

    def unknown_place(self) -> RuntimeError:
        """Returns the error of a read that was interrupted or refused."""
        return RuntimeError(
            "the last read of the upstream was interrupted, or its element was "
            "refused, so it is not known which item comes next; go to a saved state, "
            "or start anew"
        )

    def read(self, count: int) -> list[tuple[Any, int, int, Any]]:
        """Returns at most ``count`` next values, or nothing at the end.

        They are one element with its first row, its end, and the state of the upstream
        after it, or None if no restore needs this state.
        """
        intake, first = self._intake, self.row
        if intake is None or not intake.in_bulk:
            count = 1
        elif first + count > self._unsaved:
            # The state before a row is saved between two reads.
            count = max(int(self._unsaved) - first, 1)
        values = self.pull(count)
        if not values:
            return values
        try:
            value, rows = intake.prepare(values) if intake else (values[0], 1)
        except BaseException as error:
            self.lost = error
            raise
        self.row = end = first + rows
        state = self.state_at(end) if end >= self._unsaved else None
        return [(value, first, end, state)]

    def state(self) -> Any:
        """Returns a copy of the upstream's state."""
        return copy.deepcopy(self.iterator.get_state())

    def state_at(self, row: int) -> Any:
        """Returns the upstream's state before a row that a restore may go back to."""
        assert self.next_anchor is not None
        state = self.state()
        self._unsaved = self.next_anchor(row + 1)
        return state

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.lost = INTERRUPTED
        self.iterator.set_state(copy.deepcopy(state))
        self.row = row
        if self.next_anchor is not None:
            self._unsaved = self.next_anchor(row + 1)
        self._is_exhausted = False
        self._failed = self._untold = self.lost = None


def is_resumable(iterator: Any) -> bool:
    """Returns whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )
