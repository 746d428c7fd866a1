"""Settings and progress of every prepare command."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_jax.data.prepare.errors import PrepareError

__all__ = [
    "HELD_OUT",
    "OnProgress",
    "Progress",
    "Settings",
    "check_holdout",
    "is_held_out",
    "names_no_split",
    "parse_sources",
]

OnProgress = Callable[[str, float], None]
"""Told what is done, and the part of it that is done, from 0 to 1."""

HELD_OUT = "validation"
"""The split that is made of what is held out of the train split."""

_SPLIT = re.compile(r"([A-Za-z0-9_]+)=(.*)", re.DOTALL)
_PROGRESS_EVERY_S = 0.5


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
                f"--holdout={self.holdout} is no share of at least 0 and below 1"
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
        return {
            "source": sources,
            "holdout": self.holdout,
            "shard_mb": self.shard_mb,
            **more,
        }


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
