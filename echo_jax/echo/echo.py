"""Echoes any Python iterator of pytrees on the host."""

import operator
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from echo_jax.echo.counts import Counts, UseInfo
from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.default_spec import (
    chosen_part,
    default_spec,
    free_memory,
    split_state,
)
from echo_jax.echo.driver import Driver, prefetched
from echo_jax.echo.plans import make_plan
from echo_jax.echo.reader import Reader
from echo_jax.echo.spec import AdaptiveSpec, AnySpec, EchoSpec, check_spec, num_outputs
from echo_jax.echo.stateful import PeekedIterator, iterator_of, length_of
from echo_jax.echo.stores.host import ItemStore, RingStore
from echo_jax.echo.stores.leaves import as_array
from echo_jax.echo.tree import flatten

__all__ = ["EchoIterator", "echo", "echo_batches"]


class EchoIterator(Iterator[Any]):
    """The iterator that `echo` returns; a context manager, which closes it."""

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: AnySpec | None,
        *,
        batch: bool = False,
        stacked: bool = False,
        drop_remainder: bool = False,
        tags: bool = False,
        prefetch: int | None = None,
        length: int | None = None,
    ):
        """Makes an iterator for `echo`, or for `echo_batches` if ``stacked``."""
        self._length = length
        self._batch, self._stacked = batch or stacked, stacked
        self._drop_remainder, self._with_tags = drop_remainder, tags
        self._prefetch = prefetch
        self._chooses = spec is None
        if spec is None:
            iterator = PeekedIterator(iterator)
            spec = _chosen(iterator)
        self._iterator = iterator
        self._tags: tuple[Any, Any] | None = None  # a plain tuple: set often
        self._build(spec)

    def _build(self, spec: AnySpec) -> None:
        batch, stacked = self._batch, self._stacked
        self._spec = spec
        ahead = prefetched(spec, self._prefetch)
        shape = (("batch",) if batch else ()) + (("unbatch",) if stacked else ())
        plan = make_plan(spec, options=shape)
        is_identity = not batch and not ahead and _uses_items_once(spec)
        self._size = spec.batch_size if batch else 1
        self._store: Any = ItemStore(plan.num_slots, copies=not is_identity)
        if batch:
            self._store = RingStore(plan.num_slots, stacked=stacked)
        # An identity never goes back to an item.
        next_anchor = None if is_identity else plan.next_anchor
        self._reader = Reader(
            self._iterator,
            # Any stacked item may be the anchor.
            next_anchor=_same if stacked else next_anchor,
            intake=self._store,
            depth=ahead * spec.batch_size,
        )
        self._driver = Driver(self._reader, plan, self._store)
        self._turn = self._driver.turn
        self._is_checked = not batch or stacked

    @property
    def counts(self) -> Counts:
        """The fresh items taken, and the uses and repeats made so far."""
        return self._driver.counts

    @property
    def log(self) -> DecisionLog | None:
        """The decisions of an adaptive echo so far; None in other modes."""
        return getattr(self._driver.plan, "log", None)

    @property
    def tags(self) -> UseInfo | None:
        """The tags of the latest output, None before the first."""
        return None if self._tags is None else UseInfo(*self._tags)

    def __iter__(self) -> "EchoIterator":
        """Returns itself; warns if the echo has ended."""
        self._turn.warn_if_ended()
        return self

    def __length_hint__(self) -> int:
        """Returns how many outputs a fixed echo makes of its whole upstream.

        For batches it is an estimate, because the size of a loader's last batch is
        unknown.
        """
        length, spec = self._length, self._spec
        if self._stacked and length is not None:
            length *= self._store.rows_of_first or spec.batch_size
        return num_outputs(
            spec, length, batch=self._batch, drop_remainder=self._drop_remainder
        )

    def __next__(self) -> Any:
        """Returns the next output, with its `UseInfo` if ``tags`` is set.

        Raises:
          Exception: The upstream raised an error. Nothing is lost: the next call asks
            the upstream again.
          RuntimeError: An earlier call was interrupted at a place from which the echo
            cannot go on.
          ValueError: The echo is closed, or another thread is using it.
        """
        with self._turn:
            if not self._is_checked:
                self._check_first()
            found = self._driver.next(self._size)
            while found and self._drop_remainder and found[1] - found[0] < self._size:
                # Whole batches may follow: a stochastic echo goes on after its last
                # fetch.
                self._turn.consistent = True
                found = self._driver.next(self._size)
            if found is None:
                raise self._turn.end()
            uses, (at, stop) = self._driver.uses, found
            if self._batch:
                output = self._store.read(uses.slots[0, at:stop])
                index, repeat = uses.fresh_index[0, at:stop], uses.repeat[0, at:stop]
            else:
                slot = int(uses.slots[0, at])
                output = self._store.read_one(slot)
                if uses.last is not None and uses.last[0, at]:
                    self._store.clear_one(slot)
                index, repeat = int(uses.fresh_index[0, at]), int(uses.repeat[0, at])
            self._tags = index, repeat
            return (output, self.tags) if self._with_tags else output

    def _check_first(self) -> None:
        """Warns if the items of batches look like batches themselves."""
        self._reader.ensure(1)
        self._is_checked = True
        if self._store.seems_stacked:
            warnings.warn(
                "each item that ej.echo(..., batch=True) stacks has the first axis "
                f"{self._store.seems_stacked} in common in all of its leaves. If the "
                "items are batches, use ej.echo_batches(loader, spec).",
                stacklevel=3,
            )

    def get_state(self) -> dict[str, Any]:
        """Returns plain data: the plan's integers, and the upstream's own state.

        The upstream's state is the one at the oldest item in use. An adaptive echo adds
        its log.

        Raises:
          TypeError: The upstream has no get_state and set_state.
        """
        state = self._driver.get_state()
        return {**state, "spec": chosen_part(self._spec)} if self._chooses else state

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues as the iterator that returned the state would have.

        It reads the items in use from the upstream again. A refused state changes
        nothing.

        Args:
          state: From `get_state`.

        Raises:
          ValueError: The state is not one of this echo, or the upstream no longer has
            the items that it had.
        """
        if self._chooses:
            state, spec = split_state(state)
            if spec != self._spec:
                # It was chosen with another amount of free memory.
                self._driver.close()
                self._build(spec)
        self._driver.set_state(state)
        self._tags = None

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; the upstream stays open."""
        self._driver.close()

    def __enter__(self) -> "EchoIterator":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _uses_items_once(spec: AnySpec) -> bool:
    """Returns whether each item is used once, in order."""
    if not isinstance(spec, EchoSpec) or spec.order != "consecutive":
        return False
    return spec.schedule.max_factor == 1


