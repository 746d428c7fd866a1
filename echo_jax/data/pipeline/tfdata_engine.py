"""Runs the pipeline with tf.data, with the echo in its graph.

The graph calls the same Python functions as Grain, because TensorFlow's own image
operations would give other pixels. They hold the interpreter lock in the same places.
Waiting, decompression and resizing run in parallel threads.

A graph decides nothing while it runs, so it contains only a fixed echo. Other echoes
run on the host, with the stages below them. The waiting time of an echo in the graph is
not measured.

A checkpoint of tf.data holds the elements in use. An iterator's state here is the state
of the echo's plan, which is a few integers. A restored iterator builds a new graph in
about 0.5 s. The graph starts with the oldest item in use, and repeats the same reads as
a restored echo on the host.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import grain
import numpy as np

from echo_jax.data.pipeline.bad_items import BadItems
from echo_jax.data.pipeline.fresh import TakeNote, below_echo, fresh_items
from echo_jax.data.pipeline.grain_engine import FreshTime, TimedFresh
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.data.pipeline.spec import PipelineSpec
from echo_jax.data.pipeline.stages import BroadcastTags, Item, Stages
from echo_jax.echo.adapters import tfdata
from echo_jax.echo.adapters.tfdata_graph import tf
from echo_jax.echo.counts import UseInfo
from echo_jax.echo.plans.base import outputs_of
from echo_jax.echo.plans.fixed import FixedPlan
from echo_jax.echo.spec import EchoSpec

_ENDLESS = np.iinfo(np.int64).max


def tfdata_fresh(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard, *, in_batches: bool
) -> TimedFresh:
    """Returns fresh elements, in batches or one by one."""
    fresh = TfdataBatches(stages, pipeline, None, shard, in_batches=in_batches)
    per_batch = 1 if in_batches else shard.rows(pipeline.batch_size)
    # Elements in threads, in the queue, between both, and at the queue's end.
    held = pipeline.threads + pipeline.prefetch + 2
    fresh_time = FreshTime(elements_per_batch=per_batch, held=held)
    return TimedFresh(fresh, fresh_time, fresh.bad_items)


class TfdataBatches(grain.IterDataset):
    """Batches of a tf.data graph as a Grain dataset; uses only Grain's shuffle."""

    def __init__(
        self,
        stages: Stages,
        pipeline: PipelineSpec,
        spec: EchoSpec | None,
        shard: DataShard,
        *,
        in_batches: bool = True,
    ):
        """Reads one record; `spec` is None for fresh elements without tags."""
        super().__init__()
        if tf.config.list_physical_devices("GPU"):
            # Their memory is jax's.
            tf.config.set_visible_devices([], "GPU")
        self._pipeline, self._rows = pipeline, shard.rows(pipeline.batch_size)
        # Without a spec, the echo uses each batch once.
        self.spec = EchoSpec(1, 1, "consecutive", 1) if spec is None else spec
        self._is_tagged = spec is not None
        self._of_batches = pipeline.after == "batch" or (spec is None and in_batches)
        tfdata.echo(self.spec)  # Refuse an impossible spec at once.
        sample = _sample(stages, pipeline)
        items = fresh_items(stages, pipeline, shard)
        self.bad_items = BadItems(pipeline.items_per_index)
        take_note = TakeNote(self.bad_items)
        self._above = _Stage(lambda index: take_note(items[int(index)]), sample)
        self._global_index: Callable[[Any], Any] = lambda index: index
        if not self._of_batches:
            self._global_index = partial(shard.global_index, rows=self._rows)
        self._below = None
        below = below_echo(stages, pipeline, shard)
        if self._is_tagged and not self._of_batches and below is not None:
            sample = below.finish(sample, UseInfo(0, 0))
            self._below = _Stage(
                lambda item, index, repeat: below.finish(item, UseInfo(index, repeat)),
                sample,
            )

    def __iter__(self) -> "_TfdataIterator":
        return _TfdataIterator(self)

    def graph(self, state: dict[str, int]) -> tf.data.Dataset:
        """Returns the graph that continues from a state of the echo's plan."""
        pipeline, anchor = self._pipeline, state["anchor"]
        first = anchor * self._rows if self._of_batches else anchor
        indices = tf.data.Dataset.range(first, _ENDLESS)
        dataset = self._map(indices, self._above)
        if self._of_batches:
            dataset = dataset.batch(self._rows)
        is_item = self._of_batches or not self._is_tagged
        is_gathered = not is_item and self._below is None
        dataset = dataset.apply(
            tfdata.echo(self.spec, batch=is_gathered, tags=True, state=state)
        )
        if self._below is not None:
            below = self._below
            dataset = self._map(dataset, lambda item, tags: (below(item, *tags), tags))
            dataset = dataset.batch(self._rows)
        dataset = dataset.prefetch(pipeline.prefetch) if pipeline.prefetch else dataset
        options = tf.data.Options()
        # An automatic prefetch would read although data.prefetch is 0.
        options.experimental_optimization.inject_prefetch = False
        # A waiting read blocks a thread: count those above, below and beside the echo.
        options.threading.private_threadpool_size = 2 * pipeline.threads + 2
        return dataset.with_options(options)

    def finished(self, batch: Item, tags: UseInfo) -> Item:
        """Returns a batch of the graph in the form that the trainer expects."""
        finish = BroadcastTags(self._rows, self._global_index)
        return finish((batch, tags)) if self._is_tagged else batch

    def take_failure(self) -> BaseException | None:
        """Returns and forgets a stage's exception, which the graph only quotes."""
        for stage in (self._above, self._below):
            if stage is not None and stage.failure is not None:
                failure, stage.failure = stage.failure, None
                return failure
        return None

    def _map(
        self, dataset: tf.data.Dataset, function: Callable[..., Any]
    ) -> tf.data.Dataset:
        if threads := self._pipeline.threads:
            return dataset.map(function, threads, deterministic=True)
        return dataset.map(function)


