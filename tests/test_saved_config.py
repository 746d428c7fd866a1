"""The config in a run folder: how it is read, and a stranger's is refused."""

import json
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.config import load_config, read_config
from echo_jax.files import run_folder
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
    claim_workdir(run_folder(tmp_path / "run"), load_config(LM))
    return tmp_path / "run"


def test_the_config_of_a_run_comes_back_with_its_types(tmp_path):
    # Workers and a log of decisions are of the other machine.
    left_out = {"data.workers": 2, "echo.replay": "runs/gone/decisions.json"}
    fields = {"optim.schedule": "piecewise", "optim.boundaries": (13, 15)}
    fields |= {"echo.factor": 2.0, "mesh.data": 2}
    config = load_config(f"{CONFIGS}/imagenet.py:tiny", {**fields, **left_out})
    claim_workdir(run_folder(tmp_path), config)
    read = read_config(run_folder(tmp_path))
    with config.unlocked():
        config.data.workers, config.echo.replay = 0, ""
    assert read.to_dict() == config.to_dict()
    # Those of a workload, too, as jit needs them.
    for value in (read.optim.boundaries, read.model.stage_sizes, read.data.augment):
        assert type(value) is tuple
    with pytest.raises(AttributeError):
        read.updates = 7


@pytest.mark.parametrize(
    "fields",
    [
        {"workload": 3},
        {"workload": "../lm"},
        {"model": []},
        {"model.d_model": "wide"},
        {"model.num_heads": 10**30},
        {"data.tokenizer": {"a": 1}},
        {"batch_size": -1},
        {"updates": None},
        {"optim": 1},
        {"optim.name": "optax.__loader__"},
        {"mesh.data": 10**9},
        HUGE,
        {**HUGE, "echo.buffer_on": "device", "echo.stage": "decode"},
        {"inner": {"steps": 2}},
        {"xla.options": '{"xla_dump_to": "/tmp/owned"}'},
        {"xla.options": "["},
    ],
    ids=str,
)
def test_a_config_that_no_run_has_is_refused_in_a_sentence(folder, fields, capsys):
    content = json.loads((folder / "config.json").read_text())
    for name, value in fields.items():
        *groups, last = name.split(".")
        node = content
        for group in groups:
            node = node[group]
        node[last] = value
    (folder / "config.json").write_text(json.dumps(content))
    refused(capsys, folder)
    assert not Path("/tmp/owned").exists()


def test_a_damaged_config_is_named(folder, capsys):
    path = folder / "config.json"
    path.write_text(path.read_text()[:-9])
    assert f"{path} is damaged: " in refused(capsys, folder)
