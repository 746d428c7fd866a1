"""``summary.json``: the results of a run; ``diverged.json``: that it has diverged."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from etils import epath

from echo_jax.config.run import RunSpec
from echo_jax.files.json_files import read_if_whole, write_json
from echo_jax.training.measure import Rates
from echo_jax.training.records.metrics import Totals, idle_fraction, train_metrics
from echo_jax.training.window import NonFiniteLossError
from echo_jax.training.xla import UpdateFlops
from echo_jax.workloads.base import Workload

# The fields by which a run is finished, or diverges, and their types.
_DECIDES_THE_END = {"target": int | float | None, "reached": bool, "updates": int}
_DECIDES_DIVERGED = {"target": int | float | None, "update": int}
_DIVERGED = "diverged.json"


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
