"""Adaptive echo: use fresh items if they are ready, none over ``max_uses`` times.

For every batch, take fresh items if they are ready. Fill the batch up with the items
below `max_uses` that were unused for longest. Wait only if these are too few. The plan
needs no knowledge of the rates. The longest unused items are repeated, because the
value of a repeat follows its lag (Choi et al. 2019, figure 7), and because the newest
ones would run out earlier when storage stalls (docs/decisions.md).

Unused items are mixed with repeats: a batch holds them in the share in which fresh
items came over the last batches, in their order. So each waits for a bounded number of
batches. If fresh items are always ready, the share is 1, and batches are the loader's
own. Repeats are chosen at random among the longest unused items.

Where fresh items come too slowly for `max_uses`, a reserve of items below it grows to
three quarters of the buffer, and the plan waits for fresh items rather than use the
reserve up. So repeats stay far apart. A stall, in which nothing comes for a window of
batches, uses the reserve. The cost of a batch does not grow with the buffer.

With ``min_uses`` above 1, fresh items are taken only after the used items had
``min_uses`` uses on average, and each item that would give way had them itself. Items
that give way next are repeated before the longest unused ones.

A log records with one bit per batch whether fresh items were taken before it, and where
the upstream ended. The sequence of uses is a function of the spec and the log. After
an end of the upstream, batches go on until every item was used, ``min_uses`` times.
"""

import copy
import functools
import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.plans.base import Decision, Need, Uses, stacked
from echo_jax.echo.plans.ring import RingPlan
from echo_jax.echo.spec import AdaptiveSpec

# Goes up whenever the same arguments and log yield another sequence than before.
_SEQUENCE_VERSION = 4
# The batches whose share of fresh items counts; more if `max_uses` is over half of it.
_WINDOW = 32
_HALF = np.uint64(32)
_NONE = np.zeros(0, np.int32)


