"""Work in threads, with the results in order."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["ordered_map"]

T = TypeVar("T")
R = TypeVar("R")

_AHEAD_PER_WORKER = 4
# Passing one item to a thread takes about 50 us, so small items are grouped.
_GROUP_BYTES = 64 * 1024


# Few results are computed ahead, which bounds the memory. If the caller stops, or
# `items` or `function` raises, running calls finish and no new call starts.
def ordered_map(
    function: Callable[[T], R],
    items: Iterable[T],
    num_bytes: Callable[[T], int],
    workers: int,
) -> Generator[R]:
    """Yields ``function(item)`` for every item, in order, computed by threads."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="prepare")
    groups = _groups(items, num_bytes)
    waiting: deque[Future[list[R]]] = deque()

    def submit(number: int) -> None:
        for group in itertools.islice(groups, number):
            waiting.append(pool.submit(lambda group: [*map(function, group)], group))

    try:
        submit(workers * _AHEAD_PER_WORKER)
        while waiting:
            results = waiting.popleft().result()
            submit(1)
            yield from results
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(items: Iterable[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yields groups of items that are large enough for one thread call."""
    group, size = [], 0
    for item in items:
        group.append(item)
        size += num_bytes(item)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
