"""Adaptive echo: use fresh items if they are ready, none over ``max_uses`` times.

For every batch, take fresh items if they are ready. Then use the items below `max_uses`
that were unused for longest. Wait only if these are too few for a batch. The plan needs
no knowledge of the rates. The longest unused items are repeated, because the value of a
repeat follows its lag (Choi et al. 2019, figure 7), and because the newest ones would
run out earlier when storage stalls (docs/design.md).

Fresh items are used first, in their order. The plan asks for more only if fewer unused
items are waiting than the next batch uses, so no item is lost unused. Repeats are
chosen at random among the longest unused items. The cost of a batch does not grow with
the buffer.

With ``min_uses`` above 1, fresh items that are not needed yet are taken only after the
used items had ``min_uses`` uses on average, and each item that would give way had them
itself. Items that give way next are repeated before the longest unused ones.

A log records with one bit per batch whether fresh items were taken before it. The
sequence of uses is a function of the spec, the log, and the end of the upstream. After
that end, batches go on until all items are at `max_uses`.
"""

import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.plans.base import Decision, Need, Uses, stacked
from echo_jax.echo.plans.ring import RingPlan
from echo_jax.echo.spec import AdaptiveSpec

# Goes up whenever the same arguments and log yield another sequence than before.
_SEQUENCE_VERSION = 3
_HALF = np.uint64(32)
_NONE = np.zeros(0, np.int32)


