"""What a run reports: its counts, the rows of ``metrics.jsonl``, and its results.

``summary.json`` has the results; ``diverged.json`` says that a run has diverged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.files.json_files import read_if_whole, write_json
from echo_jax.training.measure import Rates
from echo_jax.training.processes.distributed import is_main_process
from echo_jax.training.window import NonFiniteLossError
from echo_jax.training.xla import UpdateFlops
from echo_jax.workloads.base import Workload

# Counts that differ between the processes.
_COUNTED = ("fresh", "repeats")
# The fields by which a run is finished, or diverges, and their types.
_DECIDES_THE_END = {"target": int | float | None, "reached": bool, "updates": int}
_DECIDES_DIVERGED = {"target": int | float | None, "update": int}
_DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Totals:
    """Counts since the start of the run, also before it was resumed."""

    updates: int = 0  # Optimizer steps.
    fresh: int = 0  # Examples used for the first time.
    repeats: int = 0  # Examples used again.
    bytes_sent: int = 0  # Bytes that the updates' collectives returned on each device.
    # Seconds of work of the devices, until the last reading of `DeviceTime`.
    busy_s: float = 0.0

    def after(self, repeat: np.ndarray, *, bytes_sent: int) -> "Totals":
        """Returns the totals after K updates with repeat indices ``int32[K, B]``."""
        repeats = int(np.count_nonzero(repeat))
        # `replace` takes four times as long, and this runs at every update.
        return Totals(
            self.updates + len(repeat),
            self.fresh + repeat.size - repeats,
            self.repeats + repeats,
            self.bytes_sent + len(repeat) * bytes_sent,
            self.busy_s,
        )

    @classmethod
    def resumed(cls, before: Sequence[Mapping[str, Any]]) -> "Totals":
        """Returns the totals of this process at the start or resumption of a run."""
        # The first process keeps the earlier counts for all, so they count once.
        totals = cls.of_all([cls(**each) for each in before])
        if is_main_process():
            return totals
        return replace(totals, **dict.fromkeys(_COUNTED, 0))

    @classmethod
    def of_all(cls, totals: Sequence["Totals"]) -> "Totals":
        """Returns the totals over all processes."""
        if not totals:
            return cls()
        counts = {name: sum(getattr(t, name) for t in totals) for name in _COUNTED}
        # While one process waits for its data, the devices of the others wait within a
        # collective and seem to work. So the least time at work counts.
        busy_s = min(each.busy_s for each in totals)
        return replace(totals[0], busy_s=busy_s, **counts)

    def counts(self) -> dict[str, int]:
        """Returns all fields but ``busy_s``."""
        counts = asdict(self)
        del counts["busy_s"]
        return counts


class RowMaker:
    """Makes the train rows, with rates since the previous row."""

    def __init__(self, totals: Totals, wall_s: float, flops: UpdateFlops):
        self._totals, self._wall_s, self._flops = totals, wall_s, flops

    def train_row(
        self,
        totals: Totals,
        seconds: Mapping[str, float],
        numbers: Mapping[str, float],
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
            **numbers,
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
until the next one, see `echo_jax.training.evaluation`."""


def idle_fraction(busy_s: float, elapsed_s: float) -> float:
    """Returns the part of a time in which the devices were idle, from 0 to 1."""
    # A step that a loader on its cores slows down is busy: contention is not seen.
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


def describe_run(config: RunSpec, workload: Workload) -> dict[str, Any]:
    """Returns the facts that are known of a run before it begins."""
    storage = asdict(config.data.storage)
    return {
        "workload": workload.name,
        "metric": workload.metric,
        "mode": workload.mode,
        # The name of each output of a classifier.
        **{k: v for k, v in workload.task_info.items() if k == "classes"},
        "target": config.target or None,
        "echo": config.echo.to_dict(),
        "storage": storage,
        "simulated_storage": bool(storage["latency_s"] or storage["bytes_per_s"]),
    }


def make_summary(
    config: RunSpec,
    workload: Workload,
    *,
    rows: Sequence[dict[str, Any]],
    met: Mapping[str, Any] | None,
    totals: Totals,
    seconds: Mapping[str, float],
    rates: tuple[Rates, Rates],
    flops: UpdateFlops,
    **facts: Any,
) -> dict[str, Any]:
    """Returns ``summary.json``; `rates` are measured at the start, and corrected."""
    restored = [row for row in rows if row["kind"] == "restored"]
    final = [row for row in rows if row["kind"] == "eval"][-1]
    last = next((row for row in reversed(rows) if row["kind"] == "train"), None)
    (start, now), wall_s = rates, seconds["wall_s"]
    return {
        **describe_run(config, workload),
        "reached": met is not None,
        **totals.counts(),
        "fresh_to_target": met and met["fresh"],
        "updates_to_target": met and met["updates"],
        "seconds_to_target": met and met["wall_s"],
        "final": {
            name.removeprefix("eval_"): value
            for name, value in final.items()
            if name.startswith("eval_")
        },
        "train_final": {"loss": last["loss"], **train_metrics(last)} if last else {},
        "dispatch": config.dispatch.to_dict(),
        "R": now.ratio,
        "t_up_s": now.t_up_s,
        "t_up_start_s": start.t_up_s,
        "t_down_s": now.t_down_s,
        "t_down_start_s": start.t_down_s,
        "busy_s": totals.busy_s,
        "idle_fraction": idle_fraction(totals.busy_s, wall_s),
        **seconds,
        **flops.rates(updates=totals.updates, seconds=wall_s),
        "restored": sorted({each for row in restored for each in row["damaged"]}),
        "rows_lost": sum(row["rows_lost"] for row in restored),
        **facts,
        "rows": len(rows),
        "finished": True,
    }


def finished_summary(workdir: epath.Path, config: RunSpec) -> dict[str, Any] | None:
    """Returns the summary of a run that did all that a config asks for; else None."""
    summary = read_if_whole(workdir / "summary.json", _DECIDES_THE_END)
    if summary is None or summary["target"] != (config.target or None):
        return None
    is_stopped = config.stop_at_target and summary["reached"]
    return summary if is_stopped or summary["updates"] >= config.updates else None


def write_diverged(
    workdir: epath.Path, config: RunSpec, workload: Workload, error: NonFiniteLossError
) -> None:
    """Records that a run diverged, so that a study does not train it again."""
    rows = (workdir / "metrics.jsonl").read_bytes().splitlines()
    facts = {"update": error.update, "message": str(error), "rows": len(rows)}
    write_json(workdir / _DIVERGED, {**describe_run(config, workload), **facts})


def read_diverged(workdir: epath.Path, config: RunSpec) -> int | None:
    """Returns the update at which a run diverges; None if it is not known."""
    kept = read_if_whole(workdir / _DIVERGED, _DECIDES_DIVERGED)
    # A shorter run, or one to another target, may end before it diverges.
    if kept is None or kept["target"] != (config.target or None):
        return None
    return kept["update"] if kept["update"] <= config.updates else None
