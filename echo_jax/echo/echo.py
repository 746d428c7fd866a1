"""Echoes any Python iterator of pytrees on the host."""

import operator
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from echo_jax.echo.default_spec import chosen_spec, free_memory
from echo_jax.echo.driver import Driver, Turn, prefetched
from echo_jax.echo.iterator import EchoIterator
from echo_jax.echo.plans import make_plan
from echo_jax.echo.spec import AnySpec, EchoSpec, check_spec, completed, left_out
from echo_jax.echo.stats import UseInfo
from echo_jax.echo.stores.host import ItemStore, RingStore
from echo_jax.echo.stores.leaves import as_array
from echo_jax.echo.tree import flatten
from echo_jax.echo.upstream import (
    ReadAhead,
    Reader,
    batch_size_of,
    iterator_of,
    length_of,
)


class HostEchoIterator(EchoIterator):
    """The iterator of `echo`, or of `echo_batches` if ``stacked``."""

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: AnySpec | None,
        *,
        batch: bool = False,
        stacked: bool = False,
        prefetch: int | None = None,
        **common: Any,
    ):
        if spec is not None and not stacked:
            spec = completed(spec)
        if spec is None or left_out(spec):
            iterator = ReadAhead(iterator, depth=0)
        super().__init__(iterator, spec, batch=batch or stacked, **common)
        self._stacked, self._prefetch = stacked, prefetch
        self._open()

    def _start(self, turn: Turn) -> Driver:
        if chooses := self._spec is None:
            assert isinstance(self._iterator, ReadAhead)
            self._spec = _chosen(self._given, self._iterator)
        spec, batch, stacked = self._spec, self._batch, self._stacked
        ahead = prefetched(spec, self._prefetch)
        shape = ("batch",) * batch + ("unbatch",) * stacked
        plan = make_plan(spec, options=shape)
        is_once = (
            isinstance(spec, EchoSpec)
            and spec.order == "consecutive"
            and spec.schedule.max_factor == 1
        )
        is_identity = is_once and not batch and not ahead
        next_anchor: Any = None if is_identity else plan.next_anchor
        if stacked or (is_once and batch):
            # Any stacked item may be the anchor. Items that are used once go back to
            # the start of an output.
            next_anchor = partial(_next_multiple, 1 if stacked else spec.batch_size)
        if batch:
            self._store: Any = RingStore(
                plan.num_slots,
                stacked=stacked,
                loader_rows=self._loader_rows,
                chose_size=chooses and not getattr(self._given, "batch_size", None),
            )
        else:
            self._store = ItemStore(plan.num_slots, copies=not is_identity)
        self._reader = Reader(
            self._iterator,
            next_anchor=next_anchor,
            intake=self._store,
            depth=ahead * spec.batch_size,
        )
        return Driver(self._reader, plan, self._store, turn)

    def _items(self, length: int) -> int:
        if not self._stacked or self._spec is None:
            return length
        return length * (self._store.rows_of_first or self._spec.batch_size)

    def _read(self, driver: Driver, at: int, stop: int) -> tuple[Any, UseInfo]:
        uses = driver.uses
        if self._batch:
            index, repeat = uses.fresh_index[0, at:stop], uses.repeat[0, at:stop]
            return self._store.read(uses.slots[0, at:stop]), UseInfo(index, repeat)
        slot = int(uses.slots[0, at])
        item = self._store.read_one(slot)
        if uses.last is not None and uses.last[0, at]:
            self._store.clear_one(slot)
        return item, UseInfo(int(uses.fresh_index[0, at]), int(uses.repeat[0, at]))


def _next_multiple(size: int, row: int) -> int:
    return -(-row // size) * size


class _SizedEchoIterator(HostEchoIterator):
    """An echo with a known number of outputs, for progress bars."""

    def __len__(self) -> int:
        return self.__length_hint__()


def _chosen(spec: AnySpec | None, batches: ReadAhead) -> AnySpec:
    """Returns a spec, with what it leaves out chosen by the first batch."""
    try:
        leaves = [as_array(path, leaf) for path, leaf in flatten(batches.peek())]
    except StopIteration:
        leaves = []
    rows = max((1, *leaves[0].shape[:1])) if leaves else 1
    num_bytes = sum(leaf.nbytes for leaf in leaves)
    return chosen_spec(spec, rows, num_bytes // rows, free_memory())


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
      items: Yields pytrees of dicts, lists and tuples with array leaves. An item is
        copied before the next one is asked for, so the iterator may refill its arrays.
        The echo's state can be saved if its iterator has ``get_state`` and
        ``set_state``, or if it has ``state_dict`` and ``load_state_dict`` itself, like
        the loaders of PyTorch.
      spec: Description of the echo: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
      batch: Whether to stack ``spec.batch_size`` uses into one output, leaf by leaf
        along a new first axis. This is much faster than stacking them later. Items must
        have equal shapes and dtypes.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of output and `UseInfo`.
      prefetch: Batches of fresh items that a thread keeps ready, while it reads the
        next; 0 reads on demand.
        None means 2 for an adaptive echo, which repeats items while fresh ones are not
        ready, and 0 for the other specs.

    Returns:
      The iterator, with ``counts``, ``tags``, ``log``, ``get_state``, ``set_state`` and
      ``close``; a context manager. It has a ``len`` if ``items`` has one and the spec
      is an `EchoSpec` without a function.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The spec is impossible, such as a buffer that is too small for
        ``spread`` to have no item twice in a batch.

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
    iterator = HostEchoIterator(
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
    time, and repeats examples while the loader is late, each at most 4 times. What it
    chooses is logged once, at level INFO of the logger ``echo_jax``.

    Args:
      loader: Yields batches: pytrees of arrays with one first axis in common. They may
        have another size than ``spec.batch_size``. See `echo` for its state.
      spec: Description of the echo: an `EchoSpec`, `AdaptiveSpec` or `StochasticSpec`.
        ``batch_size`` is of the output batches, and ``buffer`` counts examples.
        What it leaves out is chosen by the first batch, which is then read at once: the
        loader's batch size, order ``spread``, and a buffer of at most 64 batches and a
        tenth of the free memory. So ``EchoSpec(4)`` uses each example 4 times, far
        apart.
      drop_remainder: Whether to leave out a last, smaller batch.
      tags: Whether to yield pairs of batch and `UseInfo`.
      prefetch: How many batches a thread keeps ready; see `echo`.

    Returns:
      The iterator of batches, whose leaves are NumPy arrays; see `echo`. It has a
      ``__length_hint__`` if the loader has a ``len`` and the spec is an `EchoSpec`.

    Raises:
      TypeError: The spec or an option has another type.
      ValueError: The spec is impossible. With the first batch, if its leaves have
        different numbers of rows, or if a list in it may be one of examples.

    Example:
      >>> import numpy as np
      >>> from echo_jax import EchoSpec
      >>> loader = [{"x": np.array([1, 2])}, {"x": np.array([3, 4])}]
      >>> batches = echo_batches(loader, EchoSpec(2, order="consecutive", batch_size=4))
      >>> [batch["x"].tolist() for batch in batches]
      [[1, 1, 2, 2], [3, 3, 4, 4]]
    """
    return HostEchoIterator(
        iterator_of(loader),
        spec,
        stacked=True,
        drop_remainder=drop_remainder,
        tags=tags,
        prefetch=prefetch,
        length=length_of(loader),
        loader_rows=batch_size_of(loader),
    )
