"""launch/slurm.sbatch on a real Slurm of two nodes, where one runs here."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch_cloud import LONG_S, ROOT, documented
from safetensors.numpy import load_file
from test_launch_search import SMALL, TOTAL, trials

TRAIN = ["--config", "configs/lm.py:tiny"]
# 60 updates take longer than the signal is away, however fast the machine is.
SLOW = "--config.data.storage.latency_s=0.12"


def call(*argv, check=True):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert not check or done.returncode == 0, (argv, done.stdout, done.stderr)
    return done.stdout.strip()


def nodes():
    try:
        return call("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
    except FileNotFoundError:
        return []


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(len(nodes()) < 2, reason="no Slurm of two nodes runs here"),
]


def submit(log, *argv):
    options = ["--parsable", "--time=10", f"--output={log}"]
    return call("sbatch", *options, *argv)


def end_of(job):
    """Waits for the end of a job; returns what Slurm knows of it."""
    end = time.monotonic() + 3 * LONG_S
    while state := call("squeue", "--noheader", f"--jobs={job}", "--format=%T %r"):
        assert time.monotonic() < end, state
        if "BeginTime" in state:  # Slurm begins a requeued job after two minutes.
            call("scontrol", "update", f"JobId={job}", "StartTime=now")
        time.sleep(1)
    return dict(re.findall(r"(\w+)=(\S+)", call("scontrol", "show", "job", job)))


def weights(workdir):
    call(sys.executable, "-m", "echo_jax", "export", workdir, "--to", "safetensors")
    arrays = load_file(workdir / "model.safetensors")
    return {name: array.tobytes() for name, array in arrays.items()}


def test_a_job_that_meets_its_time_limit_goes_on_to_the_same_parameters(tmp_path):
    options = {"long": [], "short": ["--time=2", "--signal=USR1@30"]}
    found, logs = {}, {}
    for name, limit in options.items():
        argv = [*TRAIN, f"--workdir={tmp_path / name}", *[SLOW] * bool(limit)]
        log = tmp_path / f"{name}.log"
        found[name] = end_of(submit(log, *limit, "launch/slurm.sbatch", *argv))
        logs[name] = log.read_text()
    for name, job in found.items():
        assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", "2"), logs[name]
        environment = json.loads((tmp_path / name / "environment.json").read_text())
        assert environment["processes"] == 2
    assert int(found["long"]["Restarts"]) == 0 < int(found["short"]["Restarts"])
    assert "resumes after update" in logs["short"]
    assert weights(tmp_path / "short") == weights(tmp_path / "long")


def test_slurm_takes_the_documented_commands():
    lines = [words for words in documented() if words[0] == "sbatch"]
    assert len(lines) == 2
    for words in lines:
        call("sbatch", "--test-only", *words[1:])


def test_a_job_that_fails_or_is_cancelled_is_not_requeued(tmp_path):
    log = tmp_path / "log"
    argv = ["--config=absent.py", f"--workdir={tmp_path / 'absent'}"]
    job = submit(log, "--nodes=1", "launch/slurm.sbatch", *argv)
    found = end_of(job)
    assert (found["JobState"], found["Restarts"]) == ("FAILED", "0")
    assert found["ExitCode"] == "2:0" and "absent.py" in log.read_text()
    log.unlink()
    argv = [*TRAIN, f"--workdir={tmp_path / 'cancelled'}", SLOW]
    job = submit(log, "--nodes=1", "launch/slurm.sbatch", *argv)
    while not log.exists() or "update 0 " not in log.read_text():
        assert call("squeue", "--noheader", f"--jobs={job}"), log.read_text()
        time.sleep(0.5)
    call("scancel", job)
    found = end_of(job)
    assert (found["JobState"], found["Restarts"]) == ("CANCELLED", "0")
    assert "stopped by SIGTERM" in log.read_text()


def test_the_tasks_of_an_array_share_the_trials_of_a_search(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    options = ["--config.search.repeats=1", "--jobs=1", f"--workdir={tmp_path / 's'}"]
    argv = ["study", f"--config={tmp_path / 'small.py'}", *options]
    array = ["--nodes=1", "--array=0-1", "launch/slurm.sbatch", *argv]
    end_of(submit(tmp_path / "%a.log", *array))
    logs = [(tmp_path / f"{task}.log").read_text() for task in (0, 1)]
    made = [re.findall(r"trial \d+/\d+  (\S+ #\d+)", log) for log in logs]
    assert all(made), logs
    assert len({*made[0], *made[1]}) == len(made[0] + made[1]) == TOTAL
    assert len(trials(tmp_path / "s")) == TOTAL
