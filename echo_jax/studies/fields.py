"""The fields that a report needs in the files of a run, and their types."""

from typing import Any

from echo_jax.studies.setting import FIELDS

__all__ = [
    "CONFIG",
    "DIVERGED",
    "ENVIRONMENT",
    "FALSIFIER",
    "SEARCH",
    "STORAGE",
    "STUDY",
    "SUMMARY",
    "row",
]

_NUMBER = int | float
_MAYBE = int | float | None

SUMMARY: dict[str, Any] = {
    "workload": str,
    "metric": str,
    "mode": str,
    "target": _MAYBE,
    "reached": bool,
    "fresh": _NUMBER,
    "repeats": _NUMBER,
    "updates": _NUMBER,
    "bytes_sent?": _NUMBER,
    "rows?": int,
    "restored?": list,
    "rows_lost?": int,
    "wall_s": _NUMBER,
    "t_down_s": _NUMBER,
    "R": _MAYBE,
    "idle_fraction": _MAYBE,
    "fresh_to_target": _MAYBE,
    "updates_to_target": _MAYBE,
    "seconds_to_target": _MAYBE,
    "simulated_storage": bool,
    "storage": dict,
    "echo": dict,
    "echo.factor": _NUMBER,
    "echo.after": str,
    "echo.order": str,
    "echo.buffer": _NUMBER,
}
# For a run that a study has marked as diverged.
DIVERGED: dict[str, Any] = {
    "workload": str,
    "metric": str,
    "mode": str,
    "target": _MAYBE,
    "update": int,
    "rows": int,
    "simulated_storage": bool,
    "storage": dict,
    "echo": dict,
    "echo.factor": _NUMBER,
    "echo.after": str,
    "echo.order": str,
    "echo.buffer": _NUMBER,
}
# For a run with simulated storage.
STORAGE: dict[str, Any] = {
    "storage.latency_s": _NUMBER,
    "storage.distribution": str,
    "storage.bytes_per_s": _NUMBER,
}
ENVIRONMENT: dict[str, Any] = {
    "backend": str,
    "devices": list,
    "workload.data.synthetic": bool,
}
CONFIG: dict[str, Any] = {
    "data?": dict,
    "mesh?.data": int,
    "mesh?.fsdp": int,
}
STUDY: dict[str, Any] = {
    "name": str,
    "arms": list,
    "base_config?": dict,
    "calibration": dict,
    "storage": dict,
}
# For a study that searched.
SEARCH: dict[str, Any] = {
    "name": str,
    "arms": list,
    "base_config": dict,
    **{f"base_config.{name}": kind for name, kind in FIELDS.items()},
    "search.space": dict,
    "search.points": int,
    "search.repeats": int,
    "search.seed": int,
    "confirm.streams": int,
    "stop.cut": _NUMBER,
    "falsifiers": list,
    "paper?": dict,
}
FALSIFIER: dict[str, Any] = {"says": str, "arm": str, "over": str, "below": _NUMBER}


def row(metric: str) -> dict[str, Any]:
    """Returns the fields of an evaluation."""
    counts = ("updates", "fresh", "repeats", "wall_s")
    numbers = dict.fromkeys((*counts, "bytes_sent?"), _NUMBER)
    return {**numbers, "after_fresh?": _MAYBE, f"eval_{metric}": _MAYBE}
