"""The config in a run folder: how it is read, and a stranger's is refused."""

import json
import os
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.config import load_config, read_config
from echo_jax.files import run_folder, seal
from echo_jax.training.records import claim_workdir

CONFIGS = Path(__file__).parents[1] / "configs"
LM = f"{CONFIGS}/lm.py:tiny"
HUGE = {"echo.order": "spread", "echo.factor": 2.0, "echo.buffer": 10**30}


def refused(capsys, *argv):
    """Looks at examples; returns the one line that the command says."""
    status = cli.main(["report", "examples", *map(str, argv)])
    (line,) = capsys.readouterr().err.splitlines()
    assert status in (1, 2) and "bug" not in line
    assert line.startswith("echo-jax report: ")
    return line


@pytest.fixture
def folder(tmp_path):
    """The folder of a run, as a start leaves it."""
    claim_workdir(run_folder(tmp_path / "run"), load_config(LM))
    chosen = seal({"chosen": {"echo_factor": 2.5, "threads": 8}})
    (tmp_path / "run" / "environment.json").write_text(json.dumps(chosen))
    return tmp_path / "run"


def test_the_config_of_a_run_comes_back_with_its_types(tmp_path):
    fields = {"optim.boundaries": (3, 5), "echo.factor": 2.0, "mesh.data": 2}
    config = load_config(LM, {**fields, "data.workers": 0})
    claim_workdir(run_folder(tmp_path), config)
    read = read_config(run_folder(tmp_path))
    assert read.to_dict() == config.to_dict()
    assert type(read.optim.boundaries) is tuple
    with pytest.raises(TypeError):
        read.updates = "many"


def test_lists_of_a_workload_come_back_as_tuples_which_jit_needs(tmp_path):
    config = load_config(f"{CONFIGS}/imagenet.py:tiny")
    claim_workdir(run_folder(tmp_path), config)
    read = read_config(run_folder(tmp_path))
    assert (read.model, read.data.augment) == (config.model, config.data.augment)
    assert type(read.model.stage_sizes) is type(read.data.augment) is tuple


def test_a_decision_log_and_workers_of_another_machine_are_left_out(folder):
    fields = {"data.workers": 2, "echo.replay": "runs/gone/tape.json"}
    claim_workdir(run_folder(folder), load_config(LM, fields))
    read = read_config(run_folder(folder))
    assert (read.echo.replay, read.data.workers) == ("", 0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "examples needs a config or a run: add --config FILE.py"),
        (["runs/a", "--config", LM], "examples needs a config or a run"),
        (["runs/a", "runs/b"], "takes one run folder; leave the others out"),
        (["runs/a", "--config.seed=1"], "'--config.seed=1': fields belong to --config"),
        (["--config", f"{CONFIGS}/quickstart.py:tiny", "--workdir=a"], "has several"),
        (["--config", LM, "--config.x=1"], "config.x"),
        (["runs/nowhere"], "holds no config.json, so it is no run folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(argv, message, capsys):
    assert message in refused(capsys, *argv)


@pytest.mark.parametrize("option", ["--config=a.py", "--updates=2"])
def test_its_options_belong_to_no_other_report(option, capsys):
    assert cli.main(["report", "runs/a", option]) == 2
    name = option.split("=")[0]
    assert f"{name} belongs to the word examples" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"workload": 3},
        {"workload": "../lm"},
        {"model": []},
        {"model": {}},
        {"model.d_model": "wide"},
        {"model.d_model": None},
        {"model.num_heads": 10**30},
        {"data.tokenizer": {"a": 1}},
        {"data.source": [1]},
        {"batch_size": -1},
        {"batch_size": "many"},
        {"updates": None},
        {"optim": 1},
        {"optim.name": "optax.__loader__"},
        {"mesh.data": 10**9},
        HUGE,
        {**HUGE, "echo.where": "device", "echo.after": "decode"},
        {"inner": {"steps": 2}},
        {"xla.options": '{"xla_dump_to": "/tmp/owned"}'},
        {"xla.options": "["},
    ],
    ids=str,
)
def test_a_config_that_no_run_has_is_refused_in_a_sentence(folder, fields, capsys):
    content = json.loads((folder / "config.json").read_text())
    del content["crc32"]
    for name, value in fields.items():
        *groups, last = name.split(".")
        node = content
        for group in groups:
            node = node[group]
        node[last] = value
    # A stranger's checksum is right.
    (folder / "config.json").write_text(json.dumps(seal(content)))
    refused(capsys, folder)
    assert not Path("/tmp/owned").exists()


def test_a_damaged_config_is_named(folder, capsys):
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    said = refused(capsys, folder)
    assert f"{path} is damaged: it does not have the checksum" in said


def test_no_link_is_followed(folder, tmp_path, capsys):
    path = folder / "config.json"
    path.rename(tmp_path / "secret")
    os.symlink(tmp_path / "secret", path)
    assert f"{path} is a link where a file" in refused(capsys, folder)
