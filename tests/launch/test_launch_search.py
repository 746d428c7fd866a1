"""A search as a command: killed at any time, and shared by several processes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "configs/sweeps"
TOTAL = 2 * (2 + 1)
# Two arms of a study of lags.
SMALL = f"""
from echo_jax.config import load_config, set_arms
def get_config(variant=""):
    study = load_config("{SWEEPS}/s4_lag.py:tiny").copy_and_resolve_references()
    with study.unlocked():
        study.confirm.streams = 1
        set_arms(study, {{name: study.arms[name] for name in ("baseline", "lag_4")}})
    return study
"""


def start(workdir, *options):
    config = workdir.parent / "small.py"
    config.write_text(SMALL)
    options = ["--config.search.repeats=1", "--workdir", workdir, *options]
    return subprocess.Popen(
        [sys.executable, "-m", "echo_jax", "study", "--config", config, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def said(process):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    return re.findall(r"trial \d+/\d+  (\S+ #\d+)", output)


def wait_for(process, what):
    assert any(what in line for line in process.stdout), "it never came"


def trials(workdir):
    found = {}
    for path in (workdir / "trials").glob("*.json"):
        for row in json.loads(path.read_text())["trials"]:
            found[path.stem, row["number"]] = row
    return found


@pytest.mark.slow
def test_a_search_that_is_killed_stopped_and_shared_loses_no_trial(tmp_path):
    folder = tmp_path / "study"
    killed = start(folder, "--jobs=1")
    wait_for(killed, "trial 1/")
    killed.kill()
    # Its worker finds out that it is left, and ends: nobody has its output then.
    killed.communicate(timeout=60)
    made = trials(folder)
    stopped, other = (start(folder, "--jobs=1") for _ in range(2))
    wait_for(stopped, "trial ")
    os.killpg(stopped.pid, signal.SIGUSR1)  # Its worker too, as Slurm does.
    output, _ = stopped.communicate(timeout=60)
    assert stopped.returncode == 128 + signal.SIGUSR1, output
    assert "the trials that have ended are kept" in output
    names = said(other)
    assert len({*names}) == len(names) < TOTAL - len(made)
    # Those that were made before are as they were.
    found = trials(folder)
    assert made and {name: found[name] for name in made} == made
    assert len(found) == TOTAL
    files = {"table.md", "report.html", "curves.png", "ratios.png", "trials.png"}
    assert files <= {path.name for path in folder.iterdir()}
    assert "| lag_4 |" in (folder / "table.md").read_text()
