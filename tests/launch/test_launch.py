"""launch_tpu.sh: what it refuses, calls and shows, and what setup brings."""

import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_cloud import ALL, COPY, NASTY, ROOT, SCRIPTS, TPU, WHEEL, in_short


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "shellcheck is missing: pip install -e '.[test]'"
    done = subprocess.run(
        [shellcheck, "-x", *SCRIPTS, ".ci/run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    "verb", ["", "create", "setup", "run", "logs", "status", "stop", "delete", "local"]
)
def test_help_shows_an_example(cloud, verb):
    done = cloud.launch(*verb.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"example:\n  {'export' if not verb else './launch_tpu.sh ' + verb}" in (
        done.stdout
    )
    assert max(map(len, done.stdout.splitlines())) <= 88
    assert cloud.calls() == []


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("train", "there is no verb 'train'; see ./launch_tpu.sh --help"),
        ("create", "create makes a VM: add --type, such as v5litepod-16, or"),
        ("create --type=v9-8", "--type=v9-8 has no default version: add --version"),
        ("create --zone", "--zone needs a value"),
        ("create --spot=1", "--spot takes no value"),
        ("create --type=v4-8 --queued --gpu", "--queued is for TPU VMs"),
        ("create --type=v4-8 -- x", "create takes no '--'"),
        ("stop --follow", "stop takes no '--follow'; see ./launch_tpu.sh stop --help"),
        ("stop now", "stop takes no 'now'"),
        ("status --name=A_b", "--name=A_b is no name of a VM: take a-z, 0-9 and -"),
        ("status --poll=0", "--poll=0 is no whole number above 0"),
        ("status --bucket=b", "--bucket=b is no bucket: it begins with gs://"),
        ("run", "run needs the arguments of echo-jax train: add -- --config"),
        ("run --watch -- x", "run makes a VM: add --type"),
        ("local --watch -- x", "local takes no '--watch'"),
        ("local --processes=two -- x", "--processes=two is no whole number above 0"),
        ("delete", "echo-jax is not deleted: answer y, or add --yes"),
    ],
)
def test_what_cannot_be_is_refused(cloud, argv, message):
    done = cloud.launch(*argv.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.removeprefix("Delete ").splitlines()) == 1
    assert cloud.calls() == []


def test_without_gcloud_it_says_so(cloud):
    # A link of its own to what is needed: gcloud may be installed where the rest is.
    (cloud.world / "few").mkdir()
    for name in ("bash", "env", "dirname"):
        (cloud.world / "few" / name).symlink_to(shutil.which(name))
    done = cloud.launch("status", PATH=f"{cloud.world}/few")
    assert done.returncode == 2
    assert "gcloud is not installed: see https://" in done.stderr


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--type v5litepod-16",
            "compute tpus tpu-vm create echo-jax --accelerator-type=v5litepod-16 "
            "--version=v2-alpha-tpuv5-lite",
        ),
        (
            "--name=a-1 --project=p --zone=z --type=v4-32 --version=v --spot",
            "compute tpus tpu-vm create a-1 --project=p --zone=z "
            "--accelerator-type=v4-32 --version=v --spot",
        ),
        (
            "--queued --type=v6e-8 --spot --zone=z",
            "compute tpus queued-resources create echo-jax --zone=z "
            "--node-id=echo-jax --accelerator-type=v6e-8 "
            "--runtime-version=v2-alpha-tpuv6e --spot",
        ),
        (
            "--gpu --type=g2-standard-8 --spot",
            "compute instances create echo-jax --machine-type=g2-standard-8 "
            "--image-family=common-cu128-ubuntu-2204-nvidia-570 "
            "--image-project=deeplearning-platform-release --boot-disk-size=200GB "
            "--maintenance-policy=TERMINATE --scopes=cloud-platform "
            "--provisioning-model=SPOT --instance-termination-action=STOP",
        ),
    ],
)
def test_create(cloud, flags, expected):
    assert cloud.launch("create", *flags.split()).returncode == 0
    assert cloud.calls() == [expected.split()]


