"""The input pipeline: read, decode, augment, batch, with an echo after one stage.

The stages are pure functions; Grain runs them. One word decides behind which of
them the echo sits:

    after     reused are        each repeat costs        a repeat differs by
    read      raw records       decode, augment, batch   its augmentation
    decode    decoded items     augment, batch           its augmentation
    augment   augmented items   batch                    its neighbours
    batch     whole batches     nothing                  nothing

Everything above the echo runs in reader threads or worker processes, everything
below it in one background thread that makes batches ahead of the trainer. The
echo is never inside a worker: there, repeats would cross the process boundary,
which costs more than making them (measured: docs/design.md).

Records are shuffled by their index, anew in every epoch, before they are read.
This takes the place of the shuffle buffer with which the paper's baseline
decorrelates its stream: it needs random access, and shuffles perfectly.
"""

import signal
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import grain
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from echo_jax.data.chunks import Unchunked
from echo_jax.data.stages import (
    AugmentFresh,
    BroadcastTags,
    FinishBatch,
    Read,
    Stages,
)
from echo_jax.data.storage import SimulatedStorage, StorageSpec
from echo_jax.echo import grain as echo_grain
from echo_jax.echo.keys import use_seed
from echo_jax.echo.spec import EchoSpec

__all__ = ["EchoAfter", "PipelineSpec", "fresh_batches", "train_dataset"]

EchoAfter = Literal["read", "decode", "augment", "batch"]

# What a pipeline draws at random, as names of independent streams of one seed.
_SHUFFLE, _AUGMENT, _STORAGE = range(3)

# Handing an element from one thread to another costs about 50 us, and 300 us from
# process to process; a list of items is one element.
_CHUNK_ITEMS = 16


@dataclass(frozen=True)
class PipelineSpec:
    """How a training pipeline is run.

    Attributes:
      after: The stage that the echo follows.
      batch_size: Examples in a batch.
      seed: Decides shuffling, augmentation and simulated latencies.
      threads: Concurrent reads (in each worker process); 0 reads in the thread
        that makes the batches.
      workers: Processes that run the stages above the echo; 0 for none.
      prefetch: Batches made ahead of the trainer; 0 makes them when asked.
      storage: How long reads take.

    Raises:
      ValueError: If a field is out of its range.

    Example:
      >>> PipelineSpec(after="decode", batch_size=32).threads
      1
    """

    after: EchoAfter
    batch_size: int
    seed: int = 0
    threads: int = 1
    workers: int = 0
    prefetch: int = 4
    storage: StorageSpec = field(default_factory=StorageSpec)

    def __post_init__(self):
        if self.after not in get_args(EchoAfter):
            raise ValueError(
                f"echo.after={self.after!r} is no stage; use one of "
                f"{', '.join(get_args(EchoAfter))}."
            )
        bounds = {"batch_size": 1, "seed": 0, "threads": 0, "workers": 0, "prefetch": 0}
        for name, least in bounds.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}={getattr(self, name)} is too small; use {least} or more."
                )

    @classmethod
    def from_config(cls, config: Any) -> "PipelineSpec":
        """Returns what a training config says about its pipeline.

        Args:
          config: The fields of `echo_jax.config.default_config`.
        """
        storage = config.data.storage
        return cls(
            after=config.echo.after,
            batch_size=config.batch_size,
            seed=config.seed,
            threads=config.data.threads,
            workers=config.data.workers,
            prefetch=config.data.prefetch,
            storage=StorageSpec(
                storage.latency_s, storage.bytes_per_s, storage.distribution
            ),
        )


