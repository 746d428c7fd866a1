"""A search as a command: killed at any time, and shared by several processes."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STUDY = [sys.executable, "-m", "echo_jax", "study", "--config.search.repeats=1"]
STUDIES = sorted(
    path.stem
    for path in (ROOT / "configs" / "sweeps").glob("s[0-9]_*.py")
    if path.stem != "s4_lag"
)
TOTAL = 4 * (2 + 2)
DEVICES = {"s7_communication": {"JAX_NUM_CPU_DEVICES": "4", "NPROC": "8"}}


def start(workdir, *options, name="s4_lag"):
    config = f"configs/sweeps/{name}.py:tiny"
    return subprocess.Popen(
        [*STUDY, "--config", config, "--workdir", workdir, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **DEVICES.get(name, {})},
    )


def files(workdir):
    return {p.name: p.read_bytes() for p in (workdir / "trials").glob("*.json")}


def said(process, counts=None):
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    if counts:
        assert re.findall(r"trial (\d+/\d+)  ", output) == counts
    return re.findall(r"trial \d+/\d+  (\S+ #\d+)", output)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    counts = [f"{number}/{TOTAL}" for number in range(1, TOTAL + 1)]
    made = said(start(folder, "--jobs=1"), counts)
    assert len(made) == len({*made}) == TOTAL
    return folder, files(folder)


def test_a_study_leaves_a_report(whole):
    folder, _ = whole
    names = {"table.md", "report.html", "curves.png", "ratios.png", "trials.png"}
    assert names <= {path.name for path in folder.iterdir()}
    table = (folder / "table.md").read_text()
    assert "| lag_4 |" in table and "95 % intervals" in table


def test_a_search_that_is_killed_loses_and_changes_no_trial(tmp_path, whole):
    rng = random.Random(0)
    for number in range(6):
        process = start(tmp_path)
        time.sleep(rng.uniform(2, 9))
        if number % 2:
            # All of it, as a machine that is switched off.
            os.killpg(process.pid, signal.SIGKILL)
        else:
            # Its workers find out that they are left, and end.
            process.kill()
        process.communicate(timeout=60)
    said(start(tmp_path))
    assert files(tmp_path) == whole[1]


def test_two_processes_on_one_folder_share_the_trials(tmp_path, whole):
    both = [start(tmp_path, "--jobs=1") for _ in range(2)]
    made = [said(process) for process in both]
    assert all(made)
    assert sorted(made[0] + made[1]) == sorted({*made[0], *made[1]})
    assert len(made[0]) + len(made[1]) == TOTAL
    assert files(tmp_path) == whole[1]


# SIGTERM is tried on a study without a search, in tests/test_cli.py.
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_search_and_the_same_command_goes_on(tmp_path, whole, signum):
    process = start(tmp_path)
    for line in process.stdout:
        if "trial 3/" in line:
            break
    os.killpg(process.pid, signum)  # Its workers too, as a terminal or SLURM does.
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signum, output
    assert "the trials that have ended are kept" in output
    assert len(said(start(tmp_path))) < TOTAL
    assert files(tmp_path) == whole[1]


@pytest.mark.parametrize("name", STUDIES)
def test_a_small_version_of_every_study_runs(tmp_path, name):
    # In one process, for two would each compile all of it.
    options = ["--jobs=1", "--config.confirm.streams=1"]
    if name != "s3_untuned":
        options.append("--config.search.points=1")
    assert said(start(tmp_path, *options, name=name))
    assert (tmp_path / "report.html").exists()


def test_data_that_does_not_come_ends_a_search_with_a_status_of_its_own(tmp_path):
    stuck = "--config.base.data.storage.latency_s=60", "--config.base.data.timeout_s=2"
    output, _ = (process := start(tmp_path, *stuck)).communicate(timeout=120)
    assert process.returncode == 75, output
    assert "timeout_s" in output
