"""The iterator of an echo, on the host and on devices, which differ in their store."""

import sys
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any, Self

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.echo.default_spec import split_off_spec
from echo_jax.echo.driver import Driver, Turn
from echo_jax.echo.spec import AnySpec, EchoSpec, left_out
from echo_jax.echo.stats import Clock, Counts, Stats, Totals, UseInfo


class EchoIterator(Iterator[Any]):
    """The iterator that `echo` returns; a context manager, which closes it.

    Attributes:
      tags: The tags of the latest output, None before the first; in several processes
        the tags of this process's rows.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        spec: AnySpec | None,
        *,
        batch: bool,
        drop_remainder: bool = False,
        tags: bool = False,
        length: int | None = None,
        loader_rows: int = 0,
    ):
        # A spec that leaves something out is completed by the first batch.
        self._chooses = spec is None or bool(left_out(spec))
        self._iterator, self._given = iterator, spec
        self._spec = None if self._chooses else spec
        self._batch, self._drop_remainder = batch, drop_remainder
        self._with_tags, self._length, self._loader_rows = tags, length, loader_rows
        self._turn, self._driver, self._clock = Turn(), None, Clock()
        self.tags: UseInfo | None = None

    def _start(self, turn: Turn) -> Driver:
        """Makes the driver, and the spec if there is none."""
        raise NotImplementedError

    def _read(self, driver: Driver, at: int, stop: int) -> tuple[Any, UseInfo]:
        """Reads the decided uses at some places."""
        raise NotImplementedError

    def _items(self, length: int) -> int:
        """Returns how many items an upstream of a length gives, about."""
        return length

    def _open(self) -> Driver:
        """Returns the driver; makes it in a turn of its own if there is none."""
        if self._driver is None:
            with self._turn:
                self._driver = self._driver or self._start(self._turn)
        return self._driver

    @property
    def counts(self) -> Counts:
        """The fresh items taken, and the uses and repeats made so far."""
        return Counts() if self._driver is None else self._driver.counts

    @property
    def log(self) -> DecisionLog | None:
        """The decisions of an adaptive echo so far; None in other modes."""
        return None if self._driver is None else self._driver.log

    def __iter__(self) -> Self:
        """Returns itself; after an end it starts another pass over the loader.

        Warns if the loader is an iterator, which cannot be started again.
        """
        driver = self._driver
        if self._turn.ended and driver is not None and driver.can_restart:
            driver.begin_epoch()
        self._turn.warn_if_ended()
        return self

    def __length_hint__(self) -> int:
        """Returns how many outputs a fixed echo makes of a pass over its upstream.

        For batches it is an estimate, because the size of a loader's last batch is
        unknown.
        """
        spec = getattr(self._driver and self._driver.plan, "spec", self._spec)
        if self._length is None or not isinstance(spec, EchoSpec):
            return NotImplemented
        uses = spec.schedule.total(self._items(self._length))
        if uses is None or uses > sys.maxsize:
            return NotImplemented
        size = spec.batch_size if self._batch else 1
        return uses // size if self._drop_remainder else -(-uses // size)

    def __next__(self) -> Any:
        """Returns the next output, with its `UseInfo` if ``tags`` is set.

        Raises:
          Exception: The upstream raised an error. Nothing is lost: the next call asks
            the upstream again.
          RuntimeError: An earlier call was interrupted at a place from which the echo
            cannot go on.
          ValueError: The echo is closed, or another thread is using it.
        """
        driver, turn, began = self._open(), self._turn, perf_counter()
        with turn:
            turn.check()
            size = driver.plan.batch if self._batch else 1
            found = driver.next(size)
            while found and self._drop_remainder and found[1] - found[0] < size:
                # Whole batches may follow: a stochastic echo goes on after its last
                # fetch.
                turn.consistent = True
                found = driver.next(size)
            if found is None:
                turn.ended = True
                raise StopIteration
            output, self.tags = self._read(driver, *found)
            if self._clock.add(began, driver.waited_s):
                self._clock.log(self.stats())
            return (output, self.tags) if self._with_tags else output

    def stats(self, since_last: bool = False) -> Stats:
        """Returns how long the loop waits for data, to be logged at any step.

        A call takes microseconds, and a draw hardly longer. `str` of the result is one
        line. Where a loop waits for more than a tenth of its time, the logger
        ``echo_jax`` says so now and then, at level INFO.

        Args:
          since_last: Whether to count from the last call with ``since_last`` on, or
            else from the start.

        Returns:
          ``waited_s``, the seconds that draws waited for fresh data; ``waited_share``,
          their share of the time; ``longest_wait_s`` and ``longest_wait_at``, the
          update, counted from 0; ``step_s``, the seconds between two draws, without
          waiting; ``fresh_batch_s``, the seconds that the loader takes for as many
          examples as a batch has; ``R``, the ratio of the last two;
          ``uses_per_fresh``; and ``ready_batches``, which were read ahead. NaN stands
          for what is not known yet. In several processes also ``slowest_process``, by
          its loader.
        """
        driver, counts = self._open(), self.counts
        totals = Totals(
            self._clock.draws,
            self._clock.waited_s,
            *driver.reading_s,
            counts.fresh,
            counts.uses,
        )
        size = self._spec.batch_size or 1 if self._spec else 1
        stats = self._clock.stats(totals, since_last, size / max(1, self._items(1)))
        stats["ready_batches"] = driver.ready_batches
        if (slowest := getattr(self._iterator, "slowest", None)) is not None:
            stats["slowest_process"] = slowest
        return stats

    def get_state(self) -> dict[str, Any]:
        """Returns plain data: the plan's integers, and the upstream's own state.

        The upstream's state is the one at the oldest item in use. An adaptive echo adds
        its log.

        Raises:
          TypeError: The upstream has no get_state and set_state.
        """
        try:
            state = self._open().get_state()
        except StopIteration:  # An empty upstream has the state of its end alone.
            upstream: Any = self._iterator
            return {"plan": {}, "skip": 0, "upstream": upstream.get_state()}
        if self._chooses and (spec := self._spec) is not None:
            state["spec"] = {"batch_size": spec.batch_size, "buffer": spec.buffer}
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues as the iterator that returned the state would have.

        It reads the items in use from the upstream again. A refused state changes
        nothing.

        Args:
          state: From `get_state`.

        Raises:
          ValueError: The state is not one of this echo, or the upstream no longer has
            the items that it had.
        """
        is_empty = isinstance(state, Mapping) and state.get("plan") == {}
        try:
            if self._chooses and not is_empty:
                state, spec = split_off_spec(state, self._given)
                if self._driver is not None and spec != self._spec:
                    # It was chosen with another amount of free memory.
                    self._driver.close()
                    self._driver, self._turn = None, Turn()
                self._spec = spec
            self._open().set_state(state)
        except StopIteration as error:
            if not is_empty:
                raise ValueError(
                    "the upstream is empty, but the state is not one of an empty "
                    "stream; restore it over the same data"
                ) from error
        self.tags = None

    def __reduce__(self) -> Any:
        raise TypeError(
            "an echo is not copied or pickled, because it reads its loader as it goes. "
            "Make another one, and give it set_state(echo.get_state())."
        )

    def close(self) -> None:
        """Stops reading ahead, and refuses all further use; the upstream stays open."""
        self._turn.close()
        if self._driver is not None:
            self._driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
