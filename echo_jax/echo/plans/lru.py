"""The items that a lane holds, ordered by their last use.

Items that may be used again wait in a queue, the longest unused in front. Never-used
items need no queue: they are the newest items. Taking n items out of any places and
putting n in costs O(n), whatever the lane holds.
"""

import functools

import numpy as np

from echo_jax.echo.keys import mix, sequence
from echo_jax.echo.spec import AdaptiveSpec

__all__ = ["LeastRecentlyUsed"]

_HALF = np.uint64(32)
_NONE = np.zeros(0, np.int32)


class LeastRecentlyUsed:
    """The items of one lane, in a ring of slots, the least recently used first."""

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
    def num_unused(self) -> int:
        return self.items - self.unused

    @property
    def num_drawable(self) -> int:
        """The number of items below `max_uses`."""
        return self.num_unused + self._tail - self._head

    def due(self) -> np.ndarray:
        """Returns the slots of items that give way next and lack uses, oldest first."""
        first = max(0, self.items - self._num_slots)
        stop = min(self.items - self._num_slots + self._rows, self.unused)
        if self._min_uses == 1 or stop <= first:
            return _NONE
        slots = (np.arange(first, stop) % self._num_slots).astype(np.int32)
        return slots.compress(self._uses[slots] < self._min_uses)

    def write(self, n: int) -> None:
        """Takes in ``n`` items; they replace the oldest ones, which were all used."""
        first = max(0, self.items - self._num_slots)
        self.items += n
        gone = np.arange(first, max(first, self.items - self._num_slots))
        if gone.size:
            gone %= self._num_slots
            self._evict(gone[self._uses[gone] < self._max_uses])

    def draw(self, n: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Uses ``n`` items once; returns slots and earlier uses, ``int32[n]`` each."""
        # Never-used items go first, in their order, then those that are due. The front
        # quarter of the queue is cut into equal parts, and one item of each part is
        # chosen at random, so that items that came together separate. ``number`` is
        # that of the draw, which names the random choices.
        parts, fresh = [], min(n, self.num_unused)
        if fresh:
            slots = np.arange(self.unused, self.unused + fresh) % self._num_slots
            parts.append(slots.astype(np.int32))
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
        self._enter(slots if below.all() else slots.compress(below))
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
        places = edges + random.view(np.int64)
        slots = self._queue.take((self._head + places) & self._wrap)
        within = int(places.searchsorted(n))
        self._close_front(places[:within], places[within:])
        return slots

    def _enter(self, slots: np.ndarray) -> None:
        """Puts items at the end of the queue."""
        places = np.arange(self._tail, self._tail + slots.size)
        self._queue[places & self._wrap] = slots
        self._place[slots] = places
        self._tail += slots.size

    def _evict(self, slots: np.ndarray) -> None:
        """Takes items out of any places of the queue."""
        # Items that fill the gaps stay in their half. An item that was used just now
        # can get to the middle, and so can an item that was due, but no further.
        places = self._place[slots] - self._head
        older = places < (self._tail - self._head + 1) // 2
        # The younger half first: it counts from the head that the other one moves.
        self._close_back(places[~older])
        places = places[older]
        within = places < places.size
        self._close_front(places[within], places[~within])

    def _close_front(self, within: np.ndarray, beyond: np.ndarray) -> None:
        """Fills gaps within and beyond the first places with the items in front."""
        head, gaps = self._head, within.size + beyond.size
        self._head += gaps
        if beyond.size:
            moving = np.ones(gaps, bool)
            moving[within] = False
            self._move(head + moving.nonzero()[0], head + beyond)

    def _close_back(self, places: np.ndarray) -> None:
        """Fills gaps with the items at the end."""
        tail, gaps = self._tail, places.size
        self._tail -= gaps
        behind = tail - self._head - 1 - places
        moving = np.ones(gaps, bool)
        moving[behind[behind < gaps]] = False
        ends, gap = tail - 1 - np.flatnonzero(moving), tail - 1 - behind
        self._move(ends, gap[behind >= gaps])

    def _move(self, origin: np.ndarray, target: np.ndarray) -> None:
        slots = self._queue.take(origin & self._wrap)
        self._queue[target & self._wrap] = slots
        self._place[slots] = target


@functools.lru_cache(maxsize=8)
def _parts_of(front: int, n: int) -> tuple[np.ndarray, ...]:
    """Cuts the front into equal parts; returns numbers, starts and widths."""
    edges = np.arange(n + 1) * front // n
    return np.arange(n), edges[:n], np.diff(edges).astype(np.uint64)
