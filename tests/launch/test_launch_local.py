"""launch_tpu.sh local: real processes, a stand-in for echo-jax."""

import os
import re
import signal

import pytest
from launch_cloud import LONG_S, NASTY, TRAIN, lives, started, until

LOCAL = ["local", "--processes", "3", "--log-dir", "the logs"]


def logs(cloud):
    return [
        (cloud.home / f"the logs/process-{number}.log").read_text()
        for number in range(3)
    ]


def test_local_starts_processes_that_know_each_other(cloud):
    (cloud.home / "the logs").mkdir()
    (cloud.home / "the logs/process-0.log").write_text("of the last run\n")
    done = cloud.launch(*LOCAL, "--", *NASTY, JAX_NUM_CPU_DEVICES="8", NPROC="3")
    assert done.returncode == 0, done.stderr
    # The first one's log, as it grows.
    assert done.stdout == "training\n"
    rows = {row["argv"][-2]: row for row in cloud.rows("train")}
    coordinators = {row["argv"][-3] for row in rows.values()}
    (port,) = (int(each.rpartition(":")[2]) for each in coordinators)
    assert 1024 <= port < 65536
    for number in range(3):
        row = rows[f"--config.distributed.process_id={number}"]
        assert row["argv"] == [
            *["train", *NASTY, f"--config.distributed.coordinator=127.0.0.1:{port}"],
            f"--config.distributed.process_id={number}",
            "--config.distributed.num_processes=3",
        ]
        assert row["cwd"] == str(cloud.home)
        assert row["n"] == "16"
    assert logs(cloud) == ["of the last run\ntraining\n", *["training\n"] * 2]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("NPROC", "BASHPID[$(touch owned)]"), ("JAX_NUM_CPU_DEVICES", "4 || 1")],
)
def test_local_computes_with_numbers_only(cloud, variable, value):
    done = cloud.launch("local", "--dry-run", "--", "--x", **{variable: value})
    assert (done.returncode, done.stdout) == (2, "")
    problem = f": {variable} must be a whole number above 0, got {value}\n"
    assert done.stderr.endswith(problem)
    assert not [*cloud.home.rglob("owned")]


# Ctrl-C reaches whatever the script has just called, too.
@pytest.mark.parametrize(
    ("send", "signum"), [(os.kill, signal.SIGUSR1), (os.killpg, signal.SIGINT)]
)
def test_local_ends_all_processes_after_a_signal(cloud, send, signum):
    cloud.plan("saves saves saves")
    with cloud.launched(*LOCAL, "--", *TRAIN) as running:
        rows = started(cloud, 3)
        send(running.pid, signum)
        assert running.wait(timeout=LONG_S) == 143
        assert running.stderr.read().count("ended with exit code 143") == 3
    assert not any(lives(row["pid"]) for row in rows)
    assert logs(cloud) == ["training\nsaved\n"] * 3


def test_local_ends_the_others_when_one_fails(cloud):
    cloud.plan("deaf 7after3 saves")
    done = cloud.launch(*LOCAL, "--grace=1", "--", *TRAIN)
    assert done.returncode == 7
    codes = re.findall(r"ended with exit code (\d+)", done.stderr)
    assert codes == ["7", "143", "137"]
    assert sorted(logs(cloud)) == [*["training\n"] * 2, "training\nsaved\n"]
    assert not any(lives(row["pid"]) for row in cloud.rows("train"))
    # It takes another command.
    cloud.write("other", "#!/bin/sh\necho other $1 >&2; exit 5\n")
    done = cloud.launch(*LOCAL, "--", "x", ECHO_JAX_COMMAND=f"{cloud.world}/other")
    assert done.returncode == 5 and "other train\n" in logs(cloud)[0]


def test_local_leaves_nothing_behind_where_it_is_killed(cloud):
    cloud.plan("saves saves saves")
    with cloud.launched(*LOCAL, "--", *TRAIN) as running:
        rows = started(cloud, 3)
        running.kill()
        running.wait()
    until(lambda: not any(lives(row["pid"]) for row in rows))
    assert logs(cloud) == ["training\nsaved\n"] * 3
