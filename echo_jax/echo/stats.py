"""What an echo counts while it runs, and how long its loop waits for data."""

import logging
import math
import time
from typing import Any, NamedTuple

_LOG_EVERY_S, _LOGGED_SHARE = 60.0, 0.1


class Counts(NamedTuple):
    """Counts so far: ``fresh`` items taken, their ``uses``, and ``repeats`` of them."""

    fresh: int = 0
    uses: int = 0
    repeats: int = 0


class UseInfo(NamedTuple):
    """Identifies a use: the index of its item in the upstream, and its number from 0.

    Both are integers, or for a batch ``int64[B]`` and ``int32[B]``.
    """

    fresh_index: Any
    repeat: Any


class Stats(dict[str, Any]):
    """The numbers of `EchoIterator.stats`; as a text one line."""

    def __str__(self) -> str:
        text = (
            "waited {waited_share:.1%} of the time ({waited_s:.3g} s), longest "
            "{longest_wait_s:.3g} s at update {longest_wait_at}; a step takes "
            "{step_s:.3g} s, a fresh batch {fresh_batch_s:.3g} s, R = {R:.3g}; "
            "{uses_per_fresh:.3g} uses of a fresh example, {ready_batches} ready"
        ).format_map(self)
        if (slowest := self.get("slowest_process")) is not None:
            text += f"; the loader of process {slowest} is the slowest"
        return text


class Totals(NamedTuple):
    """Numbers that only grow; the numbers of any span are differences."""

    draws: int = 0
    waited_s: float = 0.0
    read_s: float = 0.0  # that the loader took
    num_read: int = 0  # elements that it gave
    fresh: int = 0
    uses: int = 0


class Waits:
    """The longest wait for data, of all and since that was last asked for."""

    def __init__(self):
        self._all = self._since = 0.0, 0

    def add(self, update: int, wait_s: float) -> None:
        """Counts the wait before an update."""
        self._all = max(self._all, (wait_s, update))
        self._since = max(self._since, (wait_s, update))

    def longest(self, since_last: bool) -> dict[str, float]:
        """Returns the seconds, and the update, counted from 0."""
        seconds, update = self._since if since_last else self._all
        if since_last:
            self._since = 0.0, 0
        return {"longest_wait_s": seconds, "longest_wait_at": update}


class Clock:
    """Measures the draws of an echo."""

    def __init__(self):
        self.draws, self.waited_s, self._seen_s, self._waits = 0, 0.0, 0.0, Waits()
        # When the first draw began and ended, and when the latest one ended.
        self._began = self._first = self._latest = 0.0
        self._since, self._since_s = Totals(), 0.0  # where the span asked for began
        self._log_at = math.inf

    def add(self, began: float, seen_s: float) -> bool:
        """Counts a draw, up to which its reader has waited; returns whether to log."""
        now, wait_s = time.perf_counter(), seen_s - self._seen_s
        if not self.draws:
            self._began, self._first, self._since_s = began, now, began
            self._log_at = now + _LOG_EVERY_S / 6
        if wait_s:
            # Another reader took the place of the one before, after a restore.
            wait_s, self._seen_s = (wait_s if wait_s > 0 else seen_s), seen_s
            self.waited_s += wait_s
            self._waits.add(self.draws, wait_s)
        self.draws, self._latest = self.draws + 1, now
        return now > self._log_at

    def stats(self, now: Totals, since_last: bool, batch_ratio: float) -> Stats:
        """Returns the numbers; a training batch is ``batch_ratio`` of the loader's."""
        before, start_s = Totals(), self._began
        if since_last:
            before, start_s = self._since, self._since_s
            self._since, self._since_s = now, self._latest
        draws, waited_s, read_s, num_read, fresh, uses = (
            b - a for a, b in zip(before, now, strict=True)
        )
        elapsed_s, steps = self._latest - start_s, draws
        steps_s = elapsed_s - waited_s
        if not before.draws:  # The first draw follows no step.
            steps, steps_s = draws - 1, steps_s - (self._first - self._began)
            steps_s += min(waited_s, self._first - self._began)
        step_s = _ratio(steps_s, steps)
        fresh_batch_s = _ratio(read_s, num_read) * batch_ratio
        return Stats(
            waited_s=waited_s,
            waited_share=_ratio(waited_s, elapsed_s),
            **self._waits.longest(since_last),
            fresh_batch_s=fresh_batch_s,
            step_s=step_s,
            R=_ratio(fresh_batch_s, step_s),
            uses_per_fresh=_ratio(uses, fresh),
        )

    def log(self, stats: Stats) -> None:
        """Logs the numbers if the loop waits, and not again for a while."""
        self._log_at = self._latest + _LOG_EVERY_S
        if stats["waited_share"] > _LOGGED_SHARE:
            logging.getLogger("echo_jax").info("The training waits for data: %s", stats)


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan
