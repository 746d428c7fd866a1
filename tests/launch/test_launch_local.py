"""launch_tpu.sh local: real processes, a stand-in for echo-jax."""

import os
import re
import shutil
import signal
import subprocess

import pytest
from launch_cloud import LONG_S, NASTY, ROOT, TRAIN, lives, started, until

LOCAL = ["local", "--processes", "3", "--log-dir", "the logs"]


def logs(cloud):
    return [
        (cloud.home / f"the logs/process-{number}.log").read_text()
        for number in range(3)
    ]


def test_local_starts_processes_that_know_each_other(cloud):
    cloud.plan(train=["leaves"] * 3)
    (cloud.home / "the logs").mkdir()
    (cloud.home / "the logs/process-0.log").write_text("of the last run\n")
    done = cloud.launch(*LOCAL, "--", *NASTY, JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    # The first one's log, as it grows.
    assert done.stdout == "training\n"
    rows = sorted(started(cloud, 3), key=lambda row: row["argv"][-1])
    coordinator = rows[0]["argv"][-3]
    port = coordinator.removeprefix("--config.distributed.coordinator=127.0.0.1:")
    assert 1024 <= int(port) < 65536
    for number, row in enumerate(rows):
        assert row["argv"] == [
            *["train", *NASTY, coordinator],
            "--config.distributed.num_processes=3",
            f"--config.distributed.process_id={number}",
        ]
        assert row["cwd"] == str(cloud.home)
        assert row["env"]["JAX_PLATFORMS"] == "cpu"
        assert not row["ignores_ctrl_c"]
    assert logs(cloud) == ["of the last run\ntraining\n", *["training\n"] * 2]
    # Nothing that it has started outlives a process.
    until(lambda: not any(lives(row["left"]) for row in rows))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NPROC", "BASHPID[$(touch owned)]"), ("JAX_NUM_CPU_DEVICES", "4 || 1")],
)
def test_local_computes_with_numbers_only(cloud, variable, value):
    done = cloud.launch("local", "--dry-run", "--", "--x", **{variable: value})
    assert done.returncode == 2
    assert done.stderr.endswith(f": {variable}={value} is no whole number above 0\n")
    assert not done.stdout
    assert not [*cloud.home.rglob("owned")]


def test_a_worker_computes_with_numbers_only(cloud):
    """What reaches it over ssh is not what check_settings has seen."""
    worker = shutil.copy(f"{ROOT}/launch_worker.sh", cloud.home)
    (cloud.home / "installed").touch()
    for verb in ("start", "supervise"):
        call = ["bash", worker, verb, "BASHPID[$(touch owned)]", "60", "", "--x"]
        done = subprocess.run(call, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--grace=BASHPID[$(touch owned)] is no whole number" in done.stderr
    assert not [*cloud.home.rglob("owned")]


@pytest.mark.parametrize(
    ("send", "signum", "code"),
    # Ctrl-C reaches whatever the script has just called, too.
    [(os.kill, signal.SIGUSR1, 143), (os.killpg, signal.SIGINT, 130)],
)
def test_local_forwards_a_signal_to_all(cloud, send, signum, code):
    cloud.plan(train=["saves"] * 3)
    with cloud.launched(*LOCAL, "--", *TRAIN) as running:
        rows = started(cloud, 3)
        send(running.pid, signum)
        assert running.wait(timeout=LONG_S) == code
        assert running.stderr.read().count(f"ended with exit code {code}") == 3
    assert not any(lives(row["pid"]) for row in rows)
    assert logs(cloud) == ["training\nsaved\n"] * 3


def test_local_ends_the_others_when_one_fails(cloud):
    cloud.plan(train=["deaf", "7 after 3", "saves"])
    done = cloud.launch(*LOCAL, "--grace=1", "--", *TRAIN)
    assert done.returncode == 7
    assert "has not ended within 1 s: killed" in done.stderr
    # The others are stopped when one fails, the end of whose log is shown.
    codes = re.findall(r"ended with exit code (\d+)", done.stderr)
    assert codes == ["7", "143", "137"] and done.stderr.endswith("training\n")
    assert sorted(logs(cloud)) == [*["training\n"] * 2, "training\nsaved\n"]
    assert not any(lives(row["pid"]) for row in cloud.rows("train"))
    # It takes another command.
    cloud.write("other", "#!/bin/sh\necho other $1 >&2; exit 5\n")
    done = cloud.launch(*LOCAL, "--", "x", ECHO_JAX_COMMAND=f"{cloud.world}/other")
    assert done.returncode == 5 and "other train\n" in logs(cloud)[0]


@pytest.mark.parametrize(("how", "grace"), [("saves", 60), ("deaf", 1)])
def test_local_leaves_nothing_behind_where_it_is_killed(cloud, how, grace):
    cloud.plan(train=[how] * 3)
    with cloud.launched(*LOCAL, f"--grace={grace}", "--", *TRAIN) as running:
        rows = started(cloud, 3)
        # Also all that is in its group, as a shell's kill -9 %1 does.
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    until(lambda: not any(lives(row["pid"]) for row in rows))
    if how == "saves":
        assert logs(cloud) == ["training\nsaved\n"] * 3
