"""Runs the pipeline with Grain, in threads or in worker processes.

The stages above the echo run in reader threads or worker processes. The stages below
it run in one background thread. The echo never runs inside a worker: its repeats would
cross the process boundary, which costs more than making them (measured:
docs/decisions.md).
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
from absl import flags

from echo_jax.data.pipeline.fresh import fresh_items
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.data.pipeline.spec import PipelineSpec
from echo_jax.data.pipeline.stages import Stages

# Passing an element costs about 50 us between threads and 300 us between processes. A
# list of items is one element.
_ITEMS_PER_LIST = 16
_WORKER_BUFFER = 2  # elements that wait for each process to be asked


class FreshTime:
    """Bounds on the seconds that a pipeline takes for a fresh batch, its t_up.

    While its consumer waits, the pipeline works at full speed; in between it may work
    ahead, or have no room. So a batch takes at least the waiting time, and at most all
    time. In a starved run the bounds meet. Threads start and caches fill before the
    first element, which is left out.
    """

    def __init__(
        self,
        *,
        elements_per_batch: float,
        held: int,
        now: Callable[[], float] = time.perf_counter,
    ):
        """``held`` is the most elements that the pipeline has in progress or ready."""
        self._per_batch, self._held, self._now = elements_per_batch, held, now
        # Elements, the seconds waited for them, and all seconds. They are one tuple,
        # because another thread reads it.
        self._seen = (0, 0.0, 0.0)
        self._last_s: float | None = None

    @property
    def held_batches(self) -> int:
        """The most fresh batches that the pipeline has in progress or ready."""
        return math.ceil(self._held / self._per_batch)

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """Waits for the next element, and counts it."""
        began_s = self._now()
        element = next(iterator)
        end_s = self._now()
        if self._last_s is not None:
            taken, waited_s, passed_s = self._seen
            waited_s += end_s - began_s
            self._seen = (taken + 1, waited_s, passed_s + end_s - self._last_s)
        self._last_s = end_s
        return element

    def restart(self) -> None:
        """Treats the next element as a first one again."""
        self._last_s = None

    def bounds(self) -> tuple[float, float]:
        """Returns the least and the most seconds that a fresh batch takes."""
        taken, waited_s, passed_s = self._seen
        # The least and the most elements that were made in the time.
        least, most = taken - self._held, taken + self._held
        low_s = waited_s / most if most else 0.0
        high_s = passed_s / least if least > 0 else math.inf
        return low_s * self._per_batch, high_s * self._per_batch


class WithFreshTime(grain.IterDataset):
    """Its parent's elements, with `fresh_time` for the trainer."""

    def __init__(self, parent: grain.IterDataset, fresh_time: FreshTime):
        super().__init__(parent)
        self.fresh_time = fresh_time

    def __iter__(self) -> grain.DatasetIterator:
        return self._parent.__iter__()


class TimedFresh(WithFreshTime):
    """Times how long the echo waits for each fresh element of a dataset."""

    def __iter__(self) -> grain.DatasetIterator:
        return _TimedIterator(self._parent.__iter__(), self.fresh_time)


class _TimedIterator(grain.DatasetIterator):
    copies = True  # Its arrays are new for every element.

    def __init__(self, parent: grain.DatasetIterator, fresh_time: FreshTime):
        super().__init__(parent)
        self._time = fresh_time
        self._time.restart()

    def __next__(self) -> Any:
        return self._time.next_of(self._parent)

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)
        self._time.restart()


class _FlattenLists(grain.IterDataset):
    def __iter__(self) -> grain.DatasetIterator:
        return _FlattenIterator(self._parent.__iter__())


class _FlattenIterator(grain.DatasetIterator):
    """Its state is the parent's state before the list, and a place in the list."""

    copies = True  # As `_TimedIterator`.

    def __init__(self, parent: grain.DatasetIterator):
        super().__init__(parent)
        self._list: list[Any] = []
        self._num_taken = 0
        self._state_before: Any = None

    def __next__(self) -> Any:
        if self._num_taken == len(self._list):
            self._read_list()
        item = self._list[self._num_taken]
        self._num_taken += 1
        return item

    def get_state(self) -> dict[str, Any]:
        if self._num_taken == len(self._list):
            return {"parent": self._parent.get_state(), "num_taken": 0}
        return {"parent": self._state_before, "num_taken": self._num_taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self._list, self._num_taken = [], 0
        if state["num_taken"]:
            self._read_list()
            self._num_taken = state["num_taken"]

    def _read_list(self) -> None:
        self._state_before = self._parent.get_state()
        self._list, self._num_taken = next(self._parent), 0


def grain_fresh(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard, *, in_batches: bool
) -> WithFreshTime:
    """Returns the endless stream of fresh elements: batches, or items."""
    items, rows = fresh_items(stages, pipeline, shard), shard.rows(pipeline.batch_size)
    if in_batches:
        dataset = items.batch(rows)
    else:
        dataset = items.batch(_ITEMS_PER_LIST, batch_fn=list)
    # Each thread holds two elements: one in progress and one ready.
    held = 2 * pipeline.threads
    stream = dataset.to_iter_dataset(
        grain.ReadOptions(num_threads=pipeline.threads, prefetch_buffer_size=held)
    )
    if pipeline.workers:
        if not flags.FLAGS.is_parsed():
            # Grain needs absl's flags to start workers, also in notebooks.
            flags.FLAGS.mark_as_parsed()
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=pipeline.workers, per_worker_buffer_size=_WORKER_BUFFER
            ),
            worker_init_fn=_leave_signals_to_the_trainer,
        )
        # Each worker holds one more between its threads and its buffer.
        held = pipeline.workers * (held + 1 + _WORKER_BUFFER)
    per_batch = 1 if in_batches else rows / _ITEMS_PER_LIST
    fresh_time = FreshTime(elements_per_batch=per_batch, held=held)
    timed = TimedFresh(stream, fresh_time)
    return timed if in_batches else WithFreshTime(_FlattenLists(timed), fresh_time)


def _leave_signals_to_the_trainer(worker: int, num_workers: int) -> None:
    del worker, num_workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