class AdaptivePlan(RingPlan):
    """The plan of an adaptive echo."""

    _spec: AdaptiveSpec

    def _origin(self) -> tuple[object, ...]:
        spec, lanes, batch = self._spec, self._lanes, self.batch
        if lanes.host_batch < spec.batch_size:
            raise ValueError(
                f"an adaptive echo of batch_size={spec.batch_size} needs host batches "
                f"that serve a batch, and these have {lanes.host_batch} examples; use "
                "larger ones, or a smaller batch_size"
            )
        waiting = batch - math.gcd(batch, lanes.rows)
        if spec.min_uses > 1 and waiting:
            waiting = lanes.rows  # Some of them may lack uses that fill no batch.
        least = (waiting + lanes.rows) * lanes.count
        if spec.buffer < least:
            raise ValueError(
                f"buffer={spec.buffer} is too small to use every fresh item before it "
                f"gives way; use at least {least}"
            )
        sizes = (spec.buffer, spec.batch_size, lanes.host_batch, lanes.count)
        # Plans of earlier versions have no bound from below.
        least_uses = ("min_uses", spec.min_uses) if spec.min_uses > 1 else ()
        return (_SEQUENCE_VERSION, *sizes, spec.max_uses, spec.seed, *least_uses)

    def _start(self) -> None:
        super()._start()
        spec, rows = self._spec, self._lanes.rows
        self._items = [
            _LeastRecentlyUsed(spec, self.num_slots, rows, sequence(spec.seed, lane))
            for lane in self._lanes.own
        ]
        # Whether fresh items were taken before each batch so far, 1 or 0.
        self._replay, self._taken = spec.replay or DecisionLog(), bytearray()

    @property
    def log(self) -> DecisionLog:
        return DecisionLog(self._taken)

    def need(self, uses: int) -> Need:
        rows = self._lanes.rows
        if self._left is not None:
            rows = min(rows, self._left)
        if not rows:
            return Need()
        # If the batch needs items and the log takes none, the upstream had ended there.
        # A restored echo has not found that out yet.
        if min([items.num_drawable for items in self._items]) < self.batch:
            return Need(must=rows)
        position = len(self._taken)
        if position < len(self._replay):
            if self._replay[position] and not self._is_open():
                raise ValueError(
                    f"the log takes fresh items before batch {position}, which is too "
                    f"early with min_uses={self._spec.min_uses}; use one that was "
                    "recorded with this echo"
                )
            return Need(must=rows) if self._replay[position] else Need()
        return Need(may=rows) if self._is_open() else Need()

    def _is_open(self) -> bool:
        """Returns whether fresh items may come: the others had their `min_uses`."""
        # All lanes take and use fresh items alike.
        used = self._items[0].unused
        return (
            self.row - used < self.batch
            and self._used >= self._spec.min_uses * used * len(self._items)
            and not any(items.due().size for items in self._items)
        )

    def decide(self, uses: int, rows: int) -> Decision | None:
        position = len(self._taken)
        if position < len(self._replay) and self._replay[position] != bool(rows):
            if rows:
                raise ValueError(
                    f"the log takes nothing before batch {position}, which cannot be "
                    "made without; use one that was recorded with this echo, or a "
                    "larger buffer"
                )
            raise ValueError(
                f"the log takes fresh items before batch {position}, but the upstream "
                "has ended; replay it with the same data"
            )
        slots = self._take(rows)
        drawn = self._draw(bool(rows))
        return drawn and Decision.at_once(drawn, self.row, slots)

    def _take(self, rows: int) -> np.ndarray:
        for items in self._items:
            items.write(rows)
        return super()._take(rows)

    def _draw(self, taken: bool) -> Uses | None:
        """Decides a batch; None if every item is at `max_uses`."""
        size = min([self.batch, *(items.num_drawable for items in self._items)])
        if not size:
            return None
        number = len(self._taken)
        drawn = [items.draw(size, number) for items in self._items]
        slots, repeat = map(stacked, zip(*drawn, strict=True))
        self._used += repeat.size
        self._repeats += int(np.count_nonzero(repeat))
        self._latest = repeat
        self._taken.append(taken)
        newest = self.row - 1
        items = newest - (newest - slots.astype(np.int64)) % self.num_slots
        return Uses(slots, self._lanes.global_index(items), repeat)

    def get_state(self) -> dict[str, Any]:
        return {
            "fresh": self.row,
            "log": self.log.to_json(),
            "pending": self._pending,
            "plan": self._fingerprint,
        }

    def check_state(self, state: Any) -> None:
        super().check_state(state)
        log = DecisionLog.from_json(state["log"])
        shorter = min(len(log), len(self._replay))
        if log[:shorter] != self._replay[:shorter]:
            raise ValueError(
                "this state is not on the way of the log that is replayed; restore it "
                "without a replay, or with the one it was saved with"
            )

    def _decide_again(self, state: Mapping[str, Any]) -> Uses:
        # For a million batches of 1024 that takes about a minute on one lane, and
        # three to four minutes on eight.
        latest = Uses.none(len(self._items))
        for taken in DecisionLog.from_json(state["log"]):
            rows = min(self._lanes.rows, state["fresh"] - self.row) if taken else 0
            self._take(rows)
            drawn = self._draw(taken) if rows > 0 or not taken else None
            if drawn is None:
                raise ValueError("the log takes too few or too many items")
            latest = drawn
        return latest


