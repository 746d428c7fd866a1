"""Reading fresh items: what it costs to look at them before they are used."""

import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.harness import Result, paired
from echo_jax.data.pipeline.dataset import PipelineSpec, fresh_batches
from echo_jax.data.pipeline.stages import Item, Stages

_BATCH = 128
_BATCHES = 24
_RECORDS = 2048


@dataclass(frozen=True)
class _Kind:
    """A kind of items.

    Attributes:
      about: In words.
      shape: Of its array.
      dtype: Of its array.
      goal: For the time of reading with the check / without it.
    """

    about: str
    shape: tuple[int, ...]
    dtype: str
    goal: str


_KINDS = {
    "images": _Kind("images of 32 x 32 x 3, uint8", (32, 32, 3), "uint8", "<= 1.03"),
    "tokens": _Kind("256 tokens, int32", (256,), "int32", "<= 1.03"),
    "floats": _Kind("images of 32 x 32 x 3, float32", (32, 32, 3), "float32", "<= 1.3"),
}


def p22() -> list[Result]:
    """Fresh items checked for NaN and infinity, against none looked at."""
    return [_checked(name, kind) for name, kind in _KINDS.items()]


def _checked(name: str, kind: _Kind) -> Result:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 100, (_RECORDS, *kind.shape)).astype(kind.dtype)
    stages = Stages([each.tobytes() for each in values], partial(_decode, kind))
    # In the thread that asks, so that nothing hides what it costs.
    pipeline = partial(PipelineSpec, "decode", _BATCH, threads=0, prefetch=0)

    def read(check: bool) -> float:
        batches = iter(fresh_batches(stages, pipeline(check_finite=check)))
        with closing(batches):
            next(batches)
            began_s = time.thread_time()
            for _ in range(_BATCHES):
                next(batches)
            return time.thread_time() - began_s

    ratio, repeats = paired(partial(read, False), partial(read, True), repeats=15)
    return Result(
        f"P22-{name}",
        f"CPU seconds to read {kind.about}: checked for NaN and infinity / unchecked",
        ratio,
        kind.goal,
        "x",
        "the same pipeline with data.check_finite=False",
        repeats,
        "records in memory that only have to be reshaped, in one thread; what is read "
        "from elsewhere, or decoded, costs more, and the check does not",
    )


def _decode(kind: _Kind, record: bytes) -> Item:
    return {
        "x": np.frombuffer(record, kind.dtype).reshape(kind.shape),
        "label": np.array(0, np.int32),
    }
