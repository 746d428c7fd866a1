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

    data.pipeline   above the echo               echo and below it
    grain           threads or processes         one thread
    tfdata          threads, in a tf.data map    one thread

The sequence is a function of the records, of ``after``, ``batch_size`` and ``seed``,
and of the echo's spec. Engine, threads, workers and prefetching only change when a
batch is ready. One exception: an adaptive echo repeats items while fresh items are not
ready, and logs this. An iterator's state is JSON and exact at every batch. It can be
restored with other threads or prefetching, but not with another engine or number of
workers.
"""

from dataclasses import replace
from functools import partial

import grain
from grain.experimental import ThreadPrefetchIterDataset

from echo_jax.data.pipeline.fresh import below_echo
from echo_jax.data.pipeline.grain_engine import WithFreshTime, grain_fresh
from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.data.pipeline.spec import PipelineSpec
from echo_jax.data.pipeline.stages import BroadcastTags, Stages
from echo_jax.echo.adapters import grain as echo_grain
from echo_jax.echo.spec import AdaptiveSpec, AnySpec


def train_dataset(
    stages: Stages, pipeline: PipelineSpec, spec: AnySpec, shard: DataShard = SINGLE
) -> grain.IterDataset:
    """Returns the endless training batches with the echo's tags; sizes are global."""
    in_batches = pipeline.after == "batch"
    if in_batches:
        spec = replace(spec, batch_size=1)
    else:
        spec = shard.echo(replace(spec, batch_size=pipeline.batch_size))
    fresh = _fresh(stages, pipeline, shard, in_batches=in_batches)
    rows, ahead = shard.rows(pipeline.batch_size), None
    prefetch = pipeline.prefetch
    if isinstance(spec, AdaptiveSpec):
        # Buffer fresh data for the trainer, not repeats that were decided too early.
        ahead, prefetch = max(1, prefetch), min(1, prefetch)
    below = below_echo(stages, pipeline, shard)
    if below is None:
        is_gathered = not in_batches
        batches = echo_grain.echo(
            fresh, spec, batch=is_gathered, tags=True, prefetch=ahead
        )
        index = partial(shard.global_index, rows=rows)
        batches = batches.map(
            BroadcastTags(rows, index) if is_gathered else BroadcastTags(rows)
        )
    else:
        uses = echo_grain.echo(fresh, spec, tags=True, prefetch=ahead)
        batches = uses.batch(rows, drop_remainder=True, batch_fn=below)
    batches = ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)
    return WithFreshTime(batches, fresh.fresh_time)


# Element r of batch c is fresh item ``c * batch_size + r`` of `train_dataset`, so an
# echo of these batches repeats the same items. The device echo makes batches ahead.
def fresh_batches(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard = SINGLE
) -> WithFreshTime:
    """Returns the endless fresh batches for an echo on the devices."""
    if pipeline.after not in ("decode", "augment"):
        raise ValueError(
            f"echo.stage={pipeline.after!r} has no echo on a device; use decode or "
            "augment, or --config.echo.buffer_on=host."
        )
    return _fresh(stages, pipeline, shard, in_batches=True)


def _fresh(
    stages: Stages, pipeline: PipelineSpec, shard: DataShard, *, in_batches: bool
) -> WithFreshTime:
    if pipeline.engine == "tfdata":
        # TensorFlow is an optional extra, and its import takes ten seconds.
        from echo_jax.data.pipeline.tfdata_engine import tfdata_fresh

        return tfdata_fresh(stages, pipeline, shard, in_batches=in_batches)
    return grain_fresh(stages, pipeline, shard, in_batches=in_batches)
