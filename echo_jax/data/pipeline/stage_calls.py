"""The stages of a pipeline for one batch, as calls to be timed."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from echo_jax.data.pipeline.dataset import PipelineSpec
from echo_jax.data.pipeline.stages import Read, Stages
from echo_jax.data.pipeline.storage import SimulatedStorage
from echo_jax.echo.keys import use_seed

__all__ = ["stage_calls"]


def stage_calls(stages: Stages, pipeline: PipelineSpec) -> dict[str, Callable[[], Any]]:
    """Returns calls by stage name; each does the work of one batch."""
    storage = SimulatedStorage(pipeline.storage, pipeline.seed)
    read_one = Read(stages.source, storage)
    decode, augment = stages.decode, stages.augment
    numbers = itertools.count()

    def read() -> list[bytes]:
        indices = itertools.islice(numbers, pipeline.batch_size)
        return [read_one(index, _record(index)) for index in indices]

    def _record(index: int) -> int:
        return int(use_seed(pipeline.seed, index, 0)) % len(stages.source)

    # Only "read" takes new records in each call; the other calls reuse these.
    records = read()
    items = [decode(record) for record in records]
    calls: dict[str, Callable[[], Any]] = {
        "read": read,
        "decode": lambda: [decode(record) for record in records],
    }
    if augment is not None:
        calls["augment"] = lambda: [
            augment(item, seed) for seed, item in enumerate(items)
        ]
    calls["batch"] = lambda: {
        key: np.stack([item[key] for item in items]) for key in items[0]
    }
    return calls