class _TfdataIterator(grain.DatasetIterator):
    """Runs the graph, and advances the echo's plan beside it for the state."""

    def __init__(self, dataset: TfdataBatches):
        super().__init__()
        self._dataset = dataset
        # With room a batch is decided as a whole.
        self._plan = FixedPlan(dataset.spec)
        # The running graph, or None. It must end before the interpreter, because its
        # threads call Python and could not end later.
        self._running: list[Any] = []
        weakref.finalize(self, self._running.clear)

    def __next__(self) -> Item:
        self._assert_not_closed()
        if not self._running:
            graph = self._dataset.graph(self._plan.get_state())
            self._running.append(graph.as_numpy_iterator())
            size = self._dataset.spec.batch_size
            self._beside = outputs_of(self._plan, sys.maxsize, size)
        batch, tags, failure = {}, UseInfo(0, 0), None
        try:
            batch, tags = next(self._running[0])
        except tf.errors.OpError as error:
            # The exception's traceback would keep the graph running.
            failure = self._dataset.take_failure() or error.with_traceback(None)
        if failure is not None:
            self._running.clear()
            raise failure
        next(self._beside)
        return self._dataset.finished(batch, UseInfo(*tags))

    def get_state(self) -> dict[str, Any]:
        return {"plan": self._plan.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a state; the graph is built at the next request for a batch."""
        if set(state) != {"plan"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is none of data.pipeline="
                "tfdata; go on with the data.pipeline that it was saved with"
            )
        self._plan.check_state(state["plan"])
        self._plan.set_state(state["plan"])
        self._running.clear()

    def close(self) -> None:
        """Stops the graph's reading ahead."""
        super().close()
        self._running.clear()


class _Stage:
    """A Python function as an operation of a graph; keeps its last exception."""

    def __init__(self, function: Callable[..., Any], sample: Any):
        """Wraps `function`; `sample` is an example of its result."""
        self._function = function
        arrays = tf.nest.map_structure(np.asarray, sample)
        tensors = tf.nest.map_structure(tf.constant, arrays)
        self._spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, tensors)
        self.failure: BaseException | None = None

    def __call__(self, *inputs: Any) -> Any:
        flat, specs = tf.nest.flatten(inputs), tf.nest.flatten(self._spec)

        @tf.autograph.experimental.do_not_convert
        def run(*values: Any) -> list[Any]:
            try:
                result = self._function(*tf.nest.pack_sequence_as(inputs, values))
                tf.nest.assert_same_structure(result, self._spec)
            except BaseException as error:
                self.failure = error
                raise
            return tf.nest.flatten(result)

        dtypes = [spec.dtype for spec in specs]
        outputs = tf.numpy_function(run, flat, dtypes, stateful=False)
        shaped = [
            tf.ensure_shape(output, spec.shape)
            for output, spec in zip(outputs, specs, strict=True)
        ]
        return tf.nest.pack_sequence_as(self._spec, shaped)


def _sample(stages: Stages, pipeline: PipelineSpec) -> Any:
    # Bypass the simulated storage: this is not a read of the stream.
    record = stages.source[0]
    if pipeline.after == "read":
        if not isinstance(record, bytes):
            raise TypeError(
                f"echo.after=read with data.pipeline=tfdata needs records of bytes, "
                f"not {type(record).__name__}; use --config.echo.after=decode"
            )
        return record
    item = stages.decode(record)
    if pipeline.after in ("augment", "batch") and stages.augment is not None:
        return stages.augment(item, 0)
    return item
