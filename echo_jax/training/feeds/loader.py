"""Reads fresh batches, as they are before the echo of a run."""

from collections.abc import Iterator, Sequence

from echo_jax.config.run import RunSpec
from echo_jax.data.pipeline.shard import DataShard
from echo_jax.echo.spec import EchoSpec
from echo_jax.training.feeds.feed import JoinedBatches
from echo_jax.workloads.base import Batch, Workload


def upstream_of_feed(
    workload: Workload, config: RunSpec, shards: Sequence[DataShard]
) -> JoinedBatches:
    """Opens the batches that the feed of a run reads."""
    if config.echo.buffer_on == "device":
        return JoinedBatches([workload.fresh_dataset(shard) for shard in shards])
    spec = unechoed(config)
    return JoinedBatches([workload.train_dataset(spec, shard) for shard in shards])


def next_batch(iterator: Iterator[Batch], workload: Workload, when: str) -> Batch:
    """Returns the next training batch, or raises the error of `data_ended`."""
    batch = next(iterator, None)
    if batch is None:
        raise data_ended(workload, when)
    return batch


def data_ended(workload: Workload, when: str) -> ValueError:
    """Returns the error "the training data of a workload ended `when`"."""
    return ValueError(
        f"the training data of workload {workload.name!r} ended {when}; "
        "it must repeat without end"
    )


def unechoed(config: RunSpec) -> EchoSpec:
    """Returns an echo of factor 1, to use instead of the config's echo."""
    is_of_batches = config.echo.stage == "batch"
    return EchoSpec(batch_size=1 if is_of_batches else config.batch_size)
