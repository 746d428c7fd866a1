"""The protocol of a plan: a state machine over integers that decides an echo.

A plan decides which fresh items are taken, which slots of a store keep them, and which
slots make up the next batch. It knows neither arrays of data nor frameworks, so one
plan serves every store. Items come in lanes (`echo_jax.echo.plans.lanes`); on the host
there is one lane.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from echo_jax.echo.stats import Counts


class Need(NamedTuple):
    """The number of further rows of every lane that the next decision needs."""

    must: int = 0  # without which the next uses are impossible
    may: int = 0  # that are taken if they are ready
    then: int = 0  # after these, which must be known to come, but are not taken


@dataclass(slots=True)
class Uses:
    """Which rows of batches are which use of which item, lane by lane, in order.

    The arrays of a single lane may have no axis of lanes.
    """

    slots: np.ndarray  # slot of every use in its lane, int32[G, n]
    fresh_index: np.ndarray  # of its item, over all lanes, int64[G, n]
    repeat: np.ndarray  # number of the use of its item, from 0, int32[G, n]
    # Whether the slot is free afterwards, bool[G, n]; None if slots are never free, but
    # only overwritten.
    last: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Uses of each lane, n."""
        return self.repeat.shape[-1]

    def __getitem__(self, where: Any) -> "Uses":
        """Returns the uses of some lanes, at some places: ``uses[lanes, places]``."""
        last = None if self.last is None else self.last[where]
        slots, index = self.slots[where], self.fresh_index[where]
        return Uses(slots, index, self.repeat[where], last)

    @classmethod
    def none(cls, num_lanes: int = 1) -> "Uses":
        index = np.zeros((num_lanes, 0), np.int64)
        return cls(index.astype(np.int32), index, index.astype(np.int32))


class Decision(NamedTuple):
    """Uses that are decided, and the rows that have to be written before them."""

    uses: Uses
    # The rows of each lane that a use needs, of those ever written: at least, and at
    # most as long as no slot is written before its last use. Both int64[n].
    rows: np.ndarray
    most: np.ndarray
    slots: np.ndarray  # of the next rows, int32[G, r]

    def rows_for(self, start: int, stop: int) -> int:
        """Returns the rows that must be written before some uses are read together."""
        rows = int(self.rows[stop - 1])
        if rows > self.most[start]:
            raise AssertionError("an echo plan ran out of slots; this is a bug")
        return rows

    @classmethod
    def at_once(cls, uses: Uses, written: int, slots: np.ndarray) -> "Decision":
        """Returns a decision whose rows are all written before the first use."""
        rows = np.full(uses.size, written)
        return cls(uses, rows, rows, slots)


class Restored(NamedTuple):
    """The rows that a store must hold again after a plan went to a state."""

    first: int  # the first row of every lane that has to be read again
    # Slots of that row and the rows after it, int32[G, n]; `num_slots` for rows that
    # are not kept.
    slots: np.ndarray
    pending: Uses | None = None  # that were decided and not handed out


class Plan(Protocol):
    """Decides an echo; `outputs_of` shows how it is run."""

    num_slots: int
    batch: int  # uses of each lane in a batch, b
    max_batches: int  # that a device feed may ask for together, at most
    row: int  # rows of each lane that were taken in
    goes_on = False  # whether a later pass over the upstream keeps the items in use

    def need(self, uses: int) -> Need:
        """Returns the rows that must be at hand before the next uses are decided."""
        return Need()

    def decide(self, uses: int, rows: int) -> Decision | None:
        """Decides the next uses of each lane; None after the end."""
        # ``rows`` are taken in, as many as `need` said. It decides more uses if that
        # is cheap, and fewer before the end. Several batches are always whole.
        ...

    def settle(self, uses: int, row: int) -> None:
        """Notes how many of the decided uses were handed out, and the rows written."""
        ...

    def counts(self, uses: int) -> Counts:
        """Returns the counts over all lanes after some of the decided uses."""
        ...

    def end(self, rows: int) -> None:
        """Tells that the upstream has ``rows`` more rows; what is decided is void."""
        ...

    def of_epoch(self, number: int, fresh: int, uses: int) -> "Plan":
        """Returns the plan of a later pass over the upstream, in the same slots."""
        # Earlier passes had ``fresh`` rows of each lane and ``uses`` over all lanes.
        # Its rows are counted from 0 again, unless ``goes_on``.
        ...

    def anchor(self) -> int:
        """Returns `Restored.first` of the settled state, or of an earlier one."""
        ...

    def next_anchor(self, row: int) -> int:
        """Returns the first row from ``row`` on where reading again may begin."""
        ...

    def get_state(self) -> dict[str, Any]:
        """Returns the settled state, of JSON types."""
        ...

    def check_state(self, state: Any) -> None:
        """Raises ValueError for a foreign state; `set_state` refuses damaged ones."""
        ...

    def set_state(self, state: Mapping[str, Any]) -> Restored:
        """Goes to a state; ValueError if it cannot be, which changes nothing."""
        self.check_state(state)
        plan = copy.copy(self)
        try:
            restored = plan._go_to(state)
            found = plan.get_state()
            # The text of a log may differ between builds of zlib.
            if any(found[key] != state[key] for key in found if key != "log"):
                raise ValueError(f"it comes back as {found!r:.300}")
        except (AssertionError, IndexError, ValueError) as error:
            raise damaged(state) from error
        vars(self).update(vars(plan))
        return restored

    def _go_to(self, state: Mapping[str, Any]) -> Restored:
        """Goes to a state that `check_state` accepts; replaces what it changes."""
        ...


def outputs_of(
    plan: Plan, total: int, uses: int, ready: Callable[[], bool] = lambda: False
) -> Iterator[tuple[np.ndarray, Uses]]:
    """Runs a plan without a store, over an upstream of ``total`` rows for each lane.

    Yields the slots of the rows that are written before an output, ``int32[G, r]``, and
    the ``uses`` of each lane in it, fewer at the end. ``ready`` returns whether
    optional rows are at hand.
    """
    decision, at = None, 0
    first = row = plan.row
    while True:
        if decision is None or at + uses > decision.uses.size:
            first, (must, may, then) = row, plan.need(uses)
            rows = must or (may if may and ready() else 0)
            if row + rows + then > total:
                plan.end(total - row)
                rows = min(rows, total - row)
            decision, at = plan.decide(uses, rows), 0
            if decision is None:
                return
        stop = min(at + uses, decision.uses.size)
        after = max(row, decision.rows_for(at, stop))
        if after > total:
            plan.settle(at, row)
            plan.end(total - row)
            decision = None
            continue
        slots = decision.slots[:, row - first : after - first]
        plan.settle(stop, after)
        yield slots, decision.uses[:, at:stop]
        at, row = stop, after


def check_keys(state: Any, keys: set[str], what: str) -> None:
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


def check_origin(found: int, fingerprint: int, spec: object) -> None:
    """Raises ValueError unless a state was saved with this fingerprint."""
    if found != fingerprint:
        raise ValueError(
            f"this state was saved with another spec than {spec}, with other options "
            "(items, lanes, rows of a host batch), or by another version of the "
            "orders; restore it with what it was saved with"
        )


def damaged(state: Mapping[str, Any]) -> ValueError:
    return ValueError(
        f"the numbers of this state do not fit together: {dict(state)!r:.500}; it is "
        "damaged"
    )


def stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns ``np.stack`` of arrays, in a tenth of the time for one array."""
    return arrays[0][None] if len(arrays) == 1 else np.stack(arrays)
