"""Batches of an evaluation split, all of one size: as a list, or streamed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from echo_jax.data.pipeline.shard import SINGLE, DataShard
from echo_jax.data.pipeline.stages import Item, RecordSource, stacked
from echo_jax.echo.keys import seed_for_use

# Every run is evaluated on the same examples, whatever its seed.
_SAMPLE_SEED = 0
THREADS = 4
"""How many threads read and decode, where nothing else is said."""


def eval_batches(
    source: RecordSource, decode: Callable[[bytes], Item], **options: Any
) -> list[Item]:
    """Returns all batches of `stream_eval_batches`, for splits that fit in memory."""
    return list(stream_eval_batches(source, decode, **options))


def stream_eval_batches(
    source: RecordSource,
    decode: Callable[[bytes], Item],
    *,
    batch_size: int,
    max_examples: int = 0,
    threads: int = THREADS,
    shard: DataShard = SINGLE,
) -> Iterator[Item]:
    """Yields batches with ``"mask"``, float32[B]: 0 in padding rows."""
    indices = sample_indices(len(source), max_examples)
    rows = shard.rows(batch_size)
    pool = ThreadPoolExecutor(threads)

    def start(first: int) -> tuple[int, list[Future[Item]]]:
        batch = indices[first : first + batch_size]
        mine = batch[shard.index * rows : (shard.index + 1) * rows]
        # A shard with padding alone still needs the shapes of an example.
        wanted = mine or batch[:1]
        decoded = [pool.submit(lambda i=index: decode(source[i])) for index in wanted]
        return len(mine), decoded

    try:
        coming = start(0)
        for first in range(0, len(indices), batch_size):
            real, decoded = coming
            items = [future.result() for future in decoded]
            coming = start(first + batch_size)
            # Pad with the first item, as a model may give NaN on zeros: 0 * NaN counts.
            items += [items[0]] * (rows - len(items))
            mask = (np.arange(rows) < real).astype(np.float32)
            yield {**stacked(items), "mask": mask}
    finally:
        pool.shutdown(cancel_futures=True)


def sample_indices(num_records: int, max_records: int) -> list[int]:
    """Returns `max_records` indices in order, or all indices if it is 0."""
    if not 0 < max_records < num_records:
        return list(range(num_records))
    # Choose by a hash: neighbours resemble each other, and classes may alternate.
    ranks = seed_for_use(_SAMPLE_SEED, np.arange(num_records), np.zeros(num_records))
    return np.sort(np.argsort(ranks)[:max_records]).tolist()
