"""The config in a run folder: how it is read, and a stranger's is refused."""

import json
import os
from pathlib import Path

import pytest

from echo_jax import cli
from echo_jax.config import load_config
from echo_jax.config.saved import read_config
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import seal
from echo_jax.training.records.environment import claim_workdir

CONFIGS = Path(__file__).parents[1] / "configs"
LM = f"{CONFIGS}/lm.py:tiny"
QUICKSTART = f"{CONFIGS}/quickstart.py"
HUGE = {
    "echo__where": "device",
    "echo__after": "decode",
    "echo__order": "spread",
    "echo__factor": 2.0,
    "echo__buffer": 10**30,
}


def report(*argv):
    return cli.main(["report", "examples", *map(str, argv)])


@pytest.fixture
def run(tmp_path):
    """Makes the folder of a run, as a start leaves it."""

    def make(chosen=None, **fields):
        overrides = {name.replace("__", "."): value for name, value in fields.items()}
        config = load_config(LM, overrides)
        folder = run_folder(tmp_path / "run")
        claim_workdir(folder, config)
        if chosen is not None:
            content = seal({"chosen": chosen})
            (tmp_path / "run" / "environment.json").write_text(json.dumps(content))
        return config, tmp_path / "run"

    return make


def test_the_config_of_a_run_comes_back_with_its_types(run):
    config, folder = run(
        optim__boundaries=(3, 5), echo__factor=2.0, data__workers=0, mesh__data=2
    )
    read = read_config(run_folder(folder))
    assert read.to_dict() == config.to_dict()
    assert type(read.optim.boundaries) is tuple
    with pytest.raises(TypeError):
        read.updates = "many"


def test_lists_of_a_workload_come_back_as_tuples_which_jit_needs(tmp_path):
    config = load_config(f"{CONFIGS}/imagenet.py:tiny")
    claim_workdir(run_folder(tmp_path / "run"), config)
    read = read_config(run_folder(tmp_path / "run"))
    assert (read.model, read.data.augment) == (config.model, config.data.augment)
    assert type(read.model.stage_sizes) is type(read.data.augment) is tuple


def test_what_a_run_chose_takes_the_place_of_what_was_left_open(run):
    fields = {"echo__factor": "auto", "data__threads": "auto", "data__workers": 2}
    chosen = {"echo_factor": 2.5, "threads": 8}
    _, folder = run(chosen, **fields, echo__replay="runs/gone/tape.json")
    read = read_config(run_folder(folder))
    assert (read.echo.factor, read.data.threads) == (2.5, 8)
    assert (read.echo.replay, read.data.workers) == ("", 0)
    # Without its note, as where a run was killed before it chose.
    (folder / "environment.json").unlink()
    assert read_config(run_folder(folder)).echo.factor == "auto"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "examples needs a config or a run: add --config FILE.py"),
        (["runs/a", "--config", LM], "examples needs a config or a run"),
        (["runs/a", "runs/b"], "takes one run folder; leave the others out"),
        (["runs/a", "--config.seed=1"], "'--config.seed=1': fields belong to --config"),
        (["--config", f"{QUICKSTART}:tiny", "--workdir=a"], "has several trainings"),
        (["--config", LM, "--config.x=1"], "config.x"),
        (["runs/nowhere"], "holds no config.json, so it is no run folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(argv, message, capsys):
    assert report(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "bug" not in line


@pytest.mark.parametrize("option", ["--config=a.py", "--updates=2"])
def test_its_options_belong_to_no_other_report(option, capsys):
    assert cli.main(["report", "runs/a", option]) == 2
    name = option.split("=")[0]
    assert f"{name} belongs to the word examples" in capsys.readouterr().err


def changed(folder, **fields):
    """Writes a config of a stranger's, with a checksum that is right."""
    content = json.loads((folder / "config.json").read_text())
    del content["crc32"]
    for name, value in fields.items():
        *groups, last = name.split("__")
        node = content
        for group in groups:
            node = node[group]
        node[last] = value
    (folder / "config.json").write_text(json.dumps(seal(content)))


@pytest.mark.parametrize(
    "fields",
    [
        {"workload": 3},
        {"workload": "../lm"},
        {"model": []},
        {"model": {}},
        {"model__d_model": "wide"},
        {"model__d_model": None},
        {"model__num_heads": 10**30},
        {"data__tokenizer": {"a": 1}},
        {"data__source": [1]},
        {"batch_size": -1},
        {"batch_size": "many"},
        {"updates": None},
        {"optim": 1},
        {"optim__name": "optax.__loader__"},
        {"mesh__data": 10**9},
        {"echo__order": "spread", "echo__factor": 2.0, "echo__buffer": 10**30},
        HUGE,
        {"inner": {"steps": 2}},
        {"xla__options": '{"xla_dump_to": "/tmp/owned"}'},
        {"xla__options": "["},
    ],
    ids=str,
)
def test_a_config_that_no_run_has_is_refused_in_a_sentence(run, fields, capsys):
    _, folder = run()
    changed(folder, **fields)
    assert report(folder) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("echo-jax report: ") and "bug" not in line
    assert not Path("/tmp/owned").exists()


def test_a_damaged_config_is_named(run, capsys):
    _, folder = run()
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))
    assert report(folder) == 2
    said = capsys.readouterr().err
    assert f"{path} is damaged: it does not have the checksum" in said


@pytest.mark.parametrize("name", ["config.json", "environment.json"])
def test_no_link_is_followed(run, name, tmp_path, capsys):
    _, folder = run({"echo_factor": 1.0, "threads": 1})
    (tmp_path / "secret").write_text((folder / name).read_text())
    (folder / name).unlink()
    os.symlink(tmp_path / "secret", folder / name)
    assert report(folder) == 2
    assert f"{folder / name} is a link where a file" in capsys.readouterr().err
