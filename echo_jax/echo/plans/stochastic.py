"""Stochastic echo: load a chunk with some probability, else reuse the last items.

The form of echo that theory speaks of: at update t a new batch is loaded with
probability p_t, otherwise old data is reused, from a memory of the last M items
("Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data
Parallelism", ICLR 2025 submission 12780, known to us by its reviews). A p_t that
falls over training (load often early, echo more later) is that work's proposal.

How often an item is reused is random here, about Poisson-distributed: with p = 1/2
more than a third of the items (1/e) are used once alone, others many times. The
other plans use items as equally often as they can.
"""

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.keys import fingerprint, mix, sequence
from echo_jax.echo.plans.draws import Draw, Need
from echo_jax.echo.plans.lanes import check_lanes, global_index
from echo_jax.echo.plans.load_schedule import LoadSchedule
from echo_jax.echo.plans.ring import Ring, check_draws

__all__ = ["LoadSchedule", "StochasticDraws"]

# Goes up whenever the same arguments yield another sequence than before.
_SEQUENCE_VERSION = 1
_STATE_KEYS = {"chunks", "draws", "ended", "plan", "repeats"}
_LOAD, _REUSE = 0, 1  # what randomness is for
_BLOCK, _SPAN = 1024, 1 << 16  # draws whose loads are decided at once


