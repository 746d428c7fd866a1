"""Batches of an evaluation split: all of one size, kept or made anew."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from echo_jax.data.pipeline.stages import Item, RecordSource
from echo_jax.echo.keys import use_seed
from echo_jax.echo.shard import SINGLE, DataShard

__all__ = ["THREADS", "eval_batches", "sample_indices", "stream_eval_batches"]

# Every run, whatever its own seed, is judged on the same examples.
_SAMPLE_SEED = 0
THREADS = 4
"""How many threads read and decode, where nothing else is said."""


def eval_batches(
    source: RecordSource,
    decode: Callable[[bytes], Item],
    *,
    batch_size: int,
    max_examples: int = 0,
    threads: int = THREADS,
    shard: DataShard = SINGLE,
) -> list[Item]:
    """Decodes a split, or a sample of it, into batches of one size.

    For splits that fit into memory, where a second pass then costs nothing;
    `stream_eval_batches` is for others.

    Args:
      source: The split's records.
      decode: Turns a record into an item; called from several threads.
      batch_size: Examples in a batch, B.
      max_examples: How many examples to take, always the same ones; 0
        takes all.
      threads: That read and decode.
      shard: Which rows of every batch are made, where several processes share them.

    Returns:
      Batches: the item's arrays with a leading axis of size B, and ``"mask"``
      (``float32[B]``): 1, or 0 where the last batch was filled up. It is filled with
      its own first example, because a model may be undefined on zeros, and 0 times
      NaN would count.

    Example:
      >>> batches = eval_batches([b"ab", b"cd", b"ef"], decode_window, batch_size=2)
      >>> [batch["mask"].tolist() for batch in batches]
      [[1.0, 1.0], [1.0, 0.0]]
    """
    return list(
        stream_eval_batches(
            source,
            decode,
            batch_size=batch_size,
            max_examples=max_examples,
            threads=threads,
            shard=shard,
        )
    )


def stream_eval_batches(
    source: RecordSource,
    decode: Callable[[bytes], Item],
    *,
    batch_size: int,
    max_examples: int = 0,
    threads: int = THREADS,
    shard: DataShard = SINGLE,
) -> Iterator[Item]:
    """Yields the batches of `eval_batches`, of which two are in memory at a time.

    Evaluation is not what is studied: no storage delays it, and nothing is random.

    Args:
      source: See `eval_batches`, here and below.
      decode: Turns a record into an item.
      batch_size: Examples in a batch, B.
      max_examples: How many examples to take.
      threads: That read and decode; the next batch is made while one is used.
      shard: Which rows of every batch are made; all shards have as many batches.

    Yields:
      Batches.
    """
    indices = sample_indices(len(source), max_examples)
    rows = shard.rows(batch_size)
    pool = ThreadPoolExecutor(threads)

    def start(first: int) -> tuple[int, list[Future[Item]]]:
        batch = indices[first : first + batch_size]
        mine = batch[shard.index * rows : (shard.index + 1) * rows]
        # A shard of nothing but padding has the shapes of an example all the same.
        wanted = mine or batch[:1]
        decoded = [pool.submit(lambda i=index: decode(source[i])) for index in wanted]
        return len(mine), decoded

    try:
        coming = start(0)
        for first in range(0, len(indices), batch_size):
            real, decoded = coming
            items = [future.result() for future in decoded]
            coming = start(first + batch_size)
            yield _padded(items, rows, real)
    finally:
        pool.shutdown(cancel_futures=True)


def sample_indices(num_records: int, max_records: int) -> list[int]:
    """Returns `max_records` of all indices, in order; all of them if that is 0.

    They are chosen by a hash. Neither the first nor every n-th record would do:
    neighbours resemble each other, and classes may take turns.

    Example:
      >>> sample_indices(5, 0), len(sample_indices(1000, 100))
      ([0, 1, 2, 3, 4], 100)
    """
    if not 0 < max_records < num_records:
        return list(range(num_records))
    ranks = use_seed(_SAMPLE_SEED, np.arange(num_records), np.zeros(num_records))
    return np.sort(np.argsort(ranks)[:max_records]).tolist()


def _padded(items: Sequence[Item], size: int, real: int) -> Item:
    """Stacks items to a batch of some size, filled up with the first of them."""
    rows = [*items, *[items[0]] * (size - len(items))]
    batch = {key: np.stack([item[key] for item in rows]) for key in items[0]}
    return {**batch, "mask": (np.arange(size) < real).astype(np.float32)}
