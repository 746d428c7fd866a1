"""``summary.json``: the results of a run; ``diverged.json``: that it has diverged."""

from collections.abc import Mapping, Sequence
from typing import Any

from echo_jax.config import Config
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import read_if_whole, write_json
from echo_jax.training.decide import Decided
from echo_jax.training.finite import NonFiniteLossError
from echo_jax.training.records.metrics import (
    Totals,
    first_to_meet,
    idle_fraction,
    restored_counts,
    train_metrics,
)
from echo_jax.training.xla.flops import UpdateFlops
from echo_jax.workloads.base import Workload

__all__ = [
    "DECIDES_THE_END",
    "describe_run",
    "is_finished",
    "make_summary",
    "read_diverged",
    "write_diverged",
]

DECIDES_THE_END = {"target": int | float | None, "reached": bool, "updates": int}
"""The fields by which `is_finished` goes, and their types."""


def describe_run(config: Config, workload: Workload) -> dict[str, Any]:
    """Returns the facts that are known of a run before it begins."""
    storage = config.data.storage.to_dict()
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
    config: Config,
    workload: Workload,
    *,
    rows: Sequence[dict[str, Any]],
    totals: Totals,
    seconds: Mapping[str, float],
    decided: Decided,
    t_up_s: float,
    step_s: float,
    flops: UpdateFlops,
    skipped_updates: int,
    params_sha256: str,
) -> dict[str, Any]:
    """Returns the content of ``summary.json``; see docs/design.md, section 7."""
    met = first_to_meet(
        rows, metric=workload.metric, mode=workload.mode, target=config.target
    )
    final = [row for row in rows if row["kind"] == "eval"][-1]
    last = next((row for row in reversed(rows) if row["kind"] == "train"), None)
    known = describe_run(config, workload)
    echo = known["echo"]
    return {
        **known,
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
        "train_final": {
            "loss": last["loss"],
            **train_metrics(last),
        }
        if last
        else {},
        "echo": echo,
        "dispatch": config.dispatch.to_dict(),
        "hold_batch": config.data.hold_batch,
        # Corrected during the run; `*_start_s` were measured before the first update.
        "R": t_up_s / step_s,
        "t_up_s": t_up_s,
        "t_up_start_s": decided.rates.t_up_s,
        "t_down_s": step_s,
        "t_down_start_s": decided.rates.t_down_s,
        "busy_s": totals.busy_s,
        "idle_fraction": idle_fraction(totals.busy_s, seconds["wall_s"]),
        **seconds,
        **flops.rates(updates=totals.updates, seconds=seconds["wall_s"]),
        "skipped_updates": skipped_updates,
        **restored_counts(rows),
        "params_sha256": params_sha256,
        "rows": len(rows),
        "finished": True,
    }


def is_finished(summary: Mapping[str, Any], config: Config) -> bool:
    """Whether a run already did all that a config asks for."""
    if summary["target"] != (config.target or None):
        return False
    stopped = config.stop_at_target and summary["reached"]
    return stopped or summary["updates"] >= config.updates


_DIVERGED = "diverged.json"
_DECIDES_DIVERGED = {"target": int | float | None, "update": int}


def write_diverged(
    workdir: RunPath, config: Config, workload: Workload, error: NonFiniteLossError
) -> None:
    """Records that a run diverged, so that a study does not train it again."""
    facts: dict[str, Any] = describe_run(config, workload)
    rows = (workdir / "metrics.jsonl").read_bytes().splitlines()
    content = {
        **facts,
        "update": error.update,
        "message": str(error),
        "rows": len(rows),
    }
    write_json(workdir / _DIVERGED, content)


def read_diverged(workdir: RunPath, config: Config) -> int | None:
    """Returns the update at which a run diverges; None if it is not known."""
    found = read_if_whole(workdir / _DIVERGED, _DECIDES_DIVERGED)
    # A shorter run, or one to another target, may end before it diverges.
    if found is None or found["target"] != (config.target or None):
        return None
    return found["update"] if found["update"] <= config.updates else None
