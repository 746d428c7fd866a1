"""The upstream of an echo: reads values of it, and always knows where it stands.

Whatever the upstream does, nothing that it gave is lost or counted twice: an error is
told and no end is made of it, and a read that was interrupted at a place that nobody
can know is not gone on from.
"""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice, repeat, starmap
from typing import Any, Protocol

__all__ = ["AsItIs", "Element", "Intake", "Source", "is_resumable"]

# What was read: what `prepare` made of a value, and the first and the end of its rows
# that are meant. A plain tuple: one is made for every item.
Element = tuple[Any, int, int]


class Intake(Protocol):
    """What is done with a value of the upstream as soon as it is read.

    Attributes:
      in_bulk: Whether every value is one row, and more of them may be read before
        they are prepared.
    """

    @property
    def in_bulk(self) -> bool: ...  # noqa: D102

    def prepare(self, values: list[Any]) -> list[Element]:
        """Returns what is kept of some values; called in the thread that reads.

        Raises:
          Exception: A value cannot be kept, which is final.
        """
        ...


class AsItIs:
    """Keeps values as they are, each of them one row."""

    in_bulk = True

    def prepare(self, values: list[Any]) -> list[Element]:
        """See `Intake`."""
        return [(value, 0, 1) for value in values]


_INTERRUPTED = InterruptedError("it was interrupted in the middle")


class Source:
    """The upstream, and how far it is read; used by one thread at a time.

    Attributes:
      iterator: The upstream.
      started: Whether that before the first row is known.
      upcoming: The number of the next row, and the upstream's state before it, if it
        may be gone back to; else None. One pair, so that both change in one step.
      ended: Whether the upstream has no more.
      lost: Why nobody knows where the upstream stands; None where it is known. To be
        set to None once what was read is kept.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        intake: Intake,
        next_anchor: Callable[[int], int] | None,
    ):
        self.iterator: Any = iterator
        self.upcoming: tuple[int, Any] = (0, None)
        self.started = self.ended = False
        self.lost: BaseException | None = None
        # What ``next`` gives, by code that no signal can interrupt.
        self._values = starmap(self.iterator.__next__, repeat(()))
        self._intake = intake
        self._next_anchor = next_anchor
        # The first row whose state may be needed later.
        self._unsaved: float = math.inf
        self._failed: Exception | None = None  # by the upstream, in its last read
        self._is_told = True

    def start(self) -> None:
        """Looks at the state before the first row."""
        self.upcoming = (0, self._state_at(0) if self._next_anchor else None)
        self.started = True

    def pull(self, count: int) -> list[Any]:
        """Returns what the upstream gives next, fewer values before its end.

        Where the upstream fails after some values, these are returned, and the next
        call raises. An error is told once, and then the upstream is asked again.

        Raises:
          Exception: What the upstream raised.
          RuntimeError: What comes next cannot be known any more.
        """
        if self._failed is not None or self.lost is not None:
            self._check()
        failed, values = self._failed, []
        self.lost = _INTERRUPTED
        try:
            # Takes values and keeps them, with no place for a signal in between.
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
        """Returns the next elements, at most so many; none at the end.

        Raises:
          Exception: See `pull`. Or what is wrong with an element, which is final.
        """
        intake, (first, _) = self._intake, self.upcoming
        if not intake.in_bulk:
            count = 1
        elif first + count > self._unsaved:
            # The state before a row is looked at between two reads.
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
        """Returns the upstream's state now."""
        return copy.deepcopy(self.iterator.get_state())

    def _state_at(self, row: int) -> Any:
        """Returns the upstream's state now, before a row that may be gone back to."""
        assert self._next_anchor is not None
        state = self.state()
        self._unsaved = self._next_anchor(row + 1)
        return state

    def restore(self, state: Any, row: int) -> None:
        """Goes back to a state, the one before a row."""
        self.lost = _INTERRUPTED
        self.iterator.set_state(copy.deepcopy(state))
        self.upcoming = (row, copy.deepcopy(state))
        if self._next_anchor is not None:
            self._unsaved = self._next_anchor(row + 1)
        self.started, self.ended, self._is_told = True, False, True
        self._failed = self.lost = None


def is_resumable(iterator: Any) -> bool:
    """Whether an iterator has ``get_state`` and ``set_state``."""
    return all(
        callable(getattr(iterator, name, None)) for name in ("get_state", "set_state")
    )