def train_dataset(
    stages: Stages, pipeline: PipelineSpec, spec: EchoSpec
) -> grain.IterDataset:
    """Returns the endless stream of training batches, with an echo in it.

    The sequence is a function of the records, of `pipeline`'s ``after``,
    ``batch_size`` and ``seed``, and of `spec`. Threads, workers and prefetching
    change when a batch is ready, never what is in it. An iterator's state is
    JSON, and exact at every batch; it can be restored with other threads or
    another prefetch, but not with another number of workers.

    Args:
      stages: Records and what they go through.
      pipeline: Placement of the echo, sizes, and parallelism.
      spec: The echo. Its ``batch_size`` is set here: one batch behind "batch",
        else the examples of a batch.

    Returns:
      Batches: the item's arrays with a leading axis of ``batch_size``, and
      ``"fresh_index"`` (``int64[B]``) and ``"repeat"`` (``int32[B]``), the
      echo's tags of each example. Behind "batch" they count fresh batches.

    Example:
      >>> stages = Stages([b"ab", b"cd", b"ef"], decode=lambda r: {"x": np.array(r[0])})
      >>> pipeline = PipelineSpec(after="decode", batch_size=2)
      >>> with closing(iter(train_dataset(stages, pipeline, EchoSpec(2)))) as batches:
      ...     next(batches)["repeat"].tolist()
      [0, 1]
    """
    fresh = _fresh(stages, pipeline, in_batches=pipeline.after == "batch")
    batch_size = pipeline.batch_size
    # With nothing random between echo and batch, the echo gathers whole batches
    # out of its buffer, which spares the handling of single items.
    gathers = pipeline.after == "augment" or (
        pipeline.after == "decode" and stages.augment is None
    )
    if pipeline.after == "batch":
        spec = replace(spec, batch_size=1)
        batches = echo_grain.echo(fresh, spec, tags=True)
        batches = batches.map(BroadcastTags(batch_size))
    elif gathers:
        spec = replace(spec, batch_size=batch_size)
        batches = echo_grain.echo(fresh, spec, batch=True, tags=True)
        batches = batches.map(BroadcastTags(batch_size))
    else:
        spec = replace(spec, batch_size=batch_size)
        uses = echo_grain.echo(fresh, spec, tags=True)
        finish = FinishBatch(
            stages.decode if pipeline.after == "read" else None,
            stages.augment,
            _stream_seed(pipeline, _AUGMENT),
        )
        batches = uses.batch(batch_size, drop_remainder=True, batch_fn=finish)
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=pipeline.prefetch)


def fresh_batches(stages: Stages, pipeline: PipelineSpec) -> grain.IterDataset:
    """Returns the endless stream of fresh batches for an echo on the devices.

    Element r of batch c is fresh item ``c * batch_size + r`` of `train_dataset` with
    the same placement, so that an echo of them repeats the same items. Nothing makes
    batches ahead but the reader threads or workers: the device echo does.

    Args:
      stages: Records and what they go through.
      pipeline: Sizes, parallelism, and the last stage in ``after``: ``"decode"``, or
        ``"augment"`` for items augmented once, on the host.

    Returns:
      Batches: the item's arrays with a leading axis of ``batch_size``.

    Raises:
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
    return _fresh(stages, pipeline, in_batches=True)


def _fresh(
    stages: Stages, pipeline: PipelineSpec, *, in_batches: bool
) -> grain.IterDataset:
    """Returns the endless stream of fresh elements: all stages above the echo.

    Every stage is a function of the stream index, so that any thread or worker
    may compute any element.
    """
    read = Read(
        stages.source,
        SimulatedStorage(pipeline.storage, _stream_seed(pipeline, _STORAGE)),
    )
    dataset: grain.MapDataset[Any] = (
        grain.MapDataset.range(len(stages.source))
        # Grain adds the epoch to the seed, and takes 32 bits of it.
        .shuffle(seed=_stream_seed(pipeline, _SHUFFLE) % 2**32)
        .repeat()
        .map_with_index(read)
    )
    if pipeline.after != "read":
        dataset = dataset.map(stages.decode)
    if pipeline.after in ("augment", "batch") and stages.augment is not None:
        augment = AugmentFresh(stages.augment, _stream_seed(pipeline, _AUGMENT))
        dataset = dataset.map_with_index(augment)
    if in_batches:
        dataset = dataset.batch(pipeline.batch_size)
    else:
        dataset = dataset.batch(_CHUNK_ITEMS, batch_fn=list)
    # Two elements for each thread: one in the making, one ready.
    stream = dataset.to_iter_dataset(
        grain.ReadOptions(
            num_threads=pipeline.threads, prefetch_buffer_size=2 * pipeline.threads
        )
    )
    if pipeline.workers:
        _ensure_flags_are_parsed()
        stream = stream.mp_prefetch(
            grain.MultiprocessingOptions(
                num_workers=pipeline.workers, per_worker_buffer_size=2
            ),
            worker_init_fn=_leave_signals_to_the_trainer,
        )
    return stream if in_batches else Unchunked(stream)


def _stream_seed(pipeline: PipelineSpec, stream: int) -> int:
    return int(use_seed(pipeline.seed, stream, 0))


def _leave_signals_to_the_trainer(worker: int, num_workers: int) -> None:
    """Lets Ctrl-C, which reaches all processes, stop the trainer alone: it saves."""
    del worker, num_workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ensure_flags_are_parsed() -> None:
    """Lets Grain start workers in notebooks and tests, where absl parses nothing."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
