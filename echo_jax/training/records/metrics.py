"""The rows of ``metrics.jsonl``, and what is read off them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from echo_jax.training.records.totals import Totals
from echo_jax.training.xla.flops import UpdateFlops

__all__ = [
    "AFTER_FRESH",
    "RowMaker",
    "eval_row",
    "first_to_meet",
    "idle_fraction",
    "restored_counts",
    "restored_row",
    "train_metrics",
]


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
        found: Mapping[str, float],
        *,
        t_up_s: float,
        step_s: float,
    ) -> dict[str, Any]:
        """Returns the row of an update.

        Rates are over the time since the last logged update, or since the start or the
        resumption.

        Args:
          totals: After the update.
          seconds: The clock's seconds, when the update was seen to be done.
          found: What the devices found, see `echo_jax.training.trainer.StepReport.row`.
          t_up_s: Seconds of a fresh batch, by what was seen until now.
          step_s: Seconds of an update at work, see `DeviceTime`.
        """
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
            **found,
            "t_up_s": t_up_s,
            "step_s": step_s,
            "busy_s": totals.busy_s,
            "idle_fraction": idle_fraction(busy_s, elapsed_s),
            "examples_per_s": uses / elapsed_s,
            "fresh_per_s": fresh / elapsed_s,
            **self._flops.rates(updates=updates, seconds=elapsed_s),
        }


AFTER_FRESH = "after_fresh"
"""Of the row of an evaluation: the metric where the run had trained on fresh data alone
until the next one, see `echo_jax.training.fresh_branch`."""


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


def restored_row(
    update: int | None, damaged: Iterable[int], rows_lost: int
) -> dict[str, Any]:
    """Returns the row of a run that goes on after something was damaged.

    Args:
      update: Updates done.
      damaged: Those of newer checkpoints, which were passed over.
      rows_lost: Rows up to here that are gone.
    """
    return {
        "kind": "restored",
        "updates": update,
        "damaged": sorted(damaged),
        "rows_lost": rows_lost,
    }


def restored_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns what damage has cost in all sittings of a run.

    Args:
      rows: All of them.

    Returns:
      ``restored``, the updates of checkpoints that were passed over, and ``rows_lost``.
    """
    found = [row for row in rows if row["kind"] == "restored"]
    return {
        "restored": sorted({update for row in found for update in row["damaged"]}),
        # Rows of earlier versions do not say.
        "rows_lost": sum(row.get("rows_lost", 0) for row in found),
    }


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
