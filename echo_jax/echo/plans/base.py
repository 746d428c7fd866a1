"""The protocol of a plan: a state machine over integers that decides an echo.

A plan decides which fresh items are taken, which slots of a store keep them, and which
slots make up the next batch. It knows neither arrays of data nor frameworks, so one
plan serves every store. Items come in lanes (`echo_jax.echo.plans.lanes`); on the host
there is one lane.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from echo_jax.echo.counts import Counts

__all__ = [
    "BatchIndices",
    "Need",
    "Plan",
    "Restored",
    "Use",
    "check_state_keys",
    "in_turn",
]


class Need(NamedTuple):
    """The number of further rows of every lane that the next uses need.

    Attributes:
      must: Rows without which the next uses are impossible.
      may: Further rows that are taken if they are ready.
    """

    must: int = 0
    may: int = 0


@dataclass(slots=True)
class BatchIndices:
    """Uses that a store reads together, lane by lane.

    Attributes:
      slots: Slot of every use in its lane, ``int32[G, n]``.
      fresh_index: Fresh index of every use, over all lanes, ``int64[G, n]``.
      repeat: Number of the use of its item, from 0, ``int32[G, n]``.
      last: Whether the slot is free afterwards, ``bool[G, n]``; None if slots are never
        free, but only overwritten.
    """

    slots: np.ndarray
    fresh_index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray | None = None

    def of_lanes(self, lanes: Sequence[int]) -> "BatchIndices":
        """Returns the uses of some lanes, for stores that keep all slots."""
        at = list(lanes)
        return BatchIndices(self.slots[at], self.fresh_index[at], self.repeat[at])


# One use: its slot, its fresh index, its repeat, and whether its slot is free
# afterwards. It is a plain tuple because one is made for every use.
Use = tuple[int, int, int, bool]


class Restored(NamedTuple):
    """The rows that a store must hold again after a plan went to a state."""

    first: int  # the first row of every lane that has to be read again
    # Slots of that row and the rows after it, int32[G, n]; `num_slots` for rows that
    # are not kept.
    slots: np.ndarray
    pending: Sequence[Use] = ()  # that were decided and not handed out


class Plan(Protocol):
    """Decides an echo.

    A driver runs any plan like this::

        need = plan.need(n)
        rows = take(upstream, need.must or (need.may if they are ready))
        if fewer rows came:
            plan.end(how many came)
        store.write(plan.write(rows), rows)
        batch = plan.next(n)
        output(store.read(batch.slots), batch.fresh_index, batch.repeat)

    In every method, ``pending`` is the number of the latest uses of each lane that were
    decided and not handed out.

    Attributes:
      batch: Uses of each lane in a batch, b.
      max_batches: The most batches that a device feed may ask for together.
      batches_ahead: The most batches that `next` may be asked for at once.
      unit: Uses that are decided together if they are handed out one at a time.
      is_identity: Whether every item is used once, in order.
    """

    num_slots: int
    batch: int
    max_batches: int
    batches_ahead: int
    unit: int
    is_identity: bool

    def counts(self, pending: int = 0) -> Counts:
        """Returns the counts over all lanes, of the uses that were handed out."""
        ...

    def need(self, uses: int, pending: int = 0) -> Need:
        """Returns the rows that the next uses of each lane need."""
        # They come after the pending uses. The slots of uses that are not pending may
        # be written to from now on.
        ...

    def write(self, rows: int) -> np.ndarray:
        """Takes in at most `need` rows; returns their slots, ``int32[G, n]``."""
        # n is below ``rows`` if the next uses have to free the other slots first.
        ...

    def next(self, uses: int) -> BatchIndices | None:
        """Decides up to ``uses`` uses of each lane; None after the end."""
        # It returns fewer uses if the others need unwritten rows, and at the end.
        # Several batches are always whole. All uses decided before count as handed out.
        ...

    def run(self) -> list[Use]:
        """Decides the next uses of one lane, for one at a time; none at the end."""
        # `need` was asked for `unit` uses before.
        ...

    def end(self, rows: int) -> None:
        """Tells the plan that the upstream has ``rows`` more rows of each lane."""
        ...

    def anchor(self) -> int:
        """Returns `Restored.first` of the latest state, or of a newer `need`."""
        ...

    def oldest(self) -> int:
        """Returns the oldest row that a restore reads: the anchor or a later one."""
        ...

    def next_anchor(self, row: int) -> int:
        """Returns the first row from ``row`` on where reading again may begin."""
        ...

    def get_state(self, pending: int = 0) -> dict[str, Any]:
        """Returns the state, of JSON types."""
        ...

    def check_state(self, state: Any) -> None:
        """Raises ValueError for a damaged or foreign state; changes nothing."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> Restored:
        """Goes to a state that `check_state` accepts."""
        ...


def in_turn(batch: BatchIndices | None) -> list[Use]:
    """Returns the uses of a batch of one lane, one by one."""
    if batch is None:
        return []
    last = np.zeros_like(batch.repeat, bool) if batch.last is None else batch.last
    columns = (batch.slots, batch.fresh_index, batch.repeat, last)
    return list(zip(*(each[0].tolist() for each in columns), strict=True))


def check_state_keys(state: Any, keys: set[str], what: str) -> None:
    """Raises ValueError unless a state has these keys, and integers of at least -1."""
    if not isinstance(state, Mapping) or set(state) != keys:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else repr(state)
        raise ValueError(
            f"{found} is not the state of {what}; give what get_state returned: "
            f"{', '.join(sorted(keys))}"
        )
    for key in sorted(keys - {"log", "lanes"}):
        if type(state[key]) is not int or state[key] < -1:
            raise ValueError(
                f"the state of {what} has {key}={state[key]!r:.40}, which must be an "
                "integer of at least -1; it is damaged"
            )
