"""The pipeline as Grain runs it: in threads, or in worker processes.

What is above the echo runs in reader threads or worker processes, what is below it in
one background thread. The echo is never inside a worker: there, repeats would cross
the process boundary, which costs more than making them (measured: docs/design.md).
"""

import functools
import signal
from dataclasses import replace

import grain
from absl import flags
from grain.experimental import ThreadPrefetchIterDataset

from echo_jax.data.chunks import Unchunked
from echo_jax.data.fresh import below_echo, fresh_items
from echo_jax.data.pipeline_spec import PipelineSpec
from echo_jax.data.stages import BroadcastTags, Stages
from echo_jax.echo.adapters import grain as echo_grain
from echo_jax.echo.shard import Part
from echo_jax.echo.spec import AdaptiveSpec, AnySpec

__all__ = ["echoed_batches", "grain_batches", "grain_fresh_batches"]

# Handing an element from one thread to another costs about 50 us, and 300 us from
# process to process; a list of items is one element.
_CHUNK_ITEMS = 16


def grain_batches(
    stages: Stages, pipeline: PipelineSpec, spec: AnySpec, part: Part
) -> grain.IterDataset:
    """See `echo_jax.data.pipeline.train_dataset`."""
    if pipeline.after == "batch":
        fresh = grain_fresh_batches(stages, pipeline, part)
    else:
        fresh = Unchunked(_read(stages, pipeline, part, in_batches=False))
    return echoed_batches(fresh, stages, pipeline, spec, part)


def echoed_batches(
    fresh: grain.IterDataset,
    stages: Stages,
    pipeline: PipelineSpec,
    spec: AnySpec,
    part: Part,
) -> grain.IterDataset:
    """Returns training batches of fresh elements: the echo, and what is below it.

    Args:
      fresh: Elements of the stage that the echo follows.
      stages: What their examples go through.
      pipeline: Where the echo stands, and how much is made ahead.
      spec: The echo.
      part: Of every batch.
    """
    rows, ahead = part.rows(pipeline.batch_size), None
    prefetch = pipeline.prefetch
    if isinstance(spec, AdaptiveSpec):
        # What waits for the trainer is fresh data, not repeats decided too early.
        ahead, prefetch = max(1, prefetch), min(1, prefetch)
    if pipeline.after == "batch":
        spec = replace(spec, batch_size=1)
        batches = echo_grain.echo(fresh, spec, tags=True, prefetch=ahead)
        batches = batches.map(BroadcastTags(rows))
    else:
        spec = part.echo(replace(spec, batch_size=pipeline.batch_size))
        below = below_echo(stages, pipeline, part)
        if below is None:
            batches = echo_grain.echo(
                fresh, spec, batch=True, tags=True, prefetch=ahead
            )
            whole_index = functools.partial(part.whole_index, rows=rows)
            batches = batches.map(BroadcastTags(rows, whole_index))
        else:
            uses = echo_grain.echo(fresh, spec, tags=True, prefetch=ahead)
            batches = uses.batch(rows, drop_remainder=True, batch_fn=below)
    return ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch)


def grain_fresh_batches(
    stages: Stages, pipeline: PipelineSpec, part: Part
) -> grain.IterDataset:
    """See `echo_jax.data.pipeline.fresh_batches`."""
    return _read(stages, pipeline, part, in_batches=True)


def _read(
    stages: Stages, pipeline: PipelineSpec, part: Part, *, in_batches: bool
) -> grain.IterDataset:
    """Returns the endless stream of fresh elements, in batches or in chunks."""
    items = fresh_items(stages, pipeline, part)
    if in_batches:
        dataset = items.batch(part.rows(pipeline.batch_size))
    else:
        dataset = items.batch(_CHUNK_ITEMS, batch_fn=list)
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
    return stream


def _leave_signals_to_the_trainer(worker: int, num_workers: int) -> None:
    """Lets Ctrl-C, which reaches all processes, stop the trainer alone: it saves."""
    del worker, num_workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _ensure_flags_are_parsed() -> None:
    """Lets Grain start workers in notebooks and tests, where absl parses nothing."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
