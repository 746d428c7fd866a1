"""launch/sky.yaml and launch/jobset.yaml, with the loaders of their own engines."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from launch_cloud import ROOT, documented

SKY = yaml.safe_load((ROOT / "launch/sky.yaml").read_text(encoding="utf-8"))
JOBSET = yaml.safe_load((ROOT / "launch/jobset.yaml").read_text(encoding="utf-8"))


def with_extra(module):
    """Marks a test of the extra `launch`, which cannot be installed with `hf`."""
    reason = f"no {module}: pip install '.[launch]' in an environment without datasets"
    skip = pytest.mark.skipif(not importlib.util.find_spec(module), reason=reason)
    return lambda test: pytest.mark.slow(skip(test))


def sky_envs():
    assert [n for n, value in SKY["envs"].items() if value is None] == ["WORKDIR"]
    return SKY["envs"] | {"WORKDIR": "gs://bucket/runs/lm"}


def check_train(argv, command="train"):
    """Runs nothing: the config exists, and has each of the fields."""
    from echo_jax.cli import make_parser
    from echo_jax.config import check_config, load_with_flags

    args, fields = make_parser().parse_known_args([command, *argv])
    path = str(ROOT / args.config) if ".py" in args.config else args.config
    config = load_with_flags(path, fields)
    check_config(config.get("base", config))
    return args.workdir, config


@pytest.mark.parametrize(
    ("has_gpu", "num_nodes", "extra"), [(0, 4, "tpu"), (1, 1, "cuda"), (1, 2, "cuda")]
)
def test_sky_installs_an_extra_that_we_have_and_trains_on_every_machine(
    tmp_path, has_gpu, num_nodes, extra
):
    """Both of its scripts run here, with stand-ins for what they call."""
    home = tmp_path / "home"
    (home / "echo-jax/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    names = [home / "echo-jax/bin/echo-jax", tmp_path / "bin/python3"]
    for path in [*names, *[tmp_path / "bin/nvidia-smi"] * has_gpu]:
        path.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >>"$HOME/called"\n')
        path.chmod(0o755)
    env = {**sky_envs(), "HOME": str(home), "PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    env |= {"SKYPILOT_NUM_NODES": str(num_nodes), "SKYPILOT_NODE_RANK": "1"}
    env["SKYPILOT_NODE_IPS"] = "10.0.0.1\n10.0.0.2"

    def words(script):
        subprocess.run(["bash", "-c", script], env=env, check=True)
        called = (home / "called").read_text().splitlines()
        (home / "called").unlink()
        return called

    installed = words(SKY["setup"])[-1]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = re.fullmatch(r"\.\[(.*)\]", installed)[1].split(",")
    assert extras == ["gcs", extra]
    assert {*extras} <= project["project"]["optional-dependencies"].keys()
    train, *argv = words(SKY["run"])
    workdir, config = check_train(argv)
    assert (train, workdir, config.workload) == ("train", "gs://bucket/runs/lm", "lm")
    joined = config.distributed
    expected = ("10.0.0.1:8476", 2, 1) if extra == "cuda" and num_nodes > 1 else ("",)
    found = (joined.coordinator, joined.num_processes, joined.process_id)
    assert found[: len(expected)] == expected


def test_jobset_trains_a_config_that_we_have_on_all_hosts():
    (job,) = (each["template"]["spec"] for each in JOBSET["spec"]["replicatedJobs"])
    assert job["parallelism"] == job["completions"] == 4
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["echo-jax", "train"]
    workdir, config = check_train(container["args"])
    assert (workdir, config.workload) == ("gs://BUCKET/runs/lm", "lm")


@with_extra("sky")
def test_skypilot_reads_its_file(tmp_path):
    script = """if True:
        import sky, sys, yaml
        config = yaml.safe_load(open(sys.argv[1]))
        task = sky.Task.from_yaml_config(config, [("WORKDIR", "gs://b/runs")])
        for each in task.resources:
            print(each.accelerators, each.use_spot, each.cloud, each.job_recovery)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, ROOT / "launch/sky.yaml"],
        cwd=ROOT,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    tpu, gpu = sorted(done.stdout.splitlines(), key=lambda line: "L4" in line)
    assert "{'tpu-v5litepod-8': 1} True GCP" in tpu and "{'L4': 1} True None" in gpu
    assert all("'max_restarts_on_errors': 4" in line for line in (tpu, gpu))


@with_extra("kubernetes_validate")
def test_the_job_in_the_jobset_is_one_of_kubernetes():
    import kubernetes_validate

    (replicated,) = JOBSET["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", **replicated["template"]}
    job["metadata"] = JOBSET["metadata"]
    version = kubernetes_validate.latest_version()
    kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        kubernetes_validate.validate(job, version, strict=True)


def test_the_documented_commands_can_be_typed(tmp_path):
    """As far as that is seen without a cloud; Slurm's tests submit some of them."""
    env = {**os.environ, "ECHO_JAX_ZONE": ""}
    seen = set()
    for name, *words in documented():
        seen.add(name)
        if name == "export":
            env |= dict(word.split("=") for word in words)
        elif name == "./launch_tpu.sh":
            call = [f"{ROOT}/launch_tpu.sh", words[0], "--dry-run", *words[1:]]
            done = subprocess.run(call, env=env, cwd=tmp_path, capture_output=True)
            assert (done.returncode, done.stderr) == (0, b""), words
            if words[0] in ("run", "local"):
                check_train(words[words.index("--") + 1 :])
        elif name == "sbatch":
            argv = words[words.index("launch/slurm.sbatch") + 1 :]
            command = "train" if argv[0].startswith("--") else argv.pop(0)
            check_train(argv, command)
        else:
            files = [word for word in words if word.startswith("launch/")]
            assert all((ROOT / file).exists() for file in files)
    assert seen > {"./launch_tpu.sh", "sbatch", "sky", "kubectl"}
