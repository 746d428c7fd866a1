"""Plans whose lanes always hold their last items, each in a ring of slots.

Item i of a lane is in slot i mod ``num_slots``, until item i + ``num_slots`` comes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.keys import fingerprint
from echo_jax.echo.plans.base import Plan, Restored, Uses, check_keys, check_origin
from echo_jax.echo.plans.lanes import Lanes
from echo_jax.echo.spec import AdaptiveSpec, StochasticSpec, completed
from echo_jax.echo.stats import Counts


class RingPlan(Plan):
    """The common part of adaptive and stochastic plans: all but their decisions."""

    def __init__(
        self,
        spec: AdaptiveSpec | StochasticSpec,
        *,
        lanes: Lanes | None = None,
        max_batches: int = 1,
        options: tuple[object, ...] = (),
    ):
        # ``options`` shape the sequence, too.
        spec, self._options = completed(spec), options
        self._spec, self._lanes = spec, lanes or Lanes(spec.batch_size)
        self._lanes.check(batch_size=spec.batch_size)
        self.batch = spec.batch_size // self._lanes.count
        self.max_batches = max_batches
        # Items of a lane that may be used again.
        self._memory = spec.buffer // self._lanes.count
        self.num_slots = self._memory + (max_batches - 1) * self.batch
        self._fingerprint = fingerprint(*self._origin(), *options)
        self._start()

    def _origin(self) -> tuple[object, ...]:
        """Returns what decides the sequence; ValueError for what cannot be."""
        raise NotImplementedError

    def _start(self) -> None:
        self.row = 0
        self._used = self._repeats = 0
        # The repeats of the uses that were decided last, and how many of these uses are
        # not handed out.
        self._latest = np.zeros((len(self._lanes.own), 0), np.int32)
        self._pending = 0
        self._left: int | None = None  # rows that will still come, once known

    def counts(self, uses: int) -> Counts:
        fresh, pending = self.row * len(self._lanes.own), self._latest[:, uses:]
        repeats = self._repeats - int(np.count_nonzero(pending))
        return Counts(fresh, self._used - pending.size, repeats)

    def settle(self, uses: int, row: int) -> None:
        self._pending = self._latest.shape[1] - uses

    def end(self, rows: int) -> None:
        self._left = rows

    def anchor(self) -> int:
        # The first item that came together with the oldest one held.
        oldest = max(0, self.row - self.num_slots)
        return oldest - oldest % self._lanes.rows

    def next_anchor(self, row: int) -> int:
        return -(-row // self._lanes.rows) * self._lanes.rows

    def _take(self, rows: int) -> np.ndarray:
        """Takes in rows; returns their slots, ``int32[G, n]``."""
        first = self.row
        self.row += rows
        if self._left is not None:
            self._left -= rows
        return self._slots_from(first)

    def _slots_from(self, first: int) -> np.ndarray:
        """Returns the slots of all items from one on, writable."""
        slots = self._slots(np.arange(first, self.row))
        return slots[None].repeat(len(self._lanes.own), axis=0)

    def _slots(self, items: np.ndarray) -> np.ndarray:
        return (items % self.num_slots).astype(np.int32)

    def _uses_of(self, items: np.ndarray, repeat: np.ndarray) -> Uses:
        return Uses(self._slots(items), self._lanes.global_index(items), repeat)

    def check_state(self, state: Any) -> None:
        check_keys(
            state, {*self.get_state()}, f"an echo of {type(self._spec).__name__}"
        )
        check_origin(state["plan"], self._fingerprint, self._spec)

    def _go_to(self, state: Mapping[str, Any]) -> Restored:
        self._start()
        latest = self._decide_again(state)
        # At least one use of the latest batch was handed out.
        left = latest[:, max(1, latest.size - state["pending"]) :]
        self._latest, self._pending = left.repeat, left.size
        # ``num_slots`` stands for items that are not held any more.
        first = self.anchor()
        slots = self._slots_from(first)
        slots[:, : max(0, self.row - self.num_slots) - first] = self.num_slots
        return Restored(first, slots, left)

    def _decide_again(self, state: Mapping[str, Any]) -> Uses:
        """Makes the batches of a state again from the start; returns the last one."""
        raise NotImplementedError
