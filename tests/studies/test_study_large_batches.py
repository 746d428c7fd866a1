"""The smoke tests of two studies, with the kinds of arms that no other one trains."""

from pathlib import Path

import pytest

from echo_jax.config import load_config
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json
from echo_jax.runs import run_study

CONFIGS = Path(__file__).parents[2] / "configs"
# The others are those of the searches s7 and s8: tests/launch/test_launch_search.py.
KINDS = {
    "communication": ("baseline", "stale_4"),
    "large_batch": ("baseline", "onecycle"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
@pytest.mark.parametrize("file", KINDS)
def test_arms_train_to_their_end(file, tmp_path):
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
