"""launch_tpu.sh run --watch, over pre-emptions and failures."""

import pytest
from launch_cloud import LONG_S, NASTY, TRAIN, in_short, started, until

SLOW = pytest.mark.slow
WATCH = ["run", "--watch", "--type=v5litepod-16", "--spot"]


def test_watch_does_everything(cloud):
    done = cloud.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    verbs = cloud.verbs()
    first = ["describe", "create", "describe", "state", "installed", "scp", "install"]
    assert verbs[:8] == [*first, "start"]
    assert set(verbs[8:]) == {"describe", "state"}
    assert "finished" in done.stderr
    assert [row["argv"] for row in cloud.rows("train")] == [["train", *TRAIN]] * 2


@pytest.mark.parametrize(
    ("kind", "state", "replaced"),
    [
        ([], "PREEMPTED", "delete"),
        pytest.param(["--queued"], "SUSPENDED", "delete", marks=SLOW),
        pytest.param(["--gpu"], "TERMINATED", "start", marks=SLOW),
    ],
)
def test_watch_resumes_after_a_preemption(cloud, kind, state, replaced):
    num_workers = 1 if kind == ["--gpu"] else 2
    usual = {"PREEMPTED": "READY", "SUSPENDED": "ACTIVE", "TERMINATED": "RUNNING"}
    cloud.launch("create", *WATCH[2:], *kind)
    (created,) = cloud.calls()
    cloud.plan(
        states=[usual[state]] * 2 + [state, "STOPPING"],
        train=["saves"] * num_workers,
        create=[],
    )
    argv = [*TRAIN[:2], *NASTY, *TRAIN[2:]]
    done = cloud.launch(*WATCH, *kind, "--", *argv)
    assert done.returncode == 0, done.stderr
    assert f"echo-jax is {state}: making it again" in done.stderr
    rows = cloud.rows("train")
    assert [row["argv"] for row in rows] == [["train", *argv]] * 2 * num_workers
    calls = cloud.calls()
    at = next(i for i, call in enumerate(calls) if replaced in call)
    replacing = [in_short(call) for call in calls[at:]]
    if replaced == "start":  # Its disk is still there.
        expected = ["start", "stop", "start"]
    else:
        assert created in calls[at:]
        expected = ["delete", "create", "scp", "install", "stop", "start"]
    looks = ("describe", "state", "installed")
    assert [verb for verb in replacing if verb not in looks] == expected


@pytest.mark.slow
def test_watch_waits_for_capacity(cloud):
    cloud.launch("create", *WATCH[2:])
    states = ["READY", "PREEMPTED"]
    cloud.plan(states=states, train=["saves"] * 2, create=["no capacity"] * 6)
    done = cloud.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no capacity") == 6
    assert cloud.verbs().count("create") == 8


def test_watch_does_not_wait_for_what_never_was(cloud):
    cloud.plan(create=["no permission"])
    done = cloud.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 1
    assert cloud.verbs() == ["describe", "create"]


@pytest.mark.parametrize(
    "code",
    [*(pytest.param(code, marks=SLOW) for code in ("129", "130", "138")), "143"],
)
def test_watch_runs_again_what_was_saved(ready, code):
    ready.plan(train=[f"{code} after 2", "saves"])
    with ready.launched(*WATCH, "--", *TRAIN) as watching:
        # The other one is stopped first: it waits for a peer that has ended.
        rows = started(ready, 4)
        assert [row["argv"] for row in rows] == [["train", *TRAIN]] * 4
        assert watching.wait(timeout=LONG_S) == 0
    verbs = ready.verbs()
    assert [verb for verb in verbs if verb in ("start", "stop", "install")] == [
        *["start", "stop", "start"]
    ]


@pytest.mark.parametrize("code", ["1", "2"])
def test_watch_does_not_run_again_what_failed(ready, code):
    ready.plan(train=["saves", f"{code} after 2"])
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == int(code)
    assert f"failed with exit code {code}, and is not run again" in done.stderr
    assert len(ready.rows("train")) == 2
    # The other one was stopped, too.
    states = sorted(state[2:] for state in ready.states())
    assert states == sorted([f"ended {code}", "ended 143"])


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


def test_watch_does_not_remake_a_vm_deleted_before_training_started(ready):
    ready.plan(ssh=["no route"], states=["READY"] + ["REPAIRING"] * 10_000)
    with ready.launched(*WATCH, "--", *TRAIN) as watching:
        until(lambda: any("ssh" in call for call in ready.rows("gcloud")))
        ready.launch("delete", "--yes")
        assert watching.wait(timeout=LONG_S) == 2
        assert "echo-jax was deleted, not pre-empted" in watching.stderr.read()
    assert "create" not in ready.verbs()


@pytest.mark.slow
def test_watch_gives_up_on_a_setup_that_always_fails(cloud):
    cloud.launch("create", *WATCH[2:])
    cloud.plan(uv=["no network"] * 40)
    done = cloud.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 1
    assert "5 failures in a row: given up" in done.stderr
    assert cloud.rows("train") == []


def test_watch_tries_again_what_may_go_well_another_time(ready):
    ready.plan(train=["saves", "75 after 2"])
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 0, done.stderr
    assert "exit code 75: try 2 of 5" in done.stderr
    assert [row["argv"] for row in ready.rows("train")] == [["train", *TRAIN]] * 4


@pytest.mark.slow
def test_watch_does_not_try_for_ever(ready):
    ready.plan(train=["75"] * 100)
    done = ready.launch(*WATCH, "--", *TRAIN)
    assert done.returncode == 75
    assert "failed with exit code 75, and is not run again" in done.stderr
    assert len(ready.rows("train")) == 2 * 5
