"""sky.yaml: that it says what SkyPilot knows, and asks for what we have."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml
from launch_cloud import ROOT

from echo_jax.cli import main

TASK = yaml.safe_load((ROOT / "sky.yaml").read_text(encoding="utf-8"))


def test_bash_reads_its_commands_and_one_value_has_to_be_given():
    assert [n for n, value in TASK["envs"].items() if value is None] == ["WORKDIR"]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=TASK[part], text=True, check=True)


def test_it_trains_with_a_config_that_we_have(capsys):
    envs = TASK["envs"] | {"WORKDIR": "gs://bucket/runs/lm"}
    line = re.sub(r"\$(\w+)", lambda found: envs[found[1]], TASK["run"])
    exec_, program, command, *options = shlex.split(line)
    assert (exec_, program.rpartition("/")[2], command) == ("exec", "echo-jax", "train")
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() == {"--config", "--workdir"}
    assert main(["configs", "show", str(ROOT / given["--config"])]) == 0
    assert "--config.workload=lm" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [TASK["envs"]["EXTRA"], "cuda"])
def test_it_installs_extras_that_we_have(extra):
    (wanted,) = re.findall(r'"\.\[(.*)\]"', TASK["setup"].replace("$EXTRA", extra))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(wanted.split(",")) <= project["project"]["optional-dependencies"].keys()