class _LeastRecentlyUsed:
    """The items that a lane holds, ordered by their last use."""

    # Items that may be used again wait in a queue, the longest unused in front.
    # Never-used items need no queue: they are the newest items. Taking n items out of
    # any places and putting n in costs O(n), whatever the lane holds.

    def __init__(self, spec: AdaptiveSpec, num_slots: int, rows: int, seed: int):
        # ``rows`` items come together.
        self._num_slots, self._rows, self._seed = num_slots, rows, seed
        self._min_uses, self._max_uses = spec.min_uses, spec.max_uses
        # Items that came in so far, and the oldest one that was never used.
        self.items = self.unused = 0
        span = 1 << (num_slots - 1).bit_length()
        self._wrap = span - 1
        # The queue holds slots at the places [head, tail) modulo the span. Places only
        # grow, so the place of a slot is its position in the queue.
        self._queue = np.zeros(span, np.int32)
        self._head = self._tail = 0
        self._uses = np.zeros(num_slots, np.int32)
        self._place = np.zeros(num_slots, np.int64)

    @property
    def num_drawable(self) -> int:
        """The number of items below `max_uses`."""
        return self.items - self.unused + self._tail - self._head

    def _slots(self, first: int, stop: int) -> np.ndarray:
        return (np.arange(first, stop) % self._num_slots).astype(np.int32)

    def due(self) -> np.ndarray:
        """Returns the slots of items that give way next and lack uses, oldest first."""
        if self._min_uses == 1:
            return _NONE
        first = max(0, self.items - self._num_slots)
        stop = min(self.items - self._num_slots + self._rows, self.unused)
        slots = self._slots(first, stop)
        return slots.compress(self._uses[slots] < self._min_uses)

    def write(self, n: int) -> None:
        """Takes in ``n`` items; they replace the oldest ones, which were all used."""
        first = max(0, self.items - self._num_slots)
        self.items += n
        if first < self.items - self._num_slots:
            gone = self._slots(first, self.items - self._num_slots)
            self._evict(gone.compress(self._uses[gone] < self._max_uses))

    def draw(self, n: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Uses ``n`` items once; returns slots and earlier uses, ``int32[n]`` each."""
        # Never-used items go first, in their order, then those that are due. The front
        # quarter of the queue is cut into equal parts, and one item of each part is
        # chosen at random, so that items that came together separate. ``number`` is
        # that of the draw, which names the random choices.
        parts, fresh = [], min(n, self.items - self.unused)
        if fresh:
            parts.append(self._slots(self.unused, self.unused + fresh))
            self._uses[parts[0]] = 0
            self.unused += fresh
        due = self.due()[: n - fresh] if fresh < n else _NONE
        if due.size:
            self._evict(due)
            parts.append(due)
        if fresh + due.size < n:
            parts.append(self._choose(n - fresh - due.size, number))
        slots = parts[0] if len(parts) == 1 else np.concatenate(parts)
        repeat = self._uses.take(slots)
        uses = repeat + np.int32(1)
        self._uses[slots] = uses
        below = uses < self._max_uses
        # They enter the queue at its end, unless they are used up.
        entering = slots if below.all() else slots.compress(below)
        places = np.arange(self._tail, self._tail + entering.size)
        self._queue[places & self._wrap] = entering
        self._place[entering] = places
        self._tail += entering.size
        return slots, repeat

    def _choose(self, n: int, number: int) -> np.ndarray:
        """Takes ``n`` items out of the front quarter or of the first ``n`` places."""
        front = max(n, (self._tail - self._head + 3) // 4)
        counter, edges, width = _parts_of(front, n)
        random = mix(sequence(self._seed, number), counter)
        # The product stays below 2^63: a queue has fewer than 2^31 places.
        random >>= _HALF
        random *= width
        random >>= _HALF
        places = self._head + edges + random.view(np.int64)
        slots = self._queue.take(places & self._wrap)
        self._close(places, 1)
        return slots

    def _evict(self, slots: np.ndarray) -> None:
        """Takes items out of any places of the queue."""
        # Items that fill the gaps stay in their half. An item that was used just now
        # can get to the middle, and so can an item that was due, but no further.
        places = self._place[slots]
        older = places < self._head + (self._tail - self._head + 1) // 2
        for gaps, step in ((places[older], 1), (places[~older], -1)):
            if gaps.size:
                self._close(gaps, step)

    def _close(self, gaps: np.ndarray, step: int) -> None:
        """Fills gaps with the first items from the front (step 1) or the end (-1)."""
        if step == 1:
            first = self._head
            self._head += gaps.size
        else:
            first = self._tail - 1
            self._tail -= gaps.size
        depths = step * (gaps - first)
        far = depths >= gaps.size
        if far.any():
            # As many items move as there are gaps, but those that are gaps themselves.
            moving = np.ones(gaps.size, bool)
            moving[depths[~far]] = False
            origin = first + step * moving.nonzero()[0]
            slots = self._queue.take(origin & self._wrap)
            far = gaps[far]
            self._queue[far & self._wrap] = slots
            self._place[slots] = far


@functools.lru_cache(maxsize=8)
def _parts_of(front: int, n: int) -> tuple[np.ndarray, ...]:
    """Cuts the front into equal parts; returns numbers, starts and widths."""
    edges = np.arange(n + 1) * front // n
    return np.arange(n), edges[:n], np.diff(edges).astype(np.uint64)
