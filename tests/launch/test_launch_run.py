"""launch_tpu.sh run, logs, status, stop and --watch, on workers that run bash."""

import os
import signal
from pathlib import Path

import pytest
from launch_cloud import LONG_S, NASTY, TRAIN, in_short, lives, started, until

MAKE = ["--type=v5litepod-16", "--spot"]
WATCH = ["run", "--watch", *MAKE]


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


@pytest.mark.parametrize(
    ("kind", "usual", "state", "replaced"),
    [
        ([], "READY", "PREEMPTED", "delete"),
        (["--gpu"], "RUNNING", "TERMINATED", "start"),
    ],
)
def test_watch_resumes_after_a_preemption(cloud, kind, usual, state, replaced):
    num_workers = 1 if kind == ["--gpu"] else 2
    states = [usual] * 2 + [state, "STOPPING"]
    # At first there is no room for another.
    full = ["", *["no capacity"] * 2] if replaced == "delete" else []
    cloud.plan(states=states, train=["saves"] * num_workers, create=full)
    argv = [*TRAIN[:2], *NASTY, *TRAIN[2:]]
    done = cloud.launch(*WATCH, *kind, "--", *argv)
    assert done.returncode == 0, done.stderr
    assert f"echo-jax is {state}: making it again" in done.stderr
    assert done.stderr.count("no capacity") == len(full[1:])
    rows = cloud.rows("train")
    assert [row["argv"] for row in rows] == [["train", *argv]] * 2 * num_workers
    calls = cloud.calls()
    (first, *_) = created = [call for call in calls if "create" in call]
    assert created == [first] * (1 + len(full))
    at = next(i for i, call in enumerate(calls) if replaced in call)
    replacing = [in_short(call) for call in calls[at:]]
    if replaced == "start":  # Its disk is still there.
        expected = ["start", "stop", "start"]
    else:
        expected = ["delete", *["create"] * 3, "scp", "install", "stop", "start"]
    looks = ("describe", "state", "installed")
    assert [verb for verb in replacing if verb not in looks] == expected


def test_watch_runs_again_what_may_go_well(ready):
    ready.plan(train=["75 after 2", "saves"])
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 0 and "exit code 75: try 2 of 5" in done.stderr
    # The other one is stopped first: it waits for a peer that has ended.
    verbs = [v for v in ready.verbs() if v in ("start", "stop", "install")]
    assert verbs == ["start", "stop", "start"]
    assert [row["argv"] for row in ready.rows("train")] == [["train", *TRAIN]] * 4


def test_watch_does_not_run_again_what_failed(ready):
    ready.plan(train=["saves", "2 after 2"])
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 2
    assert "failed with exit code 2, and is not run again" in done.stderr
    assert len(ready.rows("train")) == 2
    # The other one was stopped, too.
    assert sorted(state[2:] for state in ready.states()) == ["ended 143", "ended 2"]


def test_watch_sees_a_preemption_behind_a_failure(ready):
    """Who loses its peers fails before the VM's state says why."""
    states = ["READY", "READY", "PREEMPTED"]
    ready.plan(states=states, train=["saves", "1 after 2"])
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert len(ready.rows("train")) == 4


def test_watch_ends_when_the_user_stops_it(ready):
    ready.plan(train=["saves", "saves"])
    with ready.launched(*WATCH, "--", *TRAIN) as watching:
        started(ready, 2)
        # Somebody else cannot run another thing there, but can watch the same.
        done = ready.launch(*WATCH, "--", *TRAIN, "--config.seed=1")
        assert done.returncode == 2 and "echo-jax is running" in done.stderr
        with ready.launched(*WATCH, "--", *TRAIN) as second:
            assert any("runs this already" in line for line in second.stderr)
            assert ready.launch("stop").returncode == 0
            assert second.wait(timeout=LONG_S) == watching.wait(timeout=LONG_S) == 143
    assert len(ready.rows("train")) == 2


def test_watch_ends_when_the_vm_is_deleted(ready):
    ready.plan(train=["saves", "saves"])
    with ready.launched(*WATCH, "--", *TRAIN) as watching:
        started(ready, 2)
        ready.launch("delete", "--yes")
        assert watching.wait(timeout=LONG_S) == 2
        assert "echo-jax was deleted, not pre-empted" in watching.stderr.read()
    assert "create" not in ready.verbs()


@pytest.mark.slow
def test_watch_does_not_try_for_ever(cloud):
    cloud.launch("create", *MAKE)
    cloud.plan(train=["75"] * 100)
    done = cloud.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 75
    assert "exit code 75, and is not run again" in done.stderr
    assert len(cloud.rows("train")) == 2 * 5