def _same(row: int) -> int:
    return row


class _SizedEchoIterator(EchoIterator):
    """An echo with a known number of outputs, for progress bars."""

    def __len__(self) -> int:
        return self.__length_hint__()


def _chosen(batches: PeekedIterator) -> AdaptiveSpec:
    """Returns the spec of an echo that was called without one."""
    try:
        leaves = [(path, as_array(path, x)) for path, x in flatten(batches.peek())]
    except StopIteration:
        leaves = []
    rows = max(leaves[0][1].shape[:1], default=1) if leaves else 1
    num_bytes = sum(leaf.nbytes for _, leaf in leaves)
    return default_spec(max(rows, 1), num_bytes // max(rows, 1), free_memory())


def echo(
    items: Iterable[Any],
    spec: AnySpec,
    *,
    batch: bool = False,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoIterator:
    """Repeats the items of any iterator of pytrees as a spec says.

    Use `echo_batches` for a loader that yields batches.

    The echo reads exactly the fresh items that an output needs. Its state is a few
    integers and the upstream's own state. A restore reads the items in use again.

    Items go out as read-only views of one private copy, also at factor 1. Batches go
    out as arrays of their own. Two uses never share writable memory.

    Args:
      items: Yields pytrees of dicts, lists and tuples with array leaves, and does not
        write into an item after it has yielded it. The echo's state can be saved if
        its iterator has ``get_state`` and ``set_state``, or if it has ``state_dict``
        and ``load_state_dict`` itself, like the loaders of PyTorch.
      spec: Description of the echo: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
      batch: Whether to stack ``spec.batch_size`` uses into one output, leaf by leaf
        along a new first axis. This is much faster than stacking them later. Items must
        have equal shapes and dtypes.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of output and `UseInfo`.
      prefetch: Batches of fresh items that a thread reads ahead; 0 reads on demand.
        None means 2 for an adaptive echo, which repeats items while fresh ones are not
        ready, and 0 for the other specs.

    Returns:
      The iterator, with ``counts``, ``tags``, ``log``, ``get_state``, ``set_state`` and
      ``close``; a context manager. It has a ``len`` if ``items`` has one and the spec
      is an `EchoSpec` without a function.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The spec is impossible, such as a buffer that is too small for
        ``spread`` without twins (two uses of an item in one batch).

    Warns:
      UserWarning: With ``batch=True``, if an item looks like a batch: all of its leaves
        have two or more rows in common. Also if an echo that has ended is iterated
        again.

    Example:
      >>> from echo_jax import EchoSpec
      >>> list(echo([10, 20], EchoSpec(factor=1.5)))
      [10, 20, 20]
    """
    check_spec(spec)
    iterator = EchoIterator(
        iterator_of(items),
        spec,
        batch=batch,
        drop_remainder=drop_remainder,
        tags=tags,
        prefetch=prefetch,
        length=length_of(items),
    )
    if operator.length_hint(iterator, -1) >= 0:
        iterator.__class__ = _SizedEchoIterator
    return iterator


def echo_batches(
    loader: Iterable[Any],
    spec: AnySpec | None = None,
    *,
    drop_remainder: bool = False,
    tags: bool = False,
    prefetch: int | None = None,
) -> EchoIterator:
    """Repeats the examples of a loader's batches, and yields batches.

    Without a spec it is an adaptive echo. It uses fresh examples while they come in
    time, and repeats examples while the loader is late. It chooses the loader's own
    batch size, at most 4 uses of an example, and a buffer of at most 64 batches and a
    tenth of the free memory. It logs its choice once, at level INFO of the logger
    ``echo_jax``.

    Args:
      loader: Yields batches: pytrees of arrays with one first axis in common. They may
        have another size than ``spec.batch_size``. See `echo` for its state.
      spec: Description of the echo: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
        ``batch_size`` is that of the output batches, and ``buffer`` counts examples.
        Without a spec the first batch is read at once, to choose one.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of batch and `UseInfo`.
      prefetch: How many batches a thread reads ahead; see `echo`.

    Returns:
      The iterator of batches, whose leaves are NumPy arrays; see `echo`. It has a
      ``__length_hint__`` if the loader has a ``len`` and the spec is an `EchoSpec`.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The spec is impossible. With the first batch, if its leaves have no
        first axis in common.

    Example:
      >>> import numpy as np
      >>> from echo_jax import EchoSpec
      >>> loader = [{"x": np.array([1, 2])}, {"x": np.array([3, 4])}]
      >>> batches = echo_batches(loader, EchoSpec(2, batch_size=4))
      >>> [batch["x"].tolist() for batch in batches]
      [[1, 1, 2, 2], [3, 3, 4, 4]]
    """
    return EchoIterator(
        iterator_of(loader),
        spec,
        stacked=True,
        drop_remainder=drop_remainder,
        tags=tags,
        prefetch=prefetch,
        length=length_of(loader),
    )
