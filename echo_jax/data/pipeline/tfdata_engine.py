"""Makes fresh elements with tf.data, whose threads read, decode and augment.

The graph calls the same Python functions as Grain, because TensorFlow's own image
operations would give other pixels. They hold the interpreter lock in the same places.
Waiting, decompression and resizing run in parallel threads. The echo runs on the host.

An element follows from its index, so an iterator's state is an index. A restored
iterator builds a new graph in about 0.5 s.
"""

import weakref
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from echo_jax.data.pipeline.fresh import fresh_items
from echo_jax.data.pipeline.grain_engine import FreshTime, TimedFresh
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.data.pipeline.spec import PipelineSpec
from echo_jax.data.pipeline.stages import Stages
from echo_jax.echo.adapters.tfdata import load_tensorflow

tf = load_tensorflow()
_ENDLESS = np.iinfo(np.int64).max


def tfdata_fresh(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard, *, in_batches: bool
) -> TimedFresh:
    """Returns the endless stream of fresh elements: batches, or items."""
    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")  # Their memory is jax's.
    rows, items = shard.rows(pipeline.batch_size), fresh_items(stages, pipeline, shard)
    stage = _Stage(lambda index: items[int(index)], _sample(stages, pipeline))
    fresh = _Elements(stage, pipeline, rows if in_batches else 0)
    # Elements in threads, in the queue, between both, and at the queue's end.
    held = pipeline.threads + pipeline.prefetch + 2
    fresh_time = FreshTime(elements_per_batch=1 if in_batches else rows, held=held)
    return TimedFresh(fresh, fresh_time)


class _Elements(grain.IterDataset):
    """Items of a tf.data graph as a Grain dataset, or batches of ``rows`` of them."""

    def __init__(self, stage: "_Stage", pipeline: PipelineSpec, rows: int):
        super().__init__()
        self.stage, self._pipeline, self._rows = stage, pipeline, rows

    def __iter__(self) -> "_ElementsIterator":
        return _ElementsIterator(self)

    def graph(self, first: int) -> Any:
        """Returns the graph that begins with some element."""
        pipeline, rows = self._pipeline, self._rows
        dataset = tf.data.Dataset.range(first * max(1, rows), _ENDLESS)
        if pipeline.threads:
            dataset = dataset.map(self.stage, pipeline.threads, deterministic=True)
        else:
            dataset = dataset.map(self.stage)
        dataset = dataset.batch(rows) if rows else dataset
        dataset = dataset.prefetch(pipeline.prefetch) if pipeline.prefetch else dataset
        options = tf.data.Options()
        # An automatic prefetch would read although data.prefetch is 0.
        options.experimental_optimization.inject_prefetch = False
        options.threading.private_threadpool_size = pipeline.threads + 2
        return dataset.with_options(options)


class _ElementsIterator(grain.DatasetIterator):
    def __init__(self, dataset: _Elements):
        super().__init__()
        self._dataset, self._next = dataset, 0
        # The running graph, or None. It must end before the interpreter, because its
        # threads call Python and could not end later.
        self._running: list[Any] = []
        weakref.finalize(self, self._running.clear)

    def __next__(self) -> Any:
        self._assert_not_closed()
        if not self._running:
            graph = self._dataset.graph(self._next)
            self._running.append(graph.as_numpy_iterator())
        try:
            element = next(self._running[0])
            self._next += 1
            return element
        except tf.errors.OpError as error:
            # The exception's traceback would keep the graph running.
            stage = self._dataset.stage
            failure, stage.failure = stage.failure or error.with_traceback(None), None
        self._running.clear()
        raise failure

    def get_state(self) -> dict[str, int]:
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Restores a state; the graph is built at the next request for an element."""
        if set(state) != {"next"}:
            raise ValueError(
                f"a state with the keys {sorted(state)} is none of data.pipeline="
                "tfdata; go on with the data.pipeline that it was saved with"
            )
        self._next = state["next"]
        self._running.clear()

    def close(self) -> None:
        """Stops the graph's reading ahead."""
        super().close()
        self._running.clear()


class _Stage:
    """A Python function of an index as an operation; keeps its last exception."""

    def __init__(self, function: Callable[[Any], Any], sample: Any):
        # ``sample`` is an example of its result.
        self._function = function
        arrays = tf.nest.map_structure(np.asarray, sample)
        tensors = tf.nest.map_structure(tf.constant, arrays)
        self._spec = tf.nest.map_structure(tf.TensorSpec.from_tensor, tensors)
        self.failure: BaseException | None = None

    def __call__(self, index: Any) -> Any:
        specs = tf.nest.flatten(self._spec)

        @tf.autograph.experimental.do_not_convert
        def run(index: Any) -> list[Any]:
            try:
                result = self._function(index)
                tf.nest.assert_same_structure(result, self._spec)
            except BaseException as error:
                self.failure = error
                raise
            return tf.nest.flatten(result)

        dtypes = [spec.dtype for spec in specs]
        outputs = tf.numpy_function(run, [index], dtypes, stateful=False)
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
                f"echo.stage=read with data.pipeline=tfdata needs records of bytes, "
                f"not {type(record).__name__}; use --config.echo.stage=decode"
            )
        return record
    item = stages.decode(record)
    if pipeline.after in ("augment", "batch") and stages.augment is not None:
        return stages.augment(item, 0)
    return item