def test_a_flag_comes_before_the_environment(cloud):
    environment = {"ECHO_JAX_TYPE": "v4-8", "ECHO_JAX_ZONE": "of-env"}
    environment |= {"ECHO_JAX_SPOT": "1", "ECHO_JAX_GPU": "0", "ECHO_JAX_NAME": "n"}
    cloud.launch("create", "--zone", "of-flag", **environment)
    expected = [*TPU, "create", "n", "--zone=of-flag", "--accelerator-type=v4-8"]
    assert cloud.calls() == [[*expected, "--version=tpu-ubuntu2204-base", "--spot"]]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "compute tpus tpu-vm delete echo-jax --quiet"),
        (
            "--queued --project=p",
            "compute tpus queued-resources delete echo-jax --project=p --force --quiet",
        ),
        ("--gpu", "compute instances delete echo-jax --quiet"),
    ],
)
def test_delete(cloud, flags, expected):
    cloud.launch("create", "--type=v4-8")
    cloud.calls()
    assert cloud.launch("delete", "--yes", *flags.split()).returncode == 0
    assert cloud.calls() == [expected.split()]


def test_a_failure_of_gcloud_is_the_end(cloud):
    cloud.plan(create=["no more capacity in the zone"])
    done = cloud.launch("create", "--type=v4-8")
    assert done.returncode == 1
    assert "no more capacity" in done.stderr


def test_setup_brings_wheel_and_configs_to_every_worker(cloud):
    cloud.launch("create", "--type=v5litepod-16")
    cloud.calls()
    assert cloud.launch("setup", "--zone=z").returncode == 0
    ssh = [*TPU, "ssh", "echo-jax", "--zone=z", *ALL]
    assert cloud.calls() == [
        [*ssh, "--command=cat echo-jax/installed || echo new"],
        [*TPU, *COPY, "--zone=z", *ALL],
        [
            *ssh,
            "--command=rm -rf echo-jax/new && mkdir -p echo-jax/new && "
            "tar -xzf echo-jax.tgz -C echo-jax/new && "
            "bash echo-jax/new/launch_worker.sh install tpu",
        ],
    ]
    for worker in (0, 1):
        config = cloud.there(worker, "configs/lm.py")
        assert config.read_bytes() == (ROOT / "configs/lm.py").read_bytes()
        assert cloud.there(worker, "venv/bin/echo-jax").exists()
        assert not list(cloud.there(worker).rglob("__pycache__"))
    wheels = [row[-1].split(" @ ") for row in cloud.rows("uv") if row[0] == "pip"]
    assert [name for name, _ in wheels] == ["echo-jax[tpu,gcs]"] * 2
    assert all(url.endswith("/echo-jax/new/" + WHEEL) for _, url in wheels)


def test_setup_leaves_alone_what_is_there(ready):
    num_installs = len(ready.rows("uv"))
    done = ready.launch("setup")
    assert "echo-jax has this installed already" in done.stderr
    assert ready.verbs() == ["installed"]

    # A worker that lacks it brings it to all.
    ready.there(1, "installed").unlink()
    assert ready.launch("setup").returncode == 0
    assert ready.verbs() == ["installed", "scp", "install"]

    # And so does a change of a config, or of the source; the environment stays.
    for name in ("configs/lm.py", "pyproject.toml"):
        with open(ready.checkout / name, "a") as file:
            file.write("# changed\n")
        assert ready.launch("setup").returncode == 0
        assert ready.verbs() == ["installed", "scp", "install"]
    again = [row[0] for row in ready.rows("uv")[num_installs:]]
    assert again == ["pip"] * 6


