"""Echo on the host: for any Python iterator of pytrees."""

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from echo_jax.echo.counts import Counts
from echo_jax.echo.plans.fixed import Plan, Step
from echo_jax.echo.spec import EchoSpec
from echo_jax.echo.stores.host import ItemStore, RingStore, Stack
from echo_jax.echo.tree import tree_concatenate, tree_rows

__all__ = ["EchoIterator", "Tags", "echo"]


class Tags(NamedTuple):
    """Says which use of which item an output is.

    Attributes:
      fresh_index: Index of the item in the upstream: an int, or ``int64[B]``.
      repeat: 0 for its first use, then 1, 2, ...: an int, or ``int32[B]``.
    """

    fresh_index: Any
    repeat: Any


class _Upstream:
    """Reads the upstream, and remembers its states where a restore may start.

    Attributes:
      taken: How many items were read; also the index of the next one.
    """

    def __init__(self, iterator: Iterator[Any], plan: Plan, *, unbatch: bool):
        self._iterator: Any = iterator
        self._plan = plan
        self._unbatch = unbatch
        self._resumable = all(
            callable(getattr(iterator, name, None))
            for name in ("get_state", "set_state")
        )
        # Index of an item, and the state of the upstream before it.
        self._saved: deque[tuple[int, Any]] = deque()
        # An identity never goes back, unless into a batch that it has not used up.
        self._keeps = self._resumable and (unbatch or not plan.is_identity)
        # The first item whose state may be needed later.
        self._unsaved: float = 0 if self._keeps else math.inf
        self.taken = 0

    def take(self, count: int) -> Iterator[Any]:
        """Yields items until ``count`` more are taken, fewer at the end.

        With ``unbatch`` it yields a `Stack` of them at a time, and may take more
        than asked.
        """
        end = self.taken + count
        while self.taken < end:
            if self.taken >= self._unsaved:
                self._save()
            try:
                item = next(self._iterator)
            except StopIteration:
                return
            item = Stack(item) if self._unbatch else item
            self.taken += item.length if self._unbatch else 1
            yield item

    def state_before(self, item: int) -> tuple[Any, int]:
        """Returns the last saved state from before an item, and the items between.

        The item is one that can become the plan's anchor, or the next to be taken.
        """
        if not self._resumable:
            raise TypeError(
                f"the upstream of this echo, a {type(self._iterator).__name__}, has "
                "no get_state and set_state, so the echo's state cannot be saved; "
                "give an iterator that has both, such as a Grain iterator"
            )
        if item == self.taken:
            return self._state(), 0
        index, state = next(
            saved for saved in reversed(self._saved) if saved[0] <= item
        )
        return copy.deepcopy(state), item - index

    def restore(self, state: Any, item: int) -> None:
        """Goes back to a state, the one before ``item``."""
        self._saved.clear()
        self._iterator.set_state(copy.deepcopy(state))
        self.taken = item
        self._unsaved = item if self._keeps else math.inf

    def _save(self) -> None:
        anchor = self._plan.anchor
        while len(self._saved) > 1 and self._saved[1][0] <= anchor:
            self._saved.popleft()
        self._saved.append((self.taken, self._state()))
        # Of stacked items any may hold an anchor, so the state before each is kept.
        after = self.taken + 1
        self._unsaved = after if self._unbatch else self._plan.next_anchor(after)

    def _state(self) -> Any:
        return copy.deepcopy(self._iterator.get_state())


