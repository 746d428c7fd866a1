"""What a plan is: a state machine over integers that decides an echo.

A plan says which fresh items are taken, in which slot of a store they are kept, and
which slots make up the next batch. It knows neither arrays of data nor frameworks, so
one plan serves every store. Items come in lanes, see `echo_jax.echo.plans.lanes`; on
the host there is one.
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
    """How many more rows of every lane the next uses want.

    Attributes:
      must: Rows without which there are no next uses.
      may: Rows beside them that are welcome if they are ready, and can wait.
    """

    must: int = 0
    may: int = 0


@dataclass(slots=True)
class BatchIndices:
    """Uses that a store reads together, lane by lane.

    Attributes:
      slots: The slot of every use in its lane, ``int32[G, n]``.
      fresh_index: Fresh index of every use, over all lanes, ``int64[G, n]``.
      repeat: Which use of its item it is, from 0, ``int32[G, n]``.
      last: Whether its slot is free afterwards, ``bool[G, n]``; None if slots are
        never free, only written anew.
    """

    slots: np.ndarray
    fresh_index: np.ndarray
    repeat: np.ndarray
    last: np.ndarray | None = None


# One use: its slot, its fresh index, which use of its item it is, and whether its slot
# is free afterwards. A plain tuple: one is made for every use.
Use = tuple[int, int, int, bool]


class Restored(NamedTuple):
    """What a store has to hold again when a plan has gone to a state.

    Attributes:
      first: The first row of every lane that has to be read again.
      slots: Where that row and those after it go, ``int32[G, n]``; ``num_slots`` for
        rows that need not be kept.
      pending: Uses that were decided and not all handed out: those that are left.
    """

    first: int
    slots: np.ndarray
    pending: Sequence[Use] = ()


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

    Attributes:
      num_slots: Slots of each lane.
      batch: Uses of each lane that make a batch, b.
      max_batches: The most batches that a feed on the devices may ask for together.
      batches_ahead: Batches that `next` may be asked for at once, whatever was needed:
        those that follow from what is written are decided.
      unit: Uses that are decided together where they are handed out one at a time.
      is_identity: Whether every item is used once, in its order.
    """

    num_slots: int
    batch: int
    max_batches: int
    batches_ahead: int
    unit: int
    is_identity: bool

    def counts(self, pending: int = 0) -> Counts:
        """Returns the fresh items taken, and the uses and repeats handed out.

        They are those of all lanes.

        Args:
          pending: How many of the latest uses of each lane were not handed out.
        """
        ...

    def need(self, uses: int, pending: int = 0) -> Need:
        """Returns how many rows the next uses want.

        Args:
          uses: Of each lane.
          pending: How many of the latest uses of each lane were not handed out; they
            will be, before these. The slots of all others may be written to now.
        """
        ...

    def write(self, rows: int) -> np.ndarray:
        """Takes rows in.

        Args:
          rows: At most as many as `need` named.

        Returns:
          Their slots, ``int32[G, n]``: n is below ``rows`` where the slots for the
          others become free with the next uses only.
        """
        ...

    def next(self, uses: int) -> BatchIndices | None:
        """Decides the next uses; all that were decided before are handed out.

        Args:
          uses: At most so many of each lane, or ``batches_ahead`` batches.

        Returns:
          The uses: fewer where only these can be read from what is written, or at the
          end of the stream; None after it. Of several batches, whole ones.
        """
        ...

    def run(self) -> list[Use]:
        """Decides uses that are handed out one at a time, of one lane.

        Returns:
          The next uses, after `need` was asked for `unit` of them; none at the end.
        """
        ...

    def end(self, rows: int) -> None:
        """Says that the upstream has ``rows`` more rows of each lane, and no others."""
        ...

    def anchor(self) -> int:
        """Returns the row of a lane that `Restored.first` is of a restored state.

        It is that of the latest state, or of the latest `need` if that is newer.
        """
        ...

    def oldest(self) -> int:
        """Returns the oldest row of a lane that a restore has to read again.

        It is the anchor, or a later one, with no row in use between.
        """
        ...

    def next_anchor(self, row: int) -> int:
        """Returns the first row from ``row`` on where reading again may begin."""
        ...

    def get_state(self, pending: int = 0) -> dict[str, Any]:
        """Returns the state, of JSON types.

        Args:
          pending: How many of the latest uses of each lane were not handed out.
        """
        ...

    def check_state(self, state: Any) -> None:
        """Refuses what is not a state of this plan, and changes nothing.

        Raises:
          ValueError: It is damaged, or was saved with another plan.
        """
        ...

    def set_state(self, state: Mapping[str, Any]) -> Restored:
        """Goes to a state that `check_state` accepts."""
        ...


def in_turn(batch: BatchIndices | None) -> list[Use]:
    """Returns the uses of one lane one by one."""
    if batch is None:
        return []
    last = np.zeros_like(batch.repeat, bool) if batch.last is None else batch.last
    columns = (batch.slots, batch.fresh_index, batch.repeat, last)
    return list(zip(*(each[0].tolist() for each in columns), strict=True))


def check_state_keys(state: Any, keys: set[str], what: str) -> None:
    """Refuses a state that has other keys, or numbers that are no natural ones.

    Args:
      state: What somebody gave.
      keys: Those of the state. Every value but ``"log"`` is an integer of at least -1.
      what: Whose state it is to be.

    Raises:
      ValueError: It is not such a state.
    """
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