class StochasticDraws:
    """The draws of a stochastic echo; a `DrawPlan`.

    The first draw loads. Every later one loads a chunk with the probability of the
    schedule, decided from the seed and the update alone, so that all lanes and hosts
    agree. A loaded chunk is the batch. A draw that does not load takes distinct items
    at random from the last ``buffer`` ones.

    After the end of the upstream the stream ends with the next load.

    Attributes:
      num_slots: Slots of each lane: its buffer, and one chunk less than ``max_draws``
        for those that are written before the draw that loads them.

    Example:
      >>> draws = StochasticDraws(
      ...     load=LoadSchedule(start=0.5, end=0.5), buffer=4, batch_size=2,
      ...     chunk_items=2, seed=1)
      >>> for _ in range(4):
      ...     if draws.need() is Need.MUST:
      ...         _ = draws.write()
      ...     print(draws.draw().fresh_index.tolist())
      [[0, 1]]
      [[1, 0]]
      [[2, 3]]
      [[0, 3]]
    """

    def __init__(
        self,
        *,
        load: LoadSchedule,
        buffer: int,
        batch_size: int,
        chunk_items: int,
        num_lanes: int = 1,
        lanes: range | None = None,
        seed: int = 0,
        max_draws: int = 1,
    ):
        """Starts before the first draw.

        Args:
          load: How likely a load is at every update.
          buffer: Items that reuse draws from, M, over all lanes.
          batch_size: Items of a draw, over all lanes.
          chunk_items: Rows of a chunk; must be the batch.
          num_lanes: Lanes; must divide the batch.
          lanes: Those that are decided here, where others are somewhere else; all by
            default.
          seed: Names the random choices.
          max_draws: The most draws that `need` will be asked for at once.

        Raises:
          ValueError: If a number is out of its range.
        """
        check_lanes(num_lanes, chunk_items=chunk_items, batch_size=batch_size)
        if chunk_items != batch_size:
            raise ValueError(
                f"chunk_items={chunk_items} must be batch_size={batch_size}: a loaded "
                "chunk is the batch of a stochastic echo"
            )
        if buffer < batch_size:
            raise ValueError(
                f"buffer={buffer} holds less than a batch; use at least {batch_size}"
            )
        if max_draws < 1:
            raise ValueError(f"max_draws={max_draws} must be at least 1")
        self._load = load
        self._seed = seed
        self._batch = batch_size // num_lanes
        self._memory = buffer // num_lanes
        self._max_draws = max_draws
        self.num_slots = self._memory + (max_draws - 1) * self._batch
        self._own, self._num_lanes = lanes or range(num_lanes), num_lanes
        self._ring = Ring(len(self._own), self.num_slots, self._batch)
        self._lane_seeds = [sequence(seed, _REUSE, lane) for lane in self._own]
        sizes = (buffer, batch_size, num_lanes)
        self._fingerprint = fingerprint(_SEQUENCE_VERSION, astuple(load), *sizes, seed)
        self._draws = self._chunks = self._loaded = self._repeats = 0
        self._ended = False
        self._uses = np.zeros((len(self._own), self.num_slots), np.int32)
        self._decided_from, self._decided = 0, np.zeros(0, bool)

    @property
    def num_chunks(self) -> int:
        """See `DrawPlan`."""
        return self._chunks

    @property
    def first_chunk(self) -> int:
        """See `DrawPlan`."""
        return self._ring.first_chunk(self._chunks)

    @property
    def counts(self) -> Counts:
        """See `DrawPlan`."""
        rows = self._batch * self._ring.num_lanes
        return Counts(self._chunks * rows, self._draws * rows, self._repeats)

    def need(self, draws: int = 1) -> Need:
        """See `DrawPlan`.

        Raises:
          ValueError: If ``draws`` is more than ``max_draws``.
        """
        check_draws(draws, self._max_draws)
        if self._ended:
            return Need.NO
        loads = int(np.count_nonzero(self._loads_ahead(draws)))
        return Need.MUST if self._loaded + loads > self._chunks else Need.NO

    def write(self) -> np.ndarray:
        """See `DrawPlan`.

        Raises:
          RuntimeError: If `need` did not ask for a chunk.
        """
        if self._ended or self._chunks - self._loaded >= self._max_draws:
            raise RuntimeError("no draw needs another chunk; ask need() before write()")
        self._chunks += 1
        return self._ring.chunk_slots(self._chunks - 1)

    def draw(self) -> Draw | None:
        """See `DrawPlan`.

        Raises:
          RuntimeError: If the draw needs a chunk.
        """
        if self._loads_ahead(1)[0] and self._loaded == self._chunks:
            if self._ended:
                return None
            raise RuntimeError("the draw needs a chunk; ask need() before draw()")
        items, repeat = self._advance()
        chunk = self._ring.lane_chunk
        index = global_index(items, chunk, self._own, self._num_lanes)
        return Draw(self._ring.slots(items), index, repeat)

    def end(self) -> None:
        """See `DrawPlan`."""
        self._ended = True

    def get_state(self) -> dict[str, Any]:
        """See `DrawPlan`: integers only."""
        return {
            "chunks": self._chunks,
            "draws": self._draws,
            "ended": int(self._ended),
            "plan": self._fingerprint,
            "repeats": self._repeats,
        }

    def set_state(self, state: Mapping[str, Any]) -> list[tuple[int, np.ndarray]]:
        """See `DrawPlan`.

        All loads are decided again, which takes about 50 ms for a million draws, and
        the draws since the oldest chunk in the buffer are made again, which takes
        about 0.1 ms each for 1024 items.

        Raises:
          ValueError: If the state is not one of such draws, or was saved with other
            arguments.
        """
        numbers = list(state.values())
        if set(state) != _STATE_KEYS or any(type(n) is not int for n in numbers):
            raise ValueError(
                f"a state with the keys {sorted(state)} is not one of stochastic "
                "draws; give what get_state returned"
            )
        if state["plan"] != self._fingerprint:
            raise ValueError(
                "this state was saved with another load schedule, buffer, batch, "
                "number of lanes or seed; restore it with those it was saved with"
            )
        loading = self._loading(state["draws"])
        ahead = state["chunks"] - loading.size
        if min(numbers) < 0 or not 0 <= ahead <= self._max_draws:
            raise ValueError(
                f"this state says {state['chunks']} chunks, but its {state['draws']} "
                f"draws load {loading.size}; it is damaged"
            )
        oldest = max(0, loading.size * self._batch - self._memory) // self._batch
        self._loaded = oldest
        self._draws = int(loading[oldest]) if loading.size else 0
        while self._draws < state["draws"]:
            self._advance()
        self._chunks, self._ended = state["chunks"], bool(state["ended"])
        self._repeats = state["repeats"]
        return self._ring.held(self._chunks)

    def _loading(self, draws: int) -> np.ndarray:
        """The draws that load, of so many from the first on, ``int64``."""
        found = [
            at + np.flatnonzero(self._decide(at, min(_SPAN, draws - at)))
            for at in range(0, draws, _SPAN)
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def _decide(self, first: int, count: int) -> np.ndarray:
        """Whether some draws in a row load, ``bool[count]``."""
        draws = np.arange(first, first + count)
        below = (self._load.probability(draws) * 2.0**32).astype(np.uint64)
        loads = mix(sequence(self._seed, _LOAD), draws) >> np.uint64(32) < below
        if first == 0:
            loads[:1] = True
        return loads

    def _loads_ahead(self, draws: int) -> np.ndarray:
        """Whether the next draws load, ``bool[draws]``."""
        at = self._draws - self._decided_from
        if not 0 <= at <= self._decided.size - draws:
            self._decided_from, at = self._draws, 0
            self._decided = self._decide(self._draws, _BLOCK + draws)
        return self._decided[at : at + draws]

    def _advance(self) -> tuple[np.ndarray, np.ndarray]:
        """Makes a draw whose chunk is there: items of the lanes, and their repeats."""
        lanes = self._ring.num_lanes
        if self._loads_ahead(1)[0]:
            first = self._loaded * self._batch
            items = np.tile(np.arange(first, first + self._batch), (lanes, 1))
            repeat = np.zeros(items.shape, np.int32)
            self._loaded += 1
        else:
            top = self._loaded * self._batch
            kept = min(top, self._memory)
            chosen = [
                _distinct(kept, self._batch, sequence(seed, self._draws))
                for seed in self._lane_seeds
            ]
            items = np.stack(chosen) + (top - kept)
            repeat = np.take_along_axis(self._uses, items % self.num_slots, 1)
            self._repeats += items.size
        np.put_along_axis(self._uses, items % self.num_slots, repeat + 1, 1)
        self._draws += 1
        return items, repeat


def _distinct(n: int, k: int, start: int) -> np.ndarray:
    """Draws k of n numbers at random, each at most once, ``int64[k]``.

    Args:
      n: At least k.
      k: How many.
      start: Names the choice.
    """
    if n < 2 * k:
        return np.argsort(mix(start, np.arange(n)), kind="stable")[:k]
    # As drawn one by one, and drawn again if it has come before. About k^2 / 2n of
    # them have; the size decides about the time alone, not about the numbers.
    size = k + k * k // n + 16
    while True:
        # The product stays below 2^63: there are fewer than 2^31 items.
        random = mix(start, np.arange(size)) >> np.uint64(32)
        numbers = (random * np.uint64(n) >> np.uint64(32)).astype(np.int64)
        _, first = np.unique(numbers, return_index=True)
        if first.size >= k:
            return numbers[np.sort(first)[:k]]
        size *= 2
