"""What a run counts, and the rows of ``metrics.jsonl`` made of it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from echo_jax.training.flops import UpdateFlops
from echo_jax.training.step import REPEAT_BUCKETS, StepReport

__all__ = [
    "RowMaker",
    "Totals",
    "eval_row",
    "first_to_meet",
    "idle_fraction",
    "repeat_name",
    "train_metrics",
]


@dataclass(frozen=True)
class Totals:
    """Counts since the start of the run, also before it was resumed.

    Attributes:
      updates: Optimizer steps.
      fresh: Examples used for the first time.
      repeats: Examples used again.
      busy_s: Seconds in which the devices worked, see `DeviceTime`; up to when the
        counts were last put beside the time.
    """

    updates: int = 0
    fresh: int = 0
    repeats: int = 0
    busy_s: float = 0.0

    def after(self, repeat: np.ndarray) -> "Totals":
        """Returns the totals after more updates.

        Args:
          repeat: The repeat index of every example of them, ``int32[K, B]``.
        """
        repeats = int(np.count_nonzero(repeat))
        return replace(
            self,
            updates=self.updates + len(repeat),
            fresh=self.fresh + repeat.size - repeats,
            repeats=self.repeats + repeats,
        )

    @classmethod
    def of_all(cls, totals: Sequence["Totals"]) -> "Totals":
        """Returns the totals over all processes.

        Every process has done all updates, on examples of its own. Where one waits
        for its data, the devices of the others seem to work: they wait within a
        collective. So the least time at work counts.

        Args:
          totals: Of each process; none at the start of a run.
        """
        if not totals:
            return cls()
        counts = {name: sum(getattr(t, name) for t in totals) for name in _COUNTED}
        busy_s = min(each.busy_s for each in totals)
        return replace(totals[0], busy_s=busy_s, **counts)

    def counts(self) -> dict[str, int]:
        """Returns ``updates``, ``fresh`` and ``repeats``."""
        counts = asdict(self)
        del counts["busy_s"]
        return counts


# What a process counts of its own rows.
_COUNTED = ("fresh", "repeats")


class RowMaker:
    """Makes the rows; remembers the last one, since which rates are counted.

    Args:
      totals: At the start, or where the run resumes.
      seconds: The clock's seconds then.
      flops: Of an update.
    """

    def __init__(
        self,
        totals: Totals,
        seconds: Mapping[str, float],
        flops: UpdateFlops,
    ):
        self._totals = totals
        self._wall_s = seconds["wall_s"]
        self._flops = flops

    def train_row(
        self,
        totals: Totals,
        seconds: Mapping[str, float],
        report: StepReport,
        *,
        step_s: float,
    ) -> dict[str, Any]:
        """Returns the row of an update; waits until it is computed.

        Losses are means over the examples since the last logged update; rates are
        over the time since then, or since the start or the resumption.

        Args:
          totals: After the update.
          seconds: The clock's seconds, when the update was seen to be done.
          report: Of the update.
          step_s: Seconds of an update at work, see `DeviceTime`.
        """
        report = jax.device_get(report)
        loss, count = report.window.loss, report.window.count
        by_repeat = {
            repeat_name(i): float(loss[i] / count[i])
            for i in range(REPEAT_BUCKETS)
            if count[i]
        }
        elapsed_s = seconds["wall_s"] - self._wall_s
        updates = totals.updates - self._totals.updates
        fresh = totals.fresh - self._totals.fresh
        uses = fresh + totals.repeats - self._totals.repeats
        busy_s = totals.busy_s - self._totals.busy_s
        self._totals, self._wall_s = totals, seconds["wall_s"]
        return {
            "kind": "train",
            **totals.counts(),
            **seconds,
            "loss": float(loss.sum() / count.sum()),
            "learning_rate": float(report.learning_rate),
            **by_repeat,
            **{
                f"train_{name}": _mean(total, count)
                for name, (total, count) in report.metrics.items()
            },
            "step_s": step_s,
            "busy_s": totals.busy_s,
            "idle_fraction": idle_fraction(busy_s, elapsed_s),
            "examples_per_s": uses / elapsed_s,
            "fresh_per_s": fresh / elapsed_s,
            **self._flops.rates(updates=updates, seconds=elapsed_s),
        }


def _mean(total: Any, count: Any) -> float:
    return float(total) / float(count) if count else math.nan


def eval_row(
    totals: Totals, seconds: Mapping[str, float], metrics: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the row of an evaluation.

    Args:
      totals: After the update that was evaluated.
      seconds: The clock's seconds before the evaluation.
      metrics: From `echo_jax.training.evaluation.evaluate`.
    """
    return {
        "kind": "eval",
        **totals.counts(),
        **seconds,
        **{f"eval_{name}": value for name, value in metrics.items()},
    }


def idle_fraction(busy_s: float, elapsed_s: float) -> float:
    """Returns the part of a time in which the devices had nothing to do.

    Args:
      busy_s: In which they worked, from `DeviceTime`, which gives no more than passed.
      elapsed_s: The time.
    """
    # Rounding, and the clocks of several processes, differ by next to nothing.
    return min(max(1 - busy_s / elapsed_s, 0.0), 1.0)


def train_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the task's own metrics of a train row by name.

    Example:
      >>> train_metrics({"loss": 1.5, "train_s": 60.0, "train_accuracy": 0.5})
      {'accuracy': 0.5}
    """
    return {
        name.removeprefix("train_"): value
        for name, value in row.items()
        if name.startswith("train_") and name != "train_s"
    }


def repeat_name(bucket: int) -> str:
    """Returns the name of the loss of a bucket of repeats.

    Example:
      >>> repeat_name(0), repeat_name(REPEAT_BUCKETS - 1)
      ('loss_repeat_0', 'loss_repeat_7_and_later')
    """
    is_last = bucket == REPEAT_BUCKETS - 1
    return f"loss_repeat_{bucket}{'_and_later' if is_last else ''}"


def first_to_meet(
    rows: Sequence[Mapping[str, Any]],
    *,
    metric: str,
    mode: Literal["min", "max"],
    target: float,
) -> Mapping[str, Any] | None:
    """Returns the first evaluation that meets a target.

    Args:
      rows: All rows of the run, in order.
      metric: Its name, without ``eval_``.
      mode: Whether smaller (``"min"``) or larger values are better.
      target: The value to reach; 0 for none.

    Returns:
      The row, None if there is none.
    """
    if not target:
        return None
    for row in rows:
        value = row.get(f"eval_{metric}")
        if value is None:
            continue
        if value <= target if mode == "min" else value >= target:
            return row
    return None
