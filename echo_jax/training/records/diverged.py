"""``diverged.json``: the record of an arm whose training diverged."""

from typing import Any

from echo_jax.config import Config
from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import read_if_whole, write_json
from echo_jax.training.finite import NonFiniteLossError
from echo_jax.training.records.summary import describe_run
from echo_jax.workloads.base import Workload

__all__ = ["read_diverged", "write_diverged"]

_NAME = "diverged.json"
_DECIDES = {"target": int | float | None, "update": int}


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
    write_json(workdir / _NAME, content)


def read_diverged(workdir: RunPath, config: Config) -> int | None:
    """Returns the update at which a run diverges; None if it is not known."""
    found = read_if_whole(workdir / _NAME, _DECIDES)
    # A shorter run, or one to another target, may end before it diverges.
    if found is None or found["target"] != (config.target or None):
        return None
    return found["update"] if found["update"] <= config.updates else None
