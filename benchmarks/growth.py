"""How the cost of an echo grows with its items, leaves, batches, factor and lanes."""

import gc
import statistics
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import echo_jax as ej
from benchmarks.device import make_feed
from benchmarks.harness import Result, seconds
from echo_jax.echo.device import DeviceFeed

_DRAWS, _PAIRS = 64, 7


@dataclass(frozen=True)
class _Case:
    """An echo on the devices, of items of 16 bytes for each leaf.

    Attributes:
      items: Its buffer.
      leaves: Of an item.
      batch: Uses in a batch, and rows of a host batch.
      e: How often each item is used.
      lanes: Parts of the buffer.
    """

    items: int = 100_000
    leaves: int = 2
    batch: int = 1024
    e: int = 4
    lanes: int = 1


_BASE = _Case()
# By the field: its values, and whether a draw should cost the same for all of them. The
# others may grow in proportion.
_AXES: dict[str, tuple[tuple[int, ...], bool]] = {
    "items": ((10_000, 1_000_000, 10_000_000), True),
    "leaves": ((1, 20, 200), False),
    "batch": ((16, 128, 8192), False),
    # At 1 every draw writes a host batch, and at 4 one in four.
    "e": ((16, 64), True),
    "lanes": ((2, 4, 8), False),
}


class _Source(Iterator[Any]):
    """The same host batch for ever, with a state."""

    def __init__(self, case: _Case):
        shape = (case.batch, 4)
        self._batch = {f"x{k}": np.zeros(shape, np.float32) for k in range(case.leaves)}
        self._given = 0

    def __next__(self) -> Any:
        self._given += 1
        return self._batch

    def get_state(self) -> int:
        return self._given

    def set_state(self, state: int) -> None:
        self._given = state


def growth() -> list[Result]:
    """Time of a draw, and memory and times beside it, along five axes."""
    return [
        _grown(field, replace(_BASE, **{field: value}), is_flat)
        for field, (values, is_flat) in _AXES.items()
        for value in values
    ]


def _grown(field: str, case: _Case, is_flat: bool) -> Result:
    base_s, case_s = [], []
    with closing(_feed(_BASE)) as base, closing(_feed(case)) as feed:
        _fill(base, _BASE.items)
        _fill(feed, case.items)
        for _ in range(_PAIRS + 1):
            base_s.append(_draw_s(base))
            case_s.append(_draw_s(feed))
    value = getattr(case, field)
    times = max(1.0, 1.0 if is_flat else value / getattr(_BASE, field))
    ratios = [b / a / times for a, b in zip(base_s[1:], case_s[1:], strict=True)]
    made_s, restored_s, num_bytes = _beside(case)
    return Result(
        f"growth-{field}-{value}",
        f"time of a draw with {field}={value:,} / with {getattr(_BASE, field):,}"
        + ("" if times == 1 else ", and over their ratio"),
        statistics.median(ratios),
        "<= 1.2",
        "x",
        f"itself with {_BASE}",
        ratios,
        f"decided, written and waited for; {statistics.median(case_s) * 1e6:.0f} us; "
        f"made in {made_s * 1e3:.3g} ms, restored until the next batch in "
        f"{restored_s * 1e3:.3g} ms, {num_bytes / case.items:.3g} bytes of host memory "
        "an item",
    )


def _feed(case: _Case) -> DeviceFeed:
    spec = ej.EchoSpec(case.e, case.items, "spread", case.batch)
    return make_feed(spec, _Source(case), num_lanes=case.lanes)


def _fill(feed: DeviceFeed, items: int) -> None:
    while feed.counts.fresh < items:
        feed.take()


def _draw_s(feed: DeviceFeed) -> float:
    """Seconds that a draw takes, on average."""

    def draw() -> None:
        for _ in range(_DRAWS):
            feed.take()
            jax.block_until_ready(feed.arrays)

    return seconds(draw) / _DRAWS


def _beside(case: _Case) -> tuple[float, float, int]:
    """Seconds to make an echo and to restore it, and bytes that it holds on the host.

    What is compiled for it has been compiled.
    """
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    feed = _feed(case)
    _fill(feed, case.items)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    with closing(feed):
        state = feed.get_state()
    made: list[DeviceFeed] = []
    made_s = seconds(lambda: made.append(_feed(case)))

    def restore() -> None:
        made[0].set_state(state)
        made[0].take()
        jax.block_until_ready(made[0].arrays)

    with closing(made[0]):
        return made_s, seconds(restore), after - before
