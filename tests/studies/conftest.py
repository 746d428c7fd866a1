"""Run folders made by hand, with numbers that a reader can check."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BATCH = 10


def write_run(
    folder: Path,
    *,
    factor: float = 1.0,
    losses: tuple[float, ...] = (3.0, 2.0, 1.0),
    target: float = 1.0,
    seconds_per_update: float = 0.5,
    bytes_per_update: int | None = None,
    simulated_storage: bool = True,
    synthetic_data: bool = False,
    **summary: Any,
) -> Path:
    """Writes a run that evaluates every 100 updates, at batch size 10."""
    rows = []
    for number, loss in enumerate(losses, start=1):
        updates = 100 * number
        fresh = int(updates * BATCH / factor)
        clocks = {"wall_s": updates * seconds_per_update, "train_s": 0.0}
        counts = {
            "updates": updates,
            "fresh": fresh,
            "repeats": updates * BATCH - fresh,
        }
        if bytes_per_update is not None:
            counts["bytes_sent"] = updates * bytes_per_update
        rows.append({"kind": "train", **counts, **clocks, "loss": loss + 0.1})
        rows.append({"kind": "eval", **counts, **clocks, "eval_loss": loss})
    evals = rows[1::2]
    met = next((row for row in evals if row["eval_loss"] <= target), None)
    facts = {
        "workload": "lm",
        "metric": "loss",
        "mode": "min",
        "target": target,
        "reached": met is not None,
        "updates": evals[-1]["updates"],
        "fresh": evals[-1]["fresh"],
        "repeats": evals[-1]["repeats"],
        "fresh_to_target": met and met["fresh"],
        "updates_to_target": met and met["updates"],
        "seconds_to_target": met and met["wall_s"],
        "final": {"loss": losses[-1]},
        "echo": {
            "factor": factor,
            "after": "augment",
            "order": "spread",
            "buffer": 512,
            "seed": 0,
        },
        "R": 4.0,
        "t_up_s": 0.08,
        "t_down_s": 0.02,
        "idle_fraction": 0.75,
        "wall_s": evals[-1]["wall_s"],
        "train_s": 1.0,
        "wait_s": 2.0,
        "pause_s": 3.0,
        "params_sha256": "00",
        "storage": {
            "latency_s": 0.0025,
            "bytes_per_s": 0.0,
            "distribution": "constant",
        },
        "simulated_storage": simulated_storage,
        "finished": True,
    }
    if bytes_per_update is not None:
        facts["bytes_sent"] = evals[-1]["bytes_sent"]
    environment = {
        "python": "3.11.0",
        "versions": {"jax": "0.10.2"},
        "devices": ["TFRT_CPU_0"],
        "backend": "cpu",
        "commit": "abc",
        "cpu_count": 2,
        "workload": {"data": {"synthetic": synthetic_data}},
    }
    folder.mkdir(parents=True)
    config = {"workload": "lm", "batch_size": BATCH, "eval_every": 100}
    _dump(folder / "config.json", config)
    _dump(folder / "environment.json", environment)
    _dump(folder / "summary.json", {**facts, **summary})
    # As in a real run, where JSON has no NaN.
    lines = "".join(json.dumps(row).replace("NaN", "null") + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines)
    return folder


def write_study(
    folder: Path, arms: dict[str, dict[str, Any]], base: dict[str, Any] | None = None
) -> Path:
    """Writes a study; ``arms`` maps a name to the arguments of `write_run`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, arguments in arms.items():
        write_run(folder / name, **arguments)
    facts = {
        "name": "a study",
        "base_config": base or {},
        "arms": list(arms),
        "storage": {"latency_s": 0.0025},
        "calibration": {"t_down_s": 0.02},
    }
    _dump(folder / "study.json", facts)
    return folder


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def make_run() -> Callable[..., Path]:
    return write_run


@pytest.fixture
def make_study() -> Callable[..., Path]:
    return write_study
