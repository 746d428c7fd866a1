"""Use levels: the items that a lane holds, by how often they were used.

The items that were used r times wait in a queue, level r, those that have waited
longest in front. Never-used ones need no queue: they are the newest items. Taking n
items out, wherever they stand, and putting n in costs O(n), whatever the lane holds.
"""

import numpy as np

from echo_jax.echo.keys import mix, sequence

__all__ = ["UseLevels"]


class UseLevels:
    """The items of one lane, in a ring of slots, in queues by number of uses.

    Attributes:
      items: Items that came in so far.
      unused: The oldest item that was never used; `items` if all were.

    Example:
      >>> levels = UseLevels(num_slots=4, cap=2, seed=0)
      >>> levels.write(3)
      >>> for number in range(3):
      ...     slots, repeat = levels.draw(2, number)
      ...     print(slots.tolist(), repeat.tolist())
      [0, 1] [0, 0]
      [2, 0] [0, 1]
      [1, 2] [1, 1]
      >>> levels.uses_left(draws=1)
      0
    """

    def __init__(self, num_slots: int, cap: int, seed: int):
        """Starts empty.

        Args:
          num_slots: Slots of the ring.
          cap: Uses after which an item is not drawn any more.
          seed: Names the random choices.
        """
        self._num_slots = num_slots
        self._cap = cap
        self._seed = seed
        self.items = 0
        self.unused = 0
        span = 1 << (num_slots - 1).bit_length()
        self._wrap = span - 1
        # A queue holds slots, at the places [head, tail) modulo the span. Places
        # grow for ever, so that those of a slot tell where it stands.
        self._queues = np.zeros((cap, span), np.int32)
        self._head = [0] * cap
        self._tail = [0] * cap
        self._level = np.zeros(num_slots, np.int32)
        self._place = np.zeros(num_slots, np.int64)

    @property
    def num_unused(self) -> int:
        """How many items were never used."""
        return self.items - self.unused

    def uses_left(self, draws: int) -> int:
        """Returns how many uses so many draws can have, with no item twice in one.

        The draws can be made if that is what they need: drawing least-used items
        first, as `draw` does, keeps the most items drawable.
        """
        left = self.num_unused * min(self._cap, draws)
        for level in range(1, self._cap):
            size = self._tail[level] - self._head[level]
            left += size * min(self._cap - level, draws)
        return left

    def write(self, n: int) -> None:
        """Takes in ``n`` items; the oldest, all used before, give way to them."""
        first = max(0, self.items - self._num_slots)
        self.items += n
        gone = np.arange(first, max(first, self.items - self._num_slots))
        if gone.size:
            gone %= self._num_slots
            level = self._level[gone]
            for waiting in range(1, self._cap):
                slots = gone[level == waiting]
                if slots.size:
                    self._evict(waiting, slots)

    def draw(self, n: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Uses the ``n`` least-used items once.

        Never-used items go in their order. Of those with equally many uses, the
        older half of the queue is cut into equal parts, and one item of each part is
        chosen at random, so that items that came together part.

        Args:
          n: How many; at least so many are below the cap.
          number: The number of the draw, which names the random choices.

        Returns:
          Their slots, ``int32[n]``, and how often each was used before, ``int32[n]``.
        """
        taken = []
        fresh = min(n, self.num_unused)
        if fresh:
            slots = np.arange(self.unused, self.unused + fresh) % self._num_slots
            taken.append((0, slots.astype(np.int32)))
            self.unused += fresh
            n -= fresh
        for level in range(1, self._cap):
            count = min(n, self._tail[level] - self._head[level])
            if count:
                taken.append((level, self._choose(level, count, number)))
                n -= count
        for level, slots in taken:
            self._enter(level + 1, slots)
        if len(taken) == 1:
            level, slots = taken[0]
            return slots, np.full(slots.size, level, np.int32)
        repeat = np.array([level for level, _ in taken], np.int32)
        sizes = [slots.size for _, slots in taken]
        return np.concatenate([s for _, s in taken]), np.repeat(repeat, sizes)

    def _choose(self, level: int, n: int, number: int) -> np.ndarray:
        """Takes ``n`` items out of the older half of a queue, or of what it takes."""
        head, queue = self._head[level], self._queues[level]
        half = max(n, (self._tail[level] - head + 1) // 2)
        counter = np.arange(n + 1)
        edges = counter * half // n
        start = sequence(self._seed, number, level)
        random = mix(start, counter[:n]) >> np.uint64(32)
        # The product stays below 2^63: a queue has fewer than 2^31 places.
        width = (edges[1:] - edges[:-1]).astype(np.uint64)
        places = edges[:n] + (random * width >> np.uint64(32)).astype(np.int64)
        slots = queue[(head + places) & self._wrap]
        self._close_front(level, places)
        return slots

    def _enter(self, level: int, slots: np.ndarray) -> None:
        """Puts items that now have so many uses at the end of their queue."""
        self._level[slots] = level
        if level < self._cap:
            places = np.arange(self._tail[level], self._tail[level] + slots.size)
            self._queues[level][places & self._wrap] = slots
            self._place[slots] = places
            self._tail[level] += slots.size

    def _evict(self, level: int, slots: np.ndarray) -> None:
        """Takes items out of a queue, wherever they stand."""
        places = self._place[slots] - self._head[level]
        half = (self._tail[level] - self._head[level] + 1) // 2
        older = places < half
        # The younger half first: it counts from the head that the other one moves.
        self._close_back(level, places[~older])
        self._close_front(level, places[older])

    def _close_front(self, level: int, places: np.ndarray) -> None:
        """Fills gaps with the items in front, which stay in the older half."""
        head, gaps = self._head[level], places.size
        self._head[level] += gaps
        moving = np.ones(gaps, bool)
        moving[places[places < gaps]] = False
        self._move(level, head + np.flatnonzero(moving), head + places[places >= gaps])

    def _close_back(self, level: int, places: np.ndarray) -> None:
        """Fills gaps with the items at the end, which stay in the younger half."""
        tail, gaps = self._tail[level], places.size
        self._tail[level] -= gaps
        behind = tail - self._head[level] - 1 - places
        moving = np.ones(gaps, bool)
        moving[behind[behind < gaps]] = False
        ends, gap = tail - 1 - np.flatnonzero(moving), tail - 1 - behind
        self._move(level, ends, gap[behind >= gaps])

    def _move(self, level: int, origin: np.ndarray, target: np.ndarray) -> None:
        if origin.size:
            queue = self._queues[level]
            slots = queue[origin & self._wrap]
            queue[target & self._wrap] = slots
            self._place[slots] = target
