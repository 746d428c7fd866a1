"""The smoke tests of two studies, with an arm of every kind that they have."""

from pathlib import Path

import pytest

from echo_jax.config import load_config
from echo_jax.folders import run_folder
from echo_jax.json_files import read_json
from echo_jax.runs import run_study

CONFIGS = Path(__file__).parents[2] / "configs"
KINDS = {
    "communication": (
        "baseline",
        "accumulate_4",
        "bernoulli_4",
        "diloco",
        "stale_4",
    ),
    "large_batch": ("baseline", "lars", "lamb", "growing", "onecycle"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("file", KINDS)
def test_every_kind_of_arm_trains_to_its_end(file, tmp_path):
    study = load_config(f"{CONFIGS}/{file}.py:tiny")
    kinds = KINDS[file]
    with study.unlocked():
        for arm in set(study.arms) - set(kinds):
            del study.arms[arm]
    run_study(study, tmp_path)
    for arm in kinds:
        summary = read_json(run_folder(tmp_path / arm) / "summary.json")
        assert summary is not None
        assert (
            summary["updates"] == {**study.base, **study.arms.get(arm, {})}["updates"]
        )
