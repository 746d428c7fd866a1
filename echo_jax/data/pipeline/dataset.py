"""The input pipeline: read, decode, augment, batch, with an echo after one stage.

The stages are pure functions; Grain or tf.data runs them. One word decides behind
which of them the echo sits:

    after     reused are        each repeat costs        a repeat differs by
    read      raw records       decode, augment, batch   its augmentation
    decode    decoded items     augment, batch           its augmentation
    augment   augmented items   batch                    its neighbours
    batch     whole batches     nothing                  nothing

Records are shuffled by their index, anew in every epoch, before they are read.
This takes the place of the shuffle buffer with which the paper's baseline
decorrelates its stream: it needs random access, and shuffles perfectly.

Both engines yield the same batches, shuffled or not, and both resume at any batch:

    data.pipeline   above the echo             echo               below it
    grain           threads or processes       on the host        one thread
    tfdata          threads, in a tf.data map  in the graph       threads
"""

import grain

from echo_jax.data.pipeline.grain_engine import grain_batches, grain_fresh_batches
from echo_jax.data.pipeline.spec import EchoAfter, PipelineSpec
from echo_jax.data.pipeline.stages import Stages
from echo_jax.echo.shard import SINGLE, DataShard
from echo_jax.echo.spec import AnySpec

__all__ = ["EchoAfter", "PipelineSpec", "fresh_batches", "train_dataset"]


def train_dataset(
    stages: Stages, pipeline: PipelineSpec, spec: AnySpec, shard: DataShard = SINGLE
) -> grain.IterDataset:
    """Returns the endless stream of training batches, with an echo in it.

    The sequence is a function of the records, of `pipeline`'s ``after``,
    ``batch_size`` and ``seed``, and of `spec`. The engine, threads, workers and
    prefetching change when a batch is ready, never what is in it; but an adaptive echo
    repeats what it has while fresh items are not ready, and its log says when it did.
    An iterator's state is JSON, and exact at every batch; it can be restored with other
    threads or another prefetch, but not with another engine or number of workers.

    Args:
      stages: Records and what they go through.
      pipeline: Placement of the echo, sizes, and parallelism.
      spec: The echo, of any mode. Its ``batch_size`` is set here: one batch behind
        "batch", else the examples of a batch.
      shard: Of every batch, where several processes share a run: it is echoed for
        itself. Sizes in `pipeline` and `spec` are those over all shards.

    Returns:
      Batches: the item's arrays with a leading axis of ``batch_size``, and
      ``"fresh_index"`` (``int64[B]``) and ``"repeat"`` (``int32[B]``), the
      echo's tags of each example. Behind "batch" they count fresh batches.

    Raises:
      ImportError: The engine is tf.data, and TensorFlow is not installed.

    Example:
      >>> from echo_jax import EchoSpec
      >>> stages = Stages([b"ab", b"cd", b"ef"], decode=lambda r: {"x": np.array(r[0])})
      >>> pipeline = PipelineSpec(after="decode", batch_size=2)
      >>> with closing(iter(train_dataset(stages, pipeline, EchoSpec(2)))) as batches:
      ...     next(batches)["repeat"].tolist()
      [0, 1]
    """
    if pipeline.engine == "tfdata":
        # Imported here: TensorFlow is an extra, and takes ten seconds.
        from echo_jax.data.pipeline.tfdata_engine import tfdata_batches

        return tfdata_batches(stages, pipeline, spec, shard)
    return grain_batches(stages, pipeline, spec, shard)


def fresh_batches(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> grain.IterDataset:
    """Returns the endless stream of fresh batches for an echo on the devices.

    Element r of batch c is fresh item ``c * batch_size + r`` of `train_dataset` with
    the same placement, so that an echo of them repeats the same items. Nothing makes
    batches ahead but the reader threads or workers: the device echo does.

    Args:
      stages: Records and what they go through.
      pipeline: Sizes, parallelism, and the last stage in ``after``: ``"decode"``, or
        ``"augment"`` for items augmented once, on the host.
      shard: Of every batch.

    Returns:
      Batches: the item's arrays with a leading axis of ``batch_size``.

    Raises:
      ImportError: The engine is tf.data, and TensorFlow is not installed.
      ValueError: The last stage is another one.

    Example:
      >>> stages = Stages([b"ab", b"cd", b"ef"], decode=lambda r: {"x": np.array(r[0])})
      >>> pipeline = PipelineSpec(after="decode", batch_size=2)
      >>> with closing(iter(fresh_batches(stages, pipeline))) as batches:
      ...     next(batches)["x"].shape
      (2,)
    """
    if pipeline.after not in ("decode", "augment"):
        raise ValueError(
            f"echo.after={pipeline.after!r} has no echo on a device; use decode or "
            "augment, or --config.echo.where=host."
        )
    if pipeline.engine == "tfdata":
        # Imported here, as above.
        from echo_jax.data.pipeline.tfdata_engine import tfdata_fresh_batches

        return tfdata_fresh_batches(stages, pipeline, shard)
    return grain_fresh_batches(stages, pipeline, shard)