class EchoIterator(Iterator[Any]):
    """The iterator that `echo` returns.

    Attributes:
      tags: The tags of the latest output, None before the first.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: EchoSpec,
        *,
        batch: bool = False,
        unbatch: bool = False,
        drop_remainder: bool = False,
        tags: bool = False,
    ):
        """See `echo`."""
        if unbatch and not batch:
            raise ValueError("unbatch=True goes with batch=True; give both")
        self._plan = Plan(spec)
        self._upstream = _Upstream(iterator, self._plan, unbatch=unbatch)
        self._unbatch = unbatch
        self._batch_size = spec.batch_size if batch else 0
        self._drop_remainder = drop_remainder
        self._with_tags = tags
        if batch:
            self._next = self._next_batch
        else:
            self._next = self._pass_on if self._plan.is_identity else self._next_use
        self._reset()

    def _reset(self) -> None:
        self.tags: Tags | None = None
        store = RingStore if self._batch_size else ItemStore
        self._store: Any = store(self._plan.num_slots)
        self._taken: deque[Any] = deque()  # items, or stacks of items, for the plan
        self._run: Step | None = None
        self._emitted = 0  # uses of the run that are passed on

    @property
    def _pending(self) -> int:
        return 0 if self._run is None else self._run.index.size - self._emitted

    @property
    def counts(self) -> Counts:
        """How many fresh items were taken, and uses and repeats made."""
        state = self._plan.get_state(self._pending)
        return Counts(state["fresh"], state["uses"], state["repeats"])

    def __next__(self) -> Any:
        """Returns the next output, with its `Tags` if asked for."""
        output, self.tags = self._next()
        return (output, self.tags) if self._with_tags else output

    def _take(self, uses: int) -> None:
        """Takes what the next uses need, and tells the plan of an end."""
        ahead = self._upstream.taken - self._plan.fresh
        missing = self._plan.fresh_wanted(uses) - ahead
        if missing > 0:
            until = self._upstream.taken + missing
            self._taken.extend(self._upstream.take(missing))
            if self._upstream.taken < until:
                self._plan.end_at(self._upstream.taken)

    def _write(self, slots: np.ndarray) -> None:
        """Moves the next items into slots of the store."""
        if not self._unbatch:
            for slot in slots.tolist():
                self._store.write(slot, self._taken.popleft())
            return
        while slots.size:
            stack = self._taken[0]
            fit = min(stack.length - stack.at, slots.size)
            self._store.write_stacked(slots[:fit], stack)
            slots = slots[fit:]
            if stack.at == stack.length:
                self._taken.popleft()

    def _pass_on(self) -> tuple[Any, Tags]:
        """The next item of an identity, which no store needs to keep."""
        for item in self._upstream.take(1):
            tags = Tags(self._plan.fresh, 0)
            self._plan.pass_on()
            return item, tags
        raise StopIteration

    def _next_use(self) -> tuple[Any, Tags]:
        if not self._pending:
            self._take(1)
            self._run, self._emitted = self._plan.take_run(), 0
            if self._run is None:
                raise StopIteration
            self._write(self._run.write_slots)
        run, at = self._run, self._emitted
        assert run is not None
        slot = int(run.read_slots[at])
        item = self._store.read(slot)
        if run.last[at]:
            self._store.clear(slot)
        self._emitted += 1
        return item, Tags(int(run.index[at]), int(run.repeat[at]))

    def _next_batch(self) -> tuple[Any, Tags]:
        self._take(self._batch_size)
        parts, tags = [], []
        for step in self._plan.take(self._batch_size):
            self._write(step.write_slots)
            parts.append(self._store.read(step.read_slots))
            tags.append(Tags(step.index, step.repeat))
        size = sum(part.fresh_index.size for part in tags)
        if size == 0 or (self._drop_remainder and size < self._batch_size):
            raise StopIteration
        if len(parts) == 1:
            return parts[0], tags[0]
        return tree_concatenate(parts), Tags(
            *map(np.concatenate, zip(*tags, strict=True))
        )

    def get_state(self) -> dict[str, Any]:
        """Returns integers, and the upstream's state at the oldest item in use.

        Raises:
          TypeError: If the upstream has no get_state and set_state.
        """
        plan = self._plan.get_state(self._pending)
        upstream, skip = self._upstream.state_before(plan["anchor"])
        return {"plan": plan, "skip": skip, "upstream": upstream}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues as the iterator that gave the state would have.

        The items in use are read from the upstream again.

        Raises:
          ValueError: If the state is not one of an echo, or if the upstream no
            longer has the items that it had.
        """
        if set(state) != {"plan", "skip", "upstream"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is not an echo's; give what "
                "get_state returned"
            )
        items, slots = self._plan.set_state(state["plan"])
        self._reset()
        first, fresh = self._plan.anchor - state["skip"], self._plan.fresh
        self._upstream.restore(state["upstream"], first)
        slot_of = dict(zip(items.tolist(), slots.tolist(), strict=True))
        for part in self._upstream.take(fresh - first):
            first += self._rewrite(part, first, slot_of)
        if self._upstream.taken < fresh:
            raise ValueError(
                f"the upstream ended after {self._upstream.taken} items, but the "
                f"state was saved after {fresh}; restore it over the same data"
            )

    def _rewrite(self, part: Any, first: int, slot_of: dict[int, int]) -> int:
        """Puts what is in use of an item, or a stack, that is read again in place.

        Returns:
          How many items it was.
        """
        if not self._unbatch:
            if first in slot_of:
                self._store.write(slot_of[first], part)
            return 1
        for at in range(part.length):
            if first + at in slot_of:
                self._store.write(slot_of[first + at], tree_rows(part.tree, at))
        part.at = max(0, self._plan.fresh - first)
        if part.at < part.length:
            self._taken.append(part)
        return part.length


def echo(
    iterable: Iterable[Any],
    spec: EchoSpec,
    *,
    batch: bool = False,
    unbatch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
) -> EchoIterator:
    """Repeats the items of any iterator of pytrees as a spec says.

    Exactly the fresh items that an output needs are read before it. The state is
    a few integers and the upstream's own state, so it is small; items in use are
    read again on a restore.

    Items are handed out as read-only views of one private copy, batches as arrays
    of their own: no two uses ever share memory that can be written.

    Args:
      iterable: Yields pytrees of dicts, lists and tuples with array leaves, and
        does not write into an item after it has yielded it. With ``get_state`` and
        ``set_state`` on its iterator the echo has them too.
      spec: What the echo does.
      batch: Whether to stack ``spec.batch_size`` uses into one output, leaf by
        leaf along a new first axis. Much faster than stacking them later. Items
        must then have equal shapes and dtypes.
      unbatch: Whether the upstream yields batches whose examples are the items:
        example echoing behind a stage that has stacked them already, of any size.
        Faster still; reads ahead to the end of a batch. Goes with ``batch``.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of output and `Tags`.

    Returns:
      The iterator, with ``counts``, ``tags``, ``get_state`` and ``set_state``.

    Raises:
      ValueError: If the buffer is too small for ``spread`` without twins.

    Example:
      >>> list(echo([10, 20], EchoSpec(factor=1.5)))
      [10, 20, 20]
    """
    return EchoIterator(
        iter(iterable),
        spec,
        batch=batch,
        unbatch=unbatch,
        drop_remainder=drop_remainder,
        tags=tags,
    )
