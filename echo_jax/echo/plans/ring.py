"""Plans whose lanes always hold their last items, each in a ring of slots.

Item i of a lane is in slot i mod ``num_slots``, until item i + ``num_slots`` comes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.plans.base import Restored, Uses, check_state_keys
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AdaptiveSpec, StochasticSpec

__all__ = ["RingPlan"]


class RingPlan:
    """The common part of adaptive and stochastic plans: all but their decisions."""

    max_batches = 1

    def __init__(
        self,
        spec: AdaptiveSpec | StochasticSpec,
        lanes: Lanes,
        *,
        num_slots: int,
        rows: int,
        fingerprint: int,
    ):
        # ``rows`` fresh items come together in a lane.
        self._spec, self._lanes, self._fingerprint = spec, lanes, fingerprint
        self.batch = spec.batch_size // lanes.count
        self.num_slots, self._rows = num_slots, rows
        self._start()

    def _start(self) -> None:
        self._written = 0  # items of a lane
        self._used = self._repeats = 0
        # The repeats of the uses that were decided last, and how many of these uses are
        # not handed out.
        self._latest = np.zeros((len(self._lanes.own), 0), np.int32)
        self._pending = 0
        self._left: int | None = None  # rows that will still come, once known

    @property
    def row(self) -> int:
        return self._written

    def counts(self, uses: int) -> Counts:
        fresh, pending = self._written * len(self._lanes.own), self._latest[:, uses:]
        repeats = self._repeats - int(np.count_nonzero(pending))
        return Counts(fresh, self._used - pending.size, repeats)

    def settle(self, uses: int, row: int) -> None:
        self._pending = self._latest.shape[1] - uses

    def end(self, rows: int) -> None:
        self._left = rows

    def anchor(self) -> int:
        """Returns the first item that came together with the oldest one held."""
        return max(0, self._written - self.num_slots) // self._rows * self._rows

    def oldest(self) -> int:
        return self.anchor()

    def next_anchor(self, row: int) -> int:
        return -(-row // self._rows) * self._rows

    def _take(self, rows: int) -> np.ndarray:
        """Takes in rows; returns their slots, ``int32[G, n]``."""
        first = self._written
        self._written += rows
        if self._left is not None:
            self._left -= rows
        return self._slots_from(first)

    def _slots_from(self, first: int) -> np.ndarray:
        """Returns the slots of all items from one on, writable."""
        slots = self._slots(np.arange(first, self._written))
        return np.tile(slots, (len(self._lanes.own), 1))

    def _slots(self, items: np.ndarray) -> np.ndarray:
        return (items % self.num_slots).astype(np.int32)

    def _uses_of(self, items: np.ndarray, repeat: np.ndarray) -> Uses:
        return Uses(self._slots(items), self._lanes.global_index(items), repeat)

    def _restored(self, latest: Uses | None, pending: int) -> Restored:
        """Returns what a state holds, and the last uses of the latest batch."""
        left = Uses.none(len(self._lanes.own))
        if latest is not None and pending:
            left = latest[:, -pending:]
        self._latest, self._pending = left.repeat, pending
        # ``num_slots`` stands for items that are not held any more.
        first = self.anchor()
        slots = self._slots_from(first)
        slots[:, : max(0, self._written - self.num_slots) - first] = self.num_slots
        return Restored(first, slots, left)

    def _check(self, state: Any, keys: set[str], what: str) -> Mapping[str, Any]:
        """Returns a state that has these keys and is of this plan."""
        check_state_keys(state, keys, what)
        if state["plan"] != self._fingerprint:
            raise ValueError(
                f"this state was saved with another spec than {self._spec}, or with "
                "other options (items, lanes, rows of a host batch); restore "
                "it with what it was saved with"
            )
        return state
