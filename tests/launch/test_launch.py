"""launch_tpu.sh: the commands of gcloud, and what they do on the workers of a VM."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launch_cloud import NASTY, ROOT, SCRIPT, TRAIN, documented, lives, started, until


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "shellcheck is missing: pip install -e '.[test]'"
    command = [shellcheck, SCRIPT, "launch/slurm.sbatch", ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def dry(line: str, *more: str) -> list[str]:
    """The commands that a call would run."""
    # A flag comes before the environment.
    usual = {"ECHO_JAX_ZONE": "of-env", "ECHO_JAX_SPOT": "1", "ECHO_JAX_GPU": "0"}
    usual["ECHO_JAX_TYPE"] = "v4-8"
    verb, *options = line.split()
    done = subprocess.run(
        [SCRIPT, verb, "--dry-run", *options, *more],
        env={**os.environ, **usual},
        capture_output=True,
        check=True,
        text=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("create --type=v9-8", "add --type, such as v5litepod-16, or also --version"),
        ("create", "add --type, such as v5litepod-16"),
        ("watch", "there is no verb 'watch'; see ./launch_tpu.sh --help"),
        ("stop --force", "there is no option '--force'; see ./launch_tpu.sh --help"),
        ("stop --name", "--name needs a value"),
        ("stop --grace=x[0]", "--grace must be a whole number above 0, got x[0]"),
        ("run --gpu", "run needs the arguments of echo-jax train: -- --config"),
    ],
)
def test_what_cannot_be_is_refused(cloud, argv, message):
    done = cloud.launch(*argv.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert cloud.rows("gcloud") == []


def test_the_help_is_the_comment_at_the_top(cloud):
    done = cloud.launch("run", "--help")
    assert done.returncode == 0 and done.stdout == cloud.launch().stdout
    lines = SCRIPT.read_text().splitlines()[1:]
    shown = done.stdout.splitlines()
    assert [f"# {line}".rstrip() for line in shown] == lines[: len(shown)]
    assert lines[len(shown)] == "set -euo pipefail"


TPU = "compute tpus tpu-vm {} echo-jax"
QUEUED = "compute tpus queued-resources {} echo-jax"
GPU = "compute instances {} echo-jax"
VM = {
    "create --zone=z --type v5litepod-16": f"{TPU} --zone=z --spot "
    "--accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite",
    "create --queued --type=v6e-8 --project=p": f"{QUEUED} --project=p --zone=of-env "
    "--spot --node-id=echo-jax --accelerator-type=v6e-8 "
    "--runtime-version=v2-alpha-tpuv6e",
    "create --gpu --type=g2-standard-8 --version=v": f"{GPU} --zone=of-env "
    "--provisioning-model=SPOT --instance-termination-action=STOP "
    "--machine-type=g2-standard-8 --image-family=v "
    "--image-project=deeplearning-platform-release --boot-disk-size=200GB "
    "--maintenance-policy=TERMINATE --scopes=cloud-platform",
    "delete --queued --yes": f"{QUEUED} --zone=of-env --force --quiet",
    "delete --gpu": f"{GPU} --zone=of-env",
    "status --spot=0": f"{TPU} --zone=of-env --format=value(state)",
    "status --gpu": f"{GPU} --zone=of-env --format=value(status)",
    "status --queued": f"{QUEUED} --zone=of-env --format=value(state.state)",
}


@pytest.mark.parametrize(("argv", "expected"), VM.items())
def test_gcloud_is_called_for_every_kind_of_vm(argv, expected):
    verb = argv.split()[0].replace("status", "describe")
    assert shlex.split(dry(argv)[0]) == ["gcloud", *expected.format(verb).split()]


def test_create_takes_further_options_of_gcloud():
    (call,) = dry("create --type=v4-8", "--", "--network", "a b")
    words = ["--version=tpu-ubuntu2204-base", "--network", "a b"]
    assert shlex.split(call)[-3:] == words


@pytest.mark.slow
def test_the_real_gcloud_knows_every_option(tmp_path):
    """Without an account it parses its arguments, and then asks for an account."""
    if not shutil.which("gcloud"):
        pytest.skip("gcloud is not installed")
    lines = [*VM, "setup", "setup --gpu", "logs --follow", "logs --gpu", "stop"]
    lines += ["stop --gpu", "delete", "delete --queued"]
    for name, *words in documented():
        if name == "./launch_tpu.sh" and words[0] != "run":
            lines.append(" ".join(words))
    calls = [call for line in lines for call in dry(line)]
    calls += dry("run --bucket=gs://b", "--", *NASTY) + dry("run --gpu", "--", *NASTY)
    calls = [call for call in dict.fromkeys(calls) if call.startswith("gcloud ")]
    assert len(calls) > 20
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/echo-jax.tgz").touch()
    variables = {"HOME": str(tmp_path), "CLOUDSDK_CONFIG": str(tmp_path / "config")}
    variables |= {"CLOUDSDK_CORE_PROJECT": "p", "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}

    def says(call):
        return subprocess.run(
            ["bash", "-c", call],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        ).stderr

    assert "unrecognized arguments: --wrong" in says(calls[0] + "--wrong")
    for call in calls:
        assert "do not currently have an active account" in says(call), call


def test_setup_installs_this_checkout_on_every_worker(cloud):
    done = cloud.launch("run", "--", *TRAIN)
    assert done.returncode == 2 and "run setup first" in done.stderr
    for _ in range(2):
        done = cloud.launch("setup")
        assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        there = cloud.homes(worker) / "echo-jax"
        # What the build of the package needs, and the configs.
        for name in ("configs/lm.py", "echo_jax/__init__.py", "README.md", "LICENSE"):
            assert (there / "src" / name).exists()
        assert (there / "venv/bin/echo-jax").exists()
    calls = cloud.rows("uv")
    assert [row[0] for row in calls] == ["venv", "pip", "venv", "pip", "pip", "pip"]
    assert {row[-1] for row in calls if row[0] == "pip"} == {"./src[tpu,gcs]"}


@pytest.fixture
def ready(cloud):
    assert cloud.launch("setup").returncode == 0
    return cloud


def test_a_training_goes_on_in_the_background_until_it_is_stopped(ready):
    ready.plan("saves saves")
    argv = [*TRAIN, *NASTY]
    assert ready.launch("run", "--bucket=gs://b/logs/", "--", *argv).returncode == 0
    rows = started(ready, 2)
    for row in rows:
        assert row["argv"] == ["train", *argv]
        assert Path(row["cwd"], "configs/lm.py").exists()
    assert ready.launch("status").stdout.splitlines() == [
        *("READY", "w-0 training", "training", "w-1 training", "training")
    ]
    # One at a time, and nothing is replaced meanwhile.
    for call in (["run", "--", *TRAIN], ["setup"]):
        done = ready.launch(*call)
        assert done.returncode == 2
        assert "w-1 is training: stop it first" in done.stderr
    copies = [ready.world / f"bucket/b/logs/echo-jax/w-{i}.log" for i in (0, 1)]
    until(lambda: all(path.exists() for path in copies))

    assert ready.launch("stop").returncode == 0
    assert not any(lives(row["pid"]) for row in rows)
    end = "training\nsaved\n== ended with exit code 143\n"
    assert all(path.read_text().endswith(end) for path in copies)
    assert "w-1 idle\n== ended with exit code 143" in ready.launch("status").stdout
    # A stop where nothing runs changes nothing; the log of the next run goes on.
    assert ready.launch("stop").returncode == 0
    ready.plan("3 saves")
    assert ready.launch("run", "--", "--y").returncode == 0
    started(ready, 4)
    until(lambda: "exit code 3" in ready.launch("logs").stdout)
    shown = ready.launch("logs", "--worker=all").stdout
    assert shown.count("training\n") == 4
    with ready.launched("logs", "--follow", "--worker=1") as following:
        until(lambda: "train --y" in following.stdout.readline())
        ready.launch("stop")
        until(lambda: following.stdout.readline() == "saved\n")


def test_stop_kills_a_training_that_does_not_end(ready):
    ready.plan("deaf saves")
    assert ready.launch("run", "--", *TRAIN).returncode == 0
    rows = started(ready, 2)
    done = ready.launch("stop", "--grace=1")
    assert done.returncode == 0 and done.stdout.count("killed") == 1
    until(lambda: not any(lives(row["pid"]) for row in rows))


def test_dry_run_changes_nothing_and_prints_what_would_run(cloud):
    """Pasted into a shell, the commands do what the verbs do."""
    verbs = [["create", "--type=v4-8"], ["setup"], ["run", "--", *NASTY], ["status"]]
    verbs += [["logs", "--worker=1"], ["stop"], ["delete", "--yes"]]
    shown = [cloud.launch(verb[0], "--dry-run", *verb[1:]) for verb in verbs]
    assert all((done.returncode, done.stderr) == (0, "") for done in shown)
    assert not cloud.rows("gcloud") and not (cloud.checkout / "dist").exists()
    for verb in verbs:
        done = cloud.launch(*verb)
        assert done.returncode == 0, done.stderr
    calls = cloud.rows("gcloud")
    subprocess.run(
        ["bash", "-e"],
        input="".join(done.stdout for done in shown),
        cwd=cloud.checkout,
        env=cloud.environment(),
        capture_output=True,
        check=True,
        text=True,
    )
    assert cloud.rows("gcloud") == 2 * calls
