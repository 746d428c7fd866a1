"""Batches of an evaluation split: all of one size, decoded once."""

from collections.abc import Callable

import numpy as np

from echo_jax.data.stages import Item, RecordSource
from echo_jax.echo.keys import use_seed

__all__ = ["eval_batches", "sample_indices"]

# Every run, whatever its own seed, is judged on the same examples.
_SAMPLE_SEED = 0


def eval_batches(
    source: RecordSource,
    decode: Callable[[bytes], Item],
    *,
    batch_size: int,
    max_examples: int = 0,
) -> list[Item]:
    """Decodes a split, or a sample of it, into batches of one size.

    Evaluation is not what is studied: no storage delays it, and nothing is
    random.

    Args:
      source: The split's records.
      decode: Turns a record into an item.
      batch_size: Examples in a batch, B.
      max_examples: How many examples to take, always the same ones; 0
        takes all.

    Returns:
      Batches: the item's arrays with a leading axis of size B, and ``"mask"``
      (``float32[B]``): 1, or 0 where the last batch was filled up with zeros.

    Example:
      >>> batches = eval_batches([b"ab", b"cd", b"ef"], decode_window, batch_size=2)
      >>> [batch["mask"].tolist() for batch in batches]
      [[1.0, 1.0], [1.0, 0.0]]
    """
    items = [
        decode(source[index]) for index in sample_indices(len(source), max_examples)
    ]
    batches = []
    for start in range(0, len(items), batch_size):
        part = items[start : start + batch_size]
        mask = np.zeros(batch_size, np.float32)
        mask[: len(part)] = 1
        batches.append({key: _padded(part, key, batch_size) for key in part[0]})
        batches[-1]["mask"] = mask
    return batches


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


def _padded(items: list[Item], key: str, size: int) -> np.ndarray:
    rows = np.stack([item[key] for item in items])
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
