"""launch_tpu.sh: what it refuses, calls and shows, what setup brings; and sky.yaml."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from launch_cloud import NASTY, ROOT, SCRIPTS, in_short

from echo_jax.cli import main


def test_shellcheck_finds_nothing():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    assert shellcheck.exists(), "shellcheck is missing: pip install -e '.[test]'"
    command = [shellcheck, "-x", *SCRIPTS, ".ci/run"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("create --type=v9-8", "--type=v9-8 has no default version: add --version"),
        ("stop --follow", "stop takes no '--follow'; see ./launch_tpu.sh stop --help"),
        ("status --name=A_b", "--name=A_b is no name of a VM: take a-z, 0-9 and -"),
        ("status --bucket=b", "--bucket=b is no bucket: it begins with gs://"),
        ("run --watch -- x", "run makes a VM: add --type"),
        ("delete", "echo-jax is not deleted: answer y, or add --yes"),
    ],
)
def test_what_cannot_be_is_refused(cloud, argv, message):
    done = cloud.launch(*argv.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.removeprefix("Delete ").splitlines()) == 1
    assert cloud.calls() == []


TPU = "tpus tpu-vm {} echo-jax"
QUEUED = "tpus queued-resources {} echo-jax"
GPU = "instances {} echo-jax"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (
            "create --zone=z --type v5litepod-16",
            f"{TPU} --zone=z --accelerator-type=v5litepod-16 "
            "--version=v2-alpha-tpuv5-lite --spot",
        ),
        (
            "create --queued --type=v6e-8 --spot --project=p",
            f"{QUEUED} --project=p --zone=of-env --node-id=echo-jax "
            "--accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --spot",
        ),
        (
            "create --gpu --type=g2-standard-8 --version=v",
            f"{GPU} --zone=of-env --machine-type=g2-standard-8 --image-family=v "
            "--image-project=deeplearning-platform-release --boot-disk-size=200GB "
            "--maintenance-policy=TERMINATE --scopes=cloud-platform "
            "--provisioning-model=SPOT --instance-termination-action=STOP",
        ),
        ("delete --yes --queued", f"{QUEUED} --zone=of-env --force --quiet"),
        ("status --gpu", f"{GPU} --zone=of-env --format=value(status)"),
    ],
)
def test_gcloud_is_called_for_every_kind_of_vm(cloud, argv, expected):
    verb = argv.split()[0]
    expected = expected.format("describe" if verb == "status" else verb).split()
    if verb == "delete":
        cloud.launch("create", "--type=v4-8")
        cloud.calls()
    # A flag comes before the environment.
    usual = {"ECHO_JAX_ZONE": "of-env", "ECHO_JAX_SPOT": "1", "ECHO_JAX_GPU": "0"}
    done = cloud.launch(*argv.split(), **usual)
    assert done.returncode == 0
    assert (done.stdout == "echo-jax MISSING\n") == (verb == "status")
    assert cloud.calls() == [["compute", *expected]]
    # What it cannot do is the end.
    cloud.plan(create=["no such project"], describe=["no such project"])
    if verb != "delete":
        done = cloud.launch(*argv.split())
        assert done.returncode == 1 and "no such project" in done.stderr


def test_without_gcloud_it_says_so(cloud):
    # A link of its own to what is needed: gcloud may be installed where the rest is.
    (cloud.world / "few").mkdir()
    for name in ("bash", "env", "dirname"):
        (cloud.world / "few" / name).symlink_to(shutil.which(name))
    done = cloud.launch("status", PATH=f"{cloud.world}/few")
    assert done.returncode == 2 and "gcloud is not installed: see" in done.stderr


def test_setup_brings_to_every_worker_what_it_lacks(cloud):
    cloud.launch("create", "--type=v5litepod-16")
    assert cloud.launch("run", "--", "--x").returncode != 0
    assert cloud.rows("train") == []
    cloud.plan(uv=["no network"])
    done = cloud.launch("setup")
    assert done.returncode == 1 and "no network" in done.stdout + done.stderr
    cloud.calls()
    assert cloud.launch("setup", "--zone=z").returncode == 0
    calls = cloud.calls()
    assert all({"--zone=z", "--worker=all", "--quiet"} <= {*call} for call in calls)
    assert [in_short(call) for call in calls] == ["installed", "scp", "install"]
    for worker in (0, 1):
        config = cloud.there(worker, "configs/lm.py")
        assert config.read_bytes() == (ROOT / "configs/lm.py").read_bytes()
        assert cloud.there(worker, "venv/bin/echo-jax").exists()
        assert not list(cloud.there(worker).rglob("__pycache__"))
    wheels = [row[-1].split(" @ ")[0] for row in cloud.rows("uv") if row[0] == "pip"]
    assert {*wheels} == {"echo-jax[tpu,gcs]"}
    assert cloud.states() == ["0 idle", "1 idle"]

    done = cloud.launch("setup")
    assert "echo-jax has this installed already" in done.stderr
    assert cloud.verbs() == ["installed"]
    # A change of what is brought is brought to all.
    with open(cloud.checkout / "configs/lm.py", "a") as file:
        file.write("# changed\n")
    assert cloud.launch("setup").returncode == 0
    assert cloud.verbs() == ["installed", "scp", "install"]
    # The environment was made once for each.
    assert [row[0] for row in cloud.rows("uv")].count("venv") == 2


@settings(max_examples=15)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
        min_size=1,
        max_size=25,
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


def test_dry_run_changes_nothing_and_prints_what_would_run(cloud, tmp_path):
    """Pasted into a shell, the commands do what the verbs do."""

    def contents():
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files}

    before = contents()
    shown = [cloud.launch(verb, "--dry-run", *DRY[verb]) for verb in DRY]
    local = cloud.launch("local", "--dry-run", "--log-dir=~/logs", "--", *NASTY)
    assert f"mkdir -p {cloud.home}/logs\n" in local.stdout
    for done in (*shown, local):
        assert (done.returncode, done.stderr) == (0, "")
    assert contents() == before
    for verb, argv in DRY.items():
        done = cloud.launch(verb, *argv)
        assert done.returncode == 0, done.stderr
    calls = cloud.calls()
    subprocess.run(
        ["bash", "-e"],
        input="".join(done.stdout for done in shown),
        cwd=cloud.checkout,
        env=cloud.environment(),
        capture_output=True,
        check=True,
        text=True,
    )
    assert cloud.calls() == calls


def test_sky_trains_a_config_that_we_have_with_extras_that_we_have(capsys):
    task = yaml.safe_load((ROOT / "sky.yaml").read_text(encoding="utf-8"))
    assert [n for n, value in task["envs"].items() if value is None] == ["WORKDIR"]
    envs = task["envs"] | {"WORKDIR": "gs://bucket/runs/lm"}
    line = re.sub(r"\$(\w+)", lambda found: envs[found[1]], task["run"])
    exec_, program, command, *options = shlex.split(line)
    assert (exec_, program.rpartition("/")[2], command) == ("exec", "echo-jax", "train")
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() == {"--config", "--workdir"}
    assert main(["configs", "show", str(ROOT / given["--config"])]) == 0
    assert "--config.workload=lm" in capsys.readouterr().out
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    known = project["project"]["optional-dependencies"].keys()
    setup = task["setup"].replace("$EXTRA", envs["EXTRA"])
    assert {*re.findall(r'"\.\[(.*)\]"', setup)[0].split(",")} <= known
