"""The fields that a report needs in the files of a run, and their types."""

from collections.abc import Mapping
from typing import Any

from echo_jax.files.json_files import missing

_NUMBER = int | float
_MAYBE = int | float | None

# Fields of groups as earlier runs have called them, and their names now.
_LOCAL = ("schedule", "every", "p", "p_end")
_RENAMED: dict[str, dict[str, str]] = {
    "echo": {"after": "stage", "where": "buffer_on", "cap": "max_uses"},
    "batch": {"micro": "accumulation_steps"},
    "local": {name: f"sync_{name}" for name in _LOCAL},
}

_OF_EVERY_RUN: dict[str, Any] = {
    "workload": str,
    "metric": str,
    "mode": str,
    "target": _MAYBE,
    "simulated_storage": bool,
    "storage": dict,
    "echo": dict,
    "echo.factor": _NUMBER,
    "echo.stage": str,
    "echo.order": str,
    "echo.buffer": _NUMBER,
}
SUMMARY: dict[str, Any] = {
    **_OF_EVERY_RUN,
    "reached": bool,
    **dict.fromkeys(("fresh", "repeats", "updates", "bytes_sent?"), _NUMBER),
    "rows?": int,
    "restored?": list,
    "rows_lost?": int,
    **dict.fromkeys(("wall_s", "t_down_s"), _NUMBER),
    **dict.fromkeys(("R", "idle_fraction", "fresh_to_target"), _MAYBE),
    **dict.fromkeys(("updates_to_target", "seconds_to_target"), _MAYBE),
}
# For a run that a study has marked as diverged.
DIVERGED: dict[str, Any] = {**_OF_EVERY_RUN, "update": int, "rows": int}
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
CONFIG: dict[str, Any] = {"data?": dict, "mesh?.data": int, "mesh?.fsdp": int}
STUDY: dict[str, Any] = {
    "name": str,
    "arms": list,
    "base_config?": dict,
    "calibration": dict,
    "storage": dict,
}
# The fields of a config by which a training is described.
_SETTING: dict[str, Any] = {
    "target": int | float,
    "batch_size": int,
    "workload": str,
    "model": dict,
    "data.source": str,
    "optim.name": str,
    "optim.schedule": str,
    "optim.warmup_updates": int,
}
# For a study that searched.
SEARCH: dict[str, Any] = {
    "name": str,
    "arms": list,
    "base_config": dict,
    **{f"base_config.{name}": kind for name, kind in _SETTING.items()},
    "search.space": dict,
    "search.points": int,
    "search.repeats": int,
    "search.seed": int,
    "confirm.streams": int,
    "stop.cut": _NUMBER,
    "falsifiers": list,
    "paper?": dict,
}
PREDICTION: dict[str, Any] = {"says": str, "arm": str, "over": str, "below": _NUMBER}


def with_names_of_now(content: Any, group: str = "") -> Any:
    """Returns the content of a config, a summary or a study with today's names."""
    if not isinstance(content, Mapping):
        return content
    now = _RENAMED.get(group, {})
    return {now.get(n, n): with_names_of_now(x, n) for n, x in content.items()}


def row(metric: str) -> dict[str, Any]:
    """Returns the fields of an evaluation."""
    counts = ("updates", "fresh", "repeats", "wall_s")
    numbers = dict.fromkeys((*counts, "bytes_sent?"), _NUMBER)
    return {**numbers, "after_fresh?": _MAYBE, f"eval_{metric}": _MAYBE}


def setting_in_words(config: Mapping[str, Any]) -> str:
    """Returns the setting of a config in words; "" if it lacks one of the fields."""
    if missing(config, _SETTING):
        return ""
    model = ", ".join(f"{name} {value}" for name, value in config["model"].items())
    optim = config["optim"]
    target = f", to {config['target']:g}" if config["target"] else ""
    return (
        f"{config['workload']} on {config['data']['source']} ({model}), batches of "
        f"{config['batch_size']}, {optim['name']}, {optim['schedule']} rate after "
        f"{optim['warmup_updates']} updates{target}"
    )


def flat_fields(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested fields by their dotted names: ``{"optim.lr": 0.1}``."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= flat_fields(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