class AdaptivePlan(RingPlan):
    """The plan of an adaptive echo."""

    _spec: AdaptiveSpec
    goes_on, _epoch = True, 0

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
        spec, rows, memory = self._spec, self._lanes.rows, self._memory
        self._items = [
            _LeastRecentlyUsed(spec, self.num_slots, rows, sequence(spec.seed, lane))
            for lane in self._lanes.own
        ]
        # Unused items that may wait for their first batch; a small buffer has no room.
        self._may_wait = self.batch if memory >= rows + self.batch else 0
        self._most_reserve = max(0, min(memory * 3 // 4, memory - 4 * self.batch))
        self._reserve = -rows
        # The rows taken before each of the last batches, and their sum.
        self._recent = deque[int](maxlen=max(_WINDOW, 2 * spec.max_uses))
        self._recent_rows = 0
        # Whether fresh items were taken before each batch so far, 1 or 0; and where the
        # upstream ended, with the rows that it still had.
        self._replay, self._taken = spec.replay or DecisionLog(), bytearray()
        self._ends: list[tuple[int, int]] = []
        # Whether the plan was just restored, so that no data can be ready.
        self._is_cold = False

    @property
    def log(self) -> DecisionLog:
        return DecisionLog(self._taken, self._ends)

    @property
    def _drawable(self) -> int:
        return min([items.num_drawable for items in self._items])

    @property
    def _unused(self) -> int:
        # All lanes take and use fresh items alike.
        return self.row - self._items[0].unused

    def need(self, uses: int) -> Need:
        rows = self._lanes.rows
        if self._left is not None:
            rows = min(rows, self._left)
        if not rows:
            return Need()
        drawable, position = self._drawable, len(self._taken)
        if (
            drawable < self.batch
            or (position, 0) in self._replay.ends[len(self._ends) :]
        ):
            return Need(must=rows)
        if position < len(self._replay):
            if self._replay[position] and not self._is_open():
                raise ValueError(
                    f"the log takes fresh items before batch {position}, which is too "
                    f"early with min_uses={self._spec.min_uses}; use one that was "
                    "recorded with this echo"
                )
            return Need(must=rows) if self._replay[position] else Need()
        if not self._is_open():
            return Need()
        if self._is_cold or drawable < self.batch + self._reserve:
            return Need(must=rows)
        return Need(may=rows)

    def _is_open(self) -> bool:
        """Returns whether fresh items may come: the others had their `min_uses`."""
        used, unused = self._items[0].unused, self._unused
        return (
            (unused < self.batch or unused <= self._may_wait)
            and self._used >= self._spec.min_uses * used * len(self._items)
            and not any(items.due().size for items in self._items)
        )

    def end(self, rows: int) -> None:
        super().end(rows)
        self._ends.append((len(self._taken), rows))

    def of_epoch(self, number: int, fresh: int, uses: int) -> "AdaptivePlan":
        plan = copy.copy(self)
        plan._ends, plan._epoch, plan._left = [*self._ends], number, None
        return plan

    def decide(self, uses: int, rows: int) -> Decision | None:
        position, ends = len(self._taken), self._ends
        is_over = not rows and self._is_over()
        if position < len(self._replay):
            takes = bool(rows) if is_over else self._replay[position]
            if rows and not takes:
                raise ValueError(
                    f"the log takes nothing before batch {position}, which cannot be "
                    "made without; use one that was recorded with this echo, or a "
                    "larger buffer"
                )
            if takes != bool(rows) or [*self._replay.ends[: len(ends)]] != ends:
                raise ValueError(
                    f"the log goes on with batch {position}, where the upstream has "
                    "ended; replay it with the same data"
                )
        slots = self._take(rows)
        drawn = None if is_over else self._draw(rows)
        return drawn and Decision.at_once(drawn, self.row, slots)

    def _take(self, rows: int) -> np.ndarray:
        # Half a batch more than `need` waits for: where fresh items come just in time,
        # nothing else would let the reserve grow.
        enough = self.batch * 3 // 2 + max(0, self._reserve)
        is_low = rows and self._drawable < enough
        gone = sum([items.write(rows) for items in self._items]) // len(self._items)
        # It grows while items run out, and shrinks by those that give way too early.
        grown = self._reserve + (rows // 2 if is_low else 0) - gone
        self._reserve = min(max(-rows, grown), self._most_reserve)
        return super()._take(rows)

    def _draw(self, rows: int) -> Uses | None:
        """Decides a batch; None if nothing is due after the upstream's end."""
        ended = self._left == 0
        size, unused = min(self.batch, self._drawable), self._unused
        if not size or self._is_over():
            return None
        fresh = self._share(rows)
        if ended or not self._may_wait:
            fresh = size
        fresh = max(fresh, unused - self._may_wait, size - (self._drawable - unused))
        fresh, number = min(fresh, unused, size), len(self._taken)
        drawn = [items.draw(size, fresh, number, ended) for items in self._items]
        slots, repeat = map(stacked, zip(*drawn, strict=True))
        self._used += repeat.size
        self._repeats += int(np.count_nonzero(repeat))
        self._latest, self._is_cold = repeat, False
        self._taken.append(bool(rows))
        newest = self.row - 1
        items = newest - (newest - slots.astype(np.int64)) % self.num_slots
        return Uses(slots, self._lanes.global_index(items), repeat)

    def _share(self, rows: int) -> int:
        """Returns the fresh items that a batch gets: as many as came for each batch."""
        recent = self._recent
        if len(recent) == recent.maxlen:
            self._recent_rows -= recent[0]
        recent.append(rows)
        self._recent_rows += rows
        return -(-self._recent_rows // len(recent))

    def _is_over(self) -> bool:
        """Returns whether the upstream ended, and nothing is due any more."""
        if self._left != 0 or self._unused:
            return False
        return not any(items.due(True).size for items in self._items)

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
        latest, log = Uses.none(len(self._items)), DecisionLog.from_json(state["log"])
        ends = deque(log.ends)
        for position, taken in enumerate([*log, None]):
            while ends and ends[0][0] == position:
                self._begin_if_over()
                self.end(ends.popleft()[1])
            if taken is None:
                break
            self._begin_if_over()
            rows = self._lanes.rows if self._left is None else self._left
            rows *= taken
            self._take(rows)
            drawn = self._draw(rows) if rows > 0 or not taken else None
            if drawn is None:
                raise ValueError("the log takes too few or too many items")
            latest = drawn
        if len(self._ends) == self._epoch:
            self._left = None
        if self.row != state["fresh"] or len(self._ends) - self._epoch not in (0, 1):
            raise ValueError("the log takes too few or too many items")
        self._is_cold = True
        return latest

    def _begin_if_over(self) -> None:
        if self._is_over():
            self._left = None


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

    def due(self, at_end: bool = False) -> np.ndarray:
        """Returns the slots of items that lack uses and give way next, or at all."""
        if self._min_uses == 1:
            return _NONE
        first = max(0, self.items - self._num_slots)
        stop = self.items - self._num_slots + self._rows
        slots = self._slots(first, self.unused if at_end else min(stop, self.unused))
        return slots.compress(self._uses[slots] < self._min_uses)

    def write(self, n: int) -> int:
        """Takes in ``n`` items for the oldest ones; returns how many had uses left."""
        first = max(0, self.items - self._num_slots)
        self.items += n
        if first >= self.items - self._num_slots:
            return 0
        gone = self._slots(first, self.items - self._num_slots)
        gone = gone.compress(self._uses[gone] < self._max_uses)
        self._evict(gone)
        return gone.size

    def draw(
        self, n: int, fresh: int, number: int, at_end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Uses ``n`` items once; returns slots and earlier uses, ``int32[n]`` each."""
        # The ``fresh`` oldest unused items go first, then those that are due. The front
        # quarter of the queue is cut into equal parts, and one item of each part is
        # chosen at random, so that items that came together separate. The ``number`` of
        # the draw names the random choices.
        due = self.due(at_end)[: n - fresh] if fresh < n else _NONE
        parts = []
        if fresh:
            parts.append(self._slots(self.unused, self.unused + fresh))
            self._uses[parts[0]] = 0
            self.unused += fresh
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
