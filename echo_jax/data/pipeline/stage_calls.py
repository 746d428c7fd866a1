"""What a pipeline does for one batch, stage by stage, to be timed."""

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
    """Returns the stages as functions that do each what a batch needs.

    Args:
      stages: Records and what they go through.
      pipeline: Its storage and its batch size.

    Returns:
      ``read``, ``decode``, ``augment`` (if there is one) and ``batch``, in order.
      Every call reads other records, at random; the later stages work on the same
      ones again, which were read from the storage once.

    Example:
      >>> stages = Stages([b"ab", b"cd"], decode=lambda r: {"x": np.array(r[0])})
      >>> list(stage_calls(stages, PipelineSpec(after="decode", batch_size=2)))
      ['read', 'decode', 'batch']
    """
    storage = SimulatedStorage(pipeline.storage, pipeline.seed)
    read_one = Read(stages.source, storage)
    decode, augment = stages.decode, stages.augment
    numbers = itertools.count()

    def read() -> list[bytes]:
        indices = itertools.islice(numbers, pipeline.batch_size)
        return [read_one(index, _record(index)) for index in indices]

    def _record(index: int) -> int:
        return int(use_seed(pipeline.seed, index, 0)) % len(stages.source)

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
