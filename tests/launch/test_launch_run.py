"""launch_tpu.sh run, logs, status and stop, on workers that really run bash."""

import os
import signal
import subprocess
from pathlib import Path

from launch_cloud import LONG_S, NASTY, TRAIN, in_short, lives, started, until


def test_run_goes_on_in_the_background(ready):
    ready.plan(train=["saves", "saves"])
    assert ready.launch("run", "--bucket=gs://b/logs/", "--", *TRAIN).returncode == 0
    assert ready.verbs() == ["state", "start"]
    for row in started(ready, 2):
        assert row["argv"] == ["train", *TRAIN]
        assert Path(row["cwd"], "configs/lm.py").exists()
        assert not row["ignores_ctrl_c"]
    pids = [ready.there(i, "run/pid").read_text().strip() for i in (0, 1)]
    command = f"echo-jax train {' '.join(TRAIN)}"
    running = [f"{i} running {pid} {command}" for i, pid in enumerate(pids)]
    assert ready.states() == running

    # One at a time: the second is refused by name, whatever it is.
    done = ready.launch("run", "--", "--config", "other.py")
    assert done.returncode == 2
    assert f"worker w-0 running {pids[0]} {command}" in done.stderr
    assert "or ./launch_tpu.sh stop --name=echo-jax" in done.stderr
    assert ready.verbs() == ["state"]
    with open(ready.checkout / "configs/lm.py", "a") as file:
        file.write("# changed\n")
    done = ready.launch("setup")
    assert done.returncode == 2 and "stop it first" in done.stderr
    assert ready.states() == running

    assert ready.launch("stop").returncode == 0
    assert ready.states() == ["0 stopped 143", "1 stopped 143"]
    assert len(ready.rows("train")) == 2
    # The last copy of the log holds the end.
    for worker in ("w-0", "w-1"):
        log = ready.world / "bucket/b/logs/echo-jax" / worker / "train.log"
        until(lambda log=log: log.exists() and "exit code 143" in log.read_text())
        assert "training\nsaved\n" in log.read_text()


def test_run_that_ends_leaves_its_exit_code_and_its_log(ready):
    ready.plan(train=["0", "3"])
    ready.launch("run", "--", *NASTY)
    assert sorted(state[2:] for state in ready.ended()) == ["ended 0", "ended 3"]
    # A stop where nothing runs changes nothing.
    assert ready.launch("stop").returncode == 0
    assert sorted(state[2:] for state in ready.states()) == ["ended 0", "ended 3"]
    # Then it can be run again; the log goes on.
    ready.plan(train=["saves", "saves"])
    ready.launch("run", "--", "--y")
    rows = started(ready, 4)
    assert [row["argv"] for row in rows[:2]] == [["train", *NASTY]] * 2
    assert [state.split()[1] for state in ready.states()] == ["running", "running"]
    done = ready.launch("logs")
    assert "== " in done.stdout and "echo-jax train --y\ntraining\n" in done.stdout
    assert ready.launch("logs", "--worker=all").stdout.count("training\n") == 4
    with ready.launched("logs", "--follow") as following:
        until(lambda: "train --y" in following.stdout.readline())
        with open(ready.there(0, "run/train.log"), "a") as log:
            log.write("later\n")
        until(lambda: following.stdout.readline() == "later\n")
        ready.end_all()
    ready.plan(ssh=["the VM cannot be reached"])
    done = ready.launch("logs", "--bucket=gs://b/logs")
    assert done.returncode == 1
    assert "copies are in gs://b/logs/echo-jax/" in done.stderr


def test_a_start_waits_until_what_has_ended_is_gone(ready):
    """The lock is freed after the exit code is written, and a look holds it, too."""
    folder = ready.there(0, "run")
    folder.mkdir()
    (folder / "exit_code").write_text("0\n")
    holder = ["flock", str(folder / "lock"), "sh", "-c", "echo held; read line"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(holder, **pipes, text=True) as held:
        assert held.stdout.readline() == "held\n"
        with ready.launched("run", "--", "--x") as starting:
            # The other worker is started after it.
            until(lambda: "start" in [in_short(call) for call in ready.rows("gcloud")])
            assert ready.rows("train") == []
            held.communicate("\n")
            assert starting.wait(timeout=LONG_S) == 0
    assert len(started(ready, 2)) == 2


def test_what_does_not_save_in_time_is_killed(ready):
    ready.plan(train=["deaf", "deaf"])
    ready.launch("run", "--grace=1", "--", "--x")
    pids = [row["pid"] for row in started(ready, 2)]
    assert ready.launch("stop").returncode == 0
    states = sorted(state[2:] for state in ready.states())
    assert states == ["stopped 137", "stopped 137"]
    assert not any(map(lives, pids))


def test_training_ends_with_what_watches_it(ready):
    ready.plan(train=["saves", "saves"])
    assert ready.launch("run", "--", *TRAIN).returncode == 0
    rows = started(ready, 2)
    for worker in (0, 1):
        os.kill(int(ready.there(worker, "run/pid").read_text()), signal.SIGKILL)
    until(lambda: not any(lives(row["pid"]) for row in rows))
    # Who looked now would see that it does not run; it can be started again.
    until(lambda: ready.states() == ["0 lost", "1 lost"])
    for worker in (0, 1):
        assert "saved" in ready.there(worker, "run/train.log").read_text()
    assert ready.launch("run", "--", *TRAIN).returncode == 0
