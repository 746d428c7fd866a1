"""The input pipeline: read, decode, augment, batch, with an echo after one stage.

The stages are pure functions, which Grain or tf.data runs. ``after`` names the stage
that the echo follows:

    after     reused are        each repeat costs        a repeat differs by
    read      raw records       decode, augment, batch   its augmentation
    decode    decoded items     augment, batch           its augmentation
    augment   augmented items   batch                    its neighbours
    batch     whole batches     nothing                  nothing

Records are shuffled by their index in every epoch, before they are read. This replaces
the shuffle buffer of the paper's baseline. It needs random access, and shuffles
perfectly.

Both engines yield the same batches, shuffled or not, and both resume at any batch:

    data.pipeline   above the echo             echo               below it
    grain           threads or processes       on the host        one thread
    tfdata          threads, in a tf.data map  in the graph       threads

The sequence is a function of the records, of ``after``, ``batch_size`` and ``seed``,
and of the echo's spec. Engine, threads, workers and prefetching only change when a
batch is ready. One exception: an adaptive echo repeats items while fresh items are not
ready, and logs this. An iterator's state is JSON and exact at every batch. It can be
restored with other threads or prefetching, but not with another engine or number of
workers.
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
    """Returns the endless training batches with the echo's tags; sizes are global."""
    if pipeline.engine == "tfdata":
        # TensorFlow is an optional extra, and its import takes ten seconds.
        from echo_jax.data.pipeline.tfdata_engine import tfdata_batches

        return tfdata_batches(stages, pipeline, spec, shard)
    return grain_batches(stages, pipeline, spec, shard)


# Element r of batch c is fresh item ``c * batch_size + r`` of `train_dataset`, so an
# echo of these batches repeats the same items. The device echo makes batches ahead.
def fresh_batches(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> grain.IterDataset:
    """Returns the endless fresh batches for an echo on the devices."""
    if pipeline.after not in ("decode", "augment"):
        raise ValueError(
            f"echo.after={pipeline.after!r} has no echo on a device; use decode or "
            "augment, or --config.echo.where=host."
        )
    if pipeline.engine == "tfdata":
        from echo_jax.data.pipeline.tfdata_engine import tfdata_fresh_batches

        return tfdata_fresh_batches(stages, pipeline, shard)
    return grain_fresh_batches(stages, pipeline, shard)
