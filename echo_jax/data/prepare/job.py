"""Settings, progress, threads and errors of every prepare command."""

import contextlib
import hashlib
import itertools
import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

OnProgress = Callable[[str, float], None]
"""Told what is done, and the part of it that is done, from 0 to 1."""

HELD_OUT = "validation"
"""The split that is made of what is held out of the train split."""

_SPLIT = re.compile(r"([A-Za-z0-9_]+)=(.*)", re.DOTALL)
_PROGRESS_EVERY_S = 0.5
_MAX_NAMED = 100
_MAX_SHOWN = 5
_AHEAD_PER_WORKER = 4
# Passing one item to a thread takes about 50 us, so small items are grouped.
_GROUP_BYTES = 64 * 1024

T = TypeVar("T")
R = TypeVar("R")


class PrepareError(ValueError):
    """The command failed; nothing readable was written."""


class BadExampleError(ValueError):
    """An example cannot be used; the message is a short reason."""


@dataclass(frozen=True)
class Bad:
    """A skipped example; `reason` is the same text for all examples of its kind."""

    split: str
    name: str
    reason: str


@dataclass
class Skipped:
    """Counts skipped examples by reason, and names the first hundred of them."""

    limit: int
    total: int
    counts: Counter[str] = field(default_factory=Counter)
    named: list[Bad] = field(default_factory=list)

    def add(self, bad: Bad) -> None:
        self.counts[bad.reason] += 1
        if len(self.named) < _MAX_NAMED:
            self.named.append(bad)

    def check(self) -> None:
        """Raises PrepareError if there are more than the limit."""
        if (count := self.counts.total()) > self.limit:
            raise PrepareError(
                f"more than {self.limit} of {self.total} are bad: {self}. Look at "
                f"them, or allow more with --max-bad={count} or, say, --max-bad=1%"
            )

    def metadata(self) -> dict[str, Any]:
        """Returns the counts and names as JSON values."""
        return {
            "count": self.counts.total(),
            "reasons": dict(sorted(self.counts.items())),
            "first": [vars(bad) for bad in self.named],
        }

    def __str__(self) -> str:
        named = self.named[:_MAX_SHOWN]
        shown = [f"{bad.split}: {bad.name!r} ({bad.reason})" for bad in named]
        rest = self.counts.total() - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def allowed(max_bad: str, total: int) -> int:
    """Returns the number that may be skipped; `max_bad` is a number or a share."""
    share = max_bad.endswith("%")
    with contextlib.suppress(ValueError):
        if share and 0 <= (value := float(max_bad[:-1])) <= 100:
            return int(total * value / 100)
        if not share and (number := int(max_bad)) >= 0:
            return number
    raise PrepareError(
        f"--max-bad={max_bad} is neither a number nor a share such as 0.1%"
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of every prepare command.

    Attributes:
      out: The folder to make.
      holdout: Share of the train split that becomes the validation split.
      max_bad: Number of bad examples to skip, or a share such as ``"0.1%"``. It
        decides whether the command succeeds, and does not change its result.
      workers: Threads; 0 for one per core. They do not change the result.
      shard_mb: Approximate size of a shard, in MiB.
      on_progress: Called with the current step and its finished fraction.

    Raises:
      PrepareError: A value is out of its range.
    """

    out: Path
    holdout: float = 0.0
    max_bad: str = "0.1%"
    workers: int = 0
    shard_mb: float = 256.0
    on_progress: OnProgress = lambda what, part: None

    def __post_init__(self):
        if not 0 <= self.holdout < 1:
            raise PrepareError(
                f"--holdout={self.holdout} must be at least 0 and below 1, such as 0.1"
            )
        if self.workers < 0:
            raise PrepareError(f"--workers={self.workers} must be at least 1")
        if not self.shard_bytes >= 1:
            raise PrepareError(f"--shard-mb={self.shard_mb} must be above 0")

    @property
    def num_threads(self) -> int:
        """The number of threads to use."""
        return self.workers or os.cpu_count() or 1

    @property
    def shard_bytes(self) -> float:
        """The approximate size of a shard, in bytes."""
        return self.shard_mb * 1024**2

    def options(self, sources: dict[str, list[str]], **more: Any) -> dict[str, Any]:
        """Returns the options that decide the content, for ``dataset.json``."""
        own = {"source": sources, "holdout": self.holdout, "shard_mb": self.shard_mb}
        return {**own, **more}


def parse_sources(arguments: Sequence[str], holdout: float) -> dict[str, list[str]]:
    """Returns the sources of each split; a plain ``SOURCE`` is the train split's."""
    sources: dict[str, list[str]] = {}
    for argument in arguments:
        match = _SPLIT.fullmatch(argument)
        split, source = match.groups() if match else ("train", argument)
        if not source:
            raise PrepareError(f"{argument!r} names no source after the =")
        sources.setdefault(split, []).append(source)
    check_holdout(sources, holdout)
    return sources


def names_no_split(arguments: Sequence[str]) -> bool:
    """Returns whether all arguments are ``SOURCE``, without a split."""
    return not any(map(_SPLIT.fullmatch, arguments))


def check_holdout(splits: Container[str], holdout: float) -> None:
    """Refuses a holdout without a train split, or with a validation split."""
    if holdout and HELD_OUT in splits:
        raise PrepareError(
            f"--holdout={holdout} makes a validation split, and one is given; "
            "leave one of them out"
        )
    if holdout and "train" not in splits:
        raise PrepareError(f"--holdout={holdout} needs a train split")


def is_held_out(name: str, holdout: float) -> bool:
    """Returns whether a name is in the validation split; its hash alone decides."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8]) < holdout * 2**64


class Progress:
    """Reports the progress of one step, not too often; `total` is in bytes."""

    def __init__(self, on_progress: OnProgress, what: str, total: int):
        self._on_progress, self._what, self._total = on_progress, what, max(1, total)
        self._done, self._next = 0, 0.0

    def advance(self, num_bytes: int) -> None:
        """Counts finished bytes."""
        self.reach(self._done + num_bytes)

    def reach(self, done: int) -> None:
        """Sets the number of finished bytes."""
        self._done = done
        if (now := time.monotonic()) >= self._next or done >= self._total:
            self._next = now + _PROGRESS_EVERY_S
            self._on_progress(self._what, min(1.0, done / self._total))


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
    group, size = [], 0
    for item in items:
        group.append(item)
        size += num_bytes(item)
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
