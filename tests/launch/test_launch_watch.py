"""launch_tpu.sh run --watch, over pre-emptions and failures."""

import pytest
from launch_cloud import LONG_S, NASTY, TRAIN, in_short, started

MAKE = ["--type=v5litepod-16", "--spot"]
WATCH = ["run", "--watch", *MAKE]


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
