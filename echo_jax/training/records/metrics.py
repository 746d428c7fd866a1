"""The rows of ``metrics.jsonl``, and values derived from them."""

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
    """Makes the train rows, with rates since the previous row."""

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
        """Returns the row of an update, with rates since the last logged one."""
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
    """Returns the row of an evaluation; ``seconds`` are those before it."""
    return {
        "kind": "eval",
        **totals.counts(),
        **seconds,
        **{f"eval_{name}": value for name, value in metrics.items()},
    }


def idle_fraction(busy_s: float, elapsed_s: float) -> float:
    """Returns the part of a time in which the devices were idle, from 0 to 1."""
    # Rounding and the clocks of several processes may exceed the limits slightly.
    return min(max(1 - busy_s / elapsed_s, 0.0), 1.0)


def train_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the task's own metrics of a train row by name.

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
    """Returns the row of a run that resumes after damage, with rows lost until then."""
    return {
        "kind": "restored",
        "updates": update,
        "damaged": sorted(damaged),
        "rows_lost": rows_lost,
    }


def restored_counts(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the skipped checkpoints' updates and the lost rows of a run."""
    found = [row for row in rows if row["kind"] == "restored"]
    return {
        "restored": sorted({update for row in found for update in row["damaged"]}),
        # Rows of earlier versions lack the number.
        "rows_lost": sum(row.get("rows_lost", 0) for row in found),
    }


def first_to_meet(
    rows: Sequence[Mapping[str, Any]],
    *,
    metric: str,
    mode: Literal["min", "max"],
    target: float,
) -> Mapping[str, Any] | None:
    """Returns the first evaluation that meets a target; None without (target=0)."""
    if not target:
        return None
    for row in rows:
        value = row.get(f"eval_{metric}")
        if value is None:
            continue
        if value <= target if mode == "min" else value >= target:
            return row
    return None
