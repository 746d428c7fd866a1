"""Stochastic echo: fetch a batch with some probability, else reuse the last items.

It is the form of echo that theory studies. At update t a new batch is fetched with
probability p_t; otherwise data from a memory of the last M items is reused. The source
is "Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data
Parallelism" (ICLR 2025 submission 12780, known to us by its reviews). That work
proposes a p_t that falls over training: fetch often early, echo more later.

The number of uses of an item is random, about Poisson-distributed. The other plans use
items as equally often as they can.

The first batch is fetched. The seed and the number of a later batch alone decide
whether it is fetched, so all lanes and hosts agree. A batch that is not fetched
consists of distinct random items of the last ``buffer`` ones. The stream ends with the
last fetched batch: the plan reads on before it reuses items.
"""

from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.plans.base import Decision, Need, Uses
from echo_jax.echo.plans.lanes import epoch_spec
from echo_jax.echo.plans.ring import RingPlan
from echo_jax.echo.schedule import FetchSchedule
from echo_jax.echo.spec import StochasticSpec

# Goes up whenever the same arguments yield another sequence than before.
_SEQUENCE_VERSION = 2
_LOAD, _REUSE = 0, 1  # the purposes of randomness
_BLOCK = 1024  # batches whose fetches are decided at once
# Ten years at one batch a second. A restore makes all of them again.
_MAX_BATCHES = 1 << 28


