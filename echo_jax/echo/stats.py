"""How long a loop waits for data, measured by its echo while it runs."""

import logging
import math
import time
from typing import Any, NamedTuple

_LOG_EVERY_S, _LOGGED_SHARE = 60.0, 0.1


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


class Clock:
    """Measures the draws of an echo."""

    def __init__(self):
        self.draws, self.waited_s, self._seen_s = 0, 0.0, 0.0
        # When the first draw began and ended, and when the latest one ended.
        self._began = self._first = self._latest = 0.0
        # The longest wait of all, and since the last time that was asked for; and where
        # that span began.
        self._longest, self._longest_since = (0.0, 0), (0.0, 0)
        self._since, self._since_s = Totals(), 0.0
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
            self._longest = max(self._longest, (wait_s, self.draws))
            self._longest_since = max(self._longest_since, (wait_s, self.draws))
        self.draws, self._latest = self.draws + 1, now
        return now > self._log_at

    def stats(self, now: Totals, since_last: bool, batch_ratio: float) -> Stats:
        """Returns the numbers; a training batch is ``batch_ratio`` of the loader's."""
        before, start_s, longest = Totals(), self._began, self._longest
        if since_last:
            before, start_s, longest = self._since, self._since_s, self._longest_since
            self._since, self._since_s = now, self._latest
            self._longest_since = (0.0, now.draws)
        draws, waited_s, read_s, num_read, fresh, uses = (
            b - a for a, b in zip(before, now, strict=True)
        )
        elapsed_s, steps_s, steps = self._latest - start_s, 0.0, draws
        steps_s = elapsed_s - waited_s
        if not before.draws:  # The first draw follows no step.
            steps, steps_s = draws - 1, steps_s - (self._first - self._began)
            steps_s += min(waited_s, self._first - self._began)
        step_s = _ratio(steps_s, steps)
        fresh_batch_s = _ratio(read_s, num_read) * batch_ratio
        return Stats(
            waited_s=waited_s,
            waited_share=_ratio(waited_s, elapsed_s),
            longest_wait_s=longest[0],
            longest_wait_at=longest[1],
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
