"""The parts of the data that a process makes, as one stream of batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from grain import IterDataset

from echo_jax.workloads.base import Batch

__all__ = ["JoinedBatches"]


class JoinedBatches(Iterator[Batch]):
    """Puts the rows of several parts of every batch together, in the order of parts.

    It ends with the first part that ends.
    """

    def __init__(self, datasets: Sequence[IterDataset]):
        """Reads nothing yet.

        Args:
          datasets: One of batches for each part, in order.
        """
        self._iterators = [iter(dataset) for dataset in datasets]

    def __next__(self) -> Batch:
        """Returns the next batch; that of a single part is not copied."""
        parts = [next(iterator) for iterator in self._iterators]
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([p[name] for p in parts]) for name in parts[0]}

    def get_state(self) -> list[Any]:
        """Returns the state of every part."""
        return [iterator.get_state() for iterator in self._iterators]

    def set_state(self, state: Sequence[Any]) -> None:
        """Goes to the states of as many parts."""
        for iterator, own in zip(self._iterators, state, strict=True):
            iterator.set_state(own)

    def close(self) -> None:
        """Stops reading ahead."""
        for iterator in self._iterators:
            # Grain's have it; what a test or a user gives need not.
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