def test_setup_that_broke_off_is_done_again(cloud):
    cloud.launch("create", "--type=v5litepod-16")
    cloud.plan(uv=["no network"])
    done = cloud.launch("setup")
    assert done.returncode == 1
    assert "no network" in done.stdout + done.stderr
    cloud.calls()
    assert cloud.launch("setup").returncode == 0
    assert cloud.verbs() == ["installed", "scp", "install"]
    assert cloud.states() == ["0 idle", "1 idle"]

    # Nor does an update that broke off leave a worker that looks set up.
    with open(cloud.checkout / "pyproject.toml", "a") as file:
        file.write("# changed\n")
    cloud.plan(uv=["no network", "no network"])
    assert cloud.launch("setup").returncode == 1
    assert cloud.states() == ["0 new", "1 new"]


def test_setup_of_a_gpu_vm(cloud):
    cloud.launch("create", "--gpu", "--type=g2-standard-8")
    cloud.calls()
    assert cloud.launch("setup", ECHO_JAX_GPU="1").returncode == 0
    look, copy, install = cloud.calls()
    assert look[:4] == install[:4] == ["compute", "ssh", "echo-jax", "--quiet"]
    assert copy == ["compute", *COPY, "--quiet"]
    assert install[-1].endswith("launch_worker.sh install cuda")


@pytest.mark.slow
def test_the_wheel_is_the_same_every_time(tmp_path):
    hashes = []
    for number in range(2):
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
        command += ["--wheel-dir", str(tmp_path / str(number)), "."]
        subprocess.run(command, cwd=ROOT, check=True)
        (wheel,) = (tmp_path / str(number)).glob("echo_jax-*.whl")
        hashes.append(wheel.read_bytes())
        assert "echo_jax/cli/commands.py" in zipfile.ZipFile(wheel).namelist()
    assert hashes[0] == hashes[1]


@settings(max_examples=60)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        min_size=1,
        max_size=5,
    )
)
def test_a_quoted_line_is_read_as_the_same_words(words):
    script = 'source ./launch_worker.sh; eval "printf \'%s\\0\' $(quoted "$@")"'
    done = subprocess.run(
        ["bash", "-c", script, "launch_worker.sh.sourced", *words],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert done.stdout == b"".join(word.encode() + b"\0" for word in words)


DRY = {
    "create": ["--type=v5litepod-16", "--spot"],
    "setup": ["--zone=z"],
    "run": ["--bucket=gs://b", "--", *NASTY],
    "status": [],
    "logs": ["--worker=1"],
    "stop": ["--project=p q"],
    "delete": ["--yes"],
}


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("verb", [*DRY, "run --watch", "local"])
def test_dry_run_changes_nothing(cloud, tmp_path, verb):
    before = _contents(tmp_path)
    argv = DRY.get(verb, ["--", *NASTY])
    done = cloud.launch(*verb.split(), "--dry-run", *argv, ECHO_JAX_TYPE="v4-8")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
    assert _contents(tmp_path) == before


def test_dry_run_prints_what_would_run(cloud):
    """Pasted into a shell, the commands do what the verbs do."""
    shown = [cloud.launch(verb, "--dry-run", *DRY[verb]).stdout for verb in DRY]
    assert cloud.calls() == []
    for verb, argv in DRY.items():
        done = cloud.launch(verb, *argv)
        assert done.returncode == 0, done.stderr
    calls = cloud.calls()
    subprocess.run(
        ["bash", "-e"],
        input="".join(shown),
        cwd=cloud.checkout,
        env=cloud.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert cloud.calls() == calls


def test_dry_run_of_watch_shows_what_may_come(cloud):
    argv = ["--spot", "--queued", "--type=v4-8", "--", "--x"]
    done = cloud.launch("run", "--watch", "--dry-run", *argv)
    lines = [shlex.split(line, comments=True) for line in done.stdout.splitlines()]
    gcloud = [line[1:] for line in lines if line and line[0] == "gcloud"]
    assert [in_short(call) for call in gcloud] == [
        *["describe", "create", "state", "installed", "scp", "install", "start"],
        *["describe", "state", "delete"],
    ]