class StochasticPlan(RingPlan):
    """The plan of a stochastic echo."""

    _spec: StochasticSpec
    _first = 0  # batches of earlier passes over the upstream

    def _origin(self) -> tuple[object, ...]:
        spec, lanes = self._spec, self._lanes
        if lanes.host_batch != spec.batch_size:
            raise ValueError(
                f"host batches of {lanes.host_batch} examples do not fit a stochastic "
                f"echo of batch_size={spec.batch_size}, whose batches are fetched as "
                "they are; make them equal"
            )
        if spec.buffer < spec.batch_size:
            raise ValueError(
                f"buffer={spec.buffer} holds less than a batch; use at least "
                f"{spec.batch_size}"
            )
        sizes = (spec.buffer, spec.batch_size, lanes.count)
        return (_SEQUENCE_VERSION, astuple(spec.fetch), *sizes, spec.seed)

    def _start(self) -> None:
        super()._start()
        self._batches = self._fetched = 0
        own, seed = self._lanes.own, self._spec.seed
        self._lane_seeds = [sequence(seed, _REUSE, lane) for lane in own]
        self._uses = np.zeros((len(own), self.num_slots), np.int32)
        # Whether the next batches are fetched, as far as it is decided.
        self._coins = np.zeros(0, bool)

    def need(self, uses: int) -> Need:
        fetches = self._fetches_ahead(-(-uses // self.batch))
        wanted = self._fetched + int(np.count_nonzero(fetches)) * self.batch
        missing = max(0, wanted - self.row)
        if self._left is not None:
            return Need(min(missing, self._left))
        return Need(missing, then=int(wanted >= self.row and not fetches[-1]))

    def decide(self, uses: int, rows: int) -> Decision | None:
        slots, made = self._take(rows), []
        for _ in range(-(-uses // self.batch)):
            if self._left == 0 and self.row == self._fetched:
                break
            if self._fetches_ahead(1)[0]:
                left = self.row - self._fetched
                # Several batches are always whole.
                if not left or (made and left < self.batch):
                    break
            made.append(self._advance())
            if made[-1][0].shape[1] < self.batch:
                break
        if not made:
            return None
        items, repeat = (np.concatenate(x, axis=1) for x in zip(*made, strict=True))
        self._latest = repeat
        return Decision.at_once(self._uses_of(items, repeat), self.row, slots)

    def of_epoch(self, number: int, fresh: int, uses: int) -> "StochasticPlan":
        lanes = replace(self._lanes, first=fresh * self._lanes.count)
        plan = StochasticPlan(
            epoch_spec(self._spec, number, lanes.first),
            lanes=lanes,
            max_batches=self.max_batches,
            options=self._options,
        )
        plan._first = -(-uses // (self.batch * len(lanes.own)))
        return plan

    def get_state(self) -> dict[str, Any]:
        return {
            "batches": self._batches,
            "fresh": self.row,
            "pending": self._pending,
            "plan": self._fingerprint,
            "repeats": self._repeats,
        }

    def _decide_again(self, state: Mapping[str, Any]) -> Uses:
        # For a million batches of 1024 that takes about two minutes.
        lanes, batches, latest = len(self._lanes.own), state["batches"], None
        if batches > _MAX_BATCHES:
            raise ValueError(f"{batches} batches are more than {_MAX_BATCHES}")
        self.row = state["fresh"]
        while self._batches < batches:
            if self._fetches_ahead(1)[0] and self._fetched == self.row:
                raise ValueError(f"{batches} batches fetch more than {self.row} items")
            latest = self._advance()
        if self.row - self._fetched > self.max_batches * self.batch:
            raise ValueError(f"{batches} batches fetch fewer than {self.row} items")
        return Uses.none(lanes) if latest is None else self._uses_of(*latest)

    def _decide(self, first: int, count: int) -> np.ndarray:
        """Returns whether consecutive batches are fetched, ``bool[count]``."""
        numbers = np.arange(first, first + count)
        found = decide_fetches(self._spec.fetch, self._spec.seed, numbers + self._first)
        return found | (numbers == 0)

    def _fetches_ahead(self, batches: int) -> np.ndarray:
        """Returns whether the next batches are fetched, ``bool[batches]``."""
        if self._coins.size < batches:
            self._coins = self._decide(self._batches, _BLOCK + batches)
        return self._coins[:batches]

    def _advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Makes a batch; returns items of the lanes and repeats, ``[G, n]`` each."""
        lanes = len(self._lanes.own)
        if self._fetches_ahead(1)[0]:
            end = min(self._fetched + self.batch, self.row)
            items = np.tile(np.arange(self._fetched, end), (lanes, 1))
            repeat = np.zeros(items.shape, np.int32)
            self._fetched = end
        else:
            kept = min(self._fetched, self._memory)
            size = min(self.batch, kept)
            chosen = [
                _distinct(kept, size, sequence(seed, self._batches))
                for seed in self._lane_seeds
            ]
            items = np.stack(chosen) + (self._fetched - kept)
            repeat = np.take_along_axis(self._uses, items % self.num_slots, 1)
            self._repeats += items.size
        np.put_along_axis(self._uses, items % self.num_slots, repeat + 1, 1)
        self._used += items.size
        self._batches += 1
        self._coins = self._coins[1:]
        return items, repeat


def decide_fetches(fetch: FetchSchedule, seed: int, batches: np.ndarray) -> np.ndarray:
    """Returns whether batches with these numbers are fetched, ``bool[N]``."""
    random = mix(sequence(seed, _LOAD), batches) >> np.uint64(32)
    return (random < fetch.threshold(batches)) | (batches == 0)


def _distinct(n: int, k: int, start: int) -> np.ndarray:
    """Returns k distinct random numbers of range(n), ``int64[k]``."""
    if n < 2 * k:
        return np.argsort(mix(start, np.arange(n)), kind="stable")[:k]
    # This equals drawing one by one, and again after a duplicate. About k^2 / 2n are
    # duplicates. The size changes the time alone, not the numbers.
    size = k + k * k // n + 16
    while True:
        # The product stays below 2^63: there are fewer than 2^31 items.
        random = mix(start, np.arange(size)) >> np.uint64(32)
        numbers = (random * np.uint64(n) >> np.uint64(32)).astype(np.int64)
        _, first = np.unique(numbers, return_index=True)
        if first.size >= k:
            return numbers[np.sort(first)[:k]]
        size *= 2
