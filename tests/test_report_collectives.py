"""``echo-jax report collectives``: of a config, of a run, and of a stranger's."""

import importlib.util
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
    return cli.main(["report", "collectives", *map(str, argv)])


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


def test_of_a_config_it_says_what_an_update_sends(capsys):
    assert report("--config", LM, "--config.mesh.data=2") == 0
    first, reduces, *_ = capsys.readouterr().out.splitlines()
    assert first == "An update on 2 cpu devices, for each of them:"
    assert reduces.startswith("all-reduce") and "f32: " in reduces


@pytest.mark.slow
def test_of_a_run_it_says_what_it_says_of_its_config(run, capsys):
    fields = {"mesh.data": 4, "xla.options": '{"xla_cpu_enable_fast_min_max": true}'}
    _, folder = run(**fields)
    assert report(folder) == 0
    of_run = capsys.readouterr().out
    assert (
        report("--config", LM, *(f"--config.{k}={v}" for k, v in fields.items())) == 0
    )
    assert capsys.readouterr().out == of_run
    assert sorted(path.name for path in folder.iterdir()) == ["config.json"]


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


def test_what_sending_costs_is_said_where_the_bandwidth_is(capsys):
    options = ["--bandwidth", 0.1, "--devices", 8, "--compute-ms", 10]
    assert report("--config", LM, "--config.mesh.data=2", *options) == 0
    *_, heading, server, ring, halves, ratio, throughput = (
        capsys.readouterr().out.splitlines()
    )
    # 103,040 numbers, so 412,160 bytes: 2 * 7/8 of them at 0.1 GB/s are 7.21 ms, and
    # 16 times as many through a server 65.9 ms.
    assert "0.412 MB of gradients, 8 devices, 0.1 GB/s" in heading
    assert " 65.9 ms" in server and " 7.21 ms" in ring and " 7.21 ms" in halves
    assert "ratio 0.721, efficiency 0.581" in ratio
    # A batch of 32 on 2 devices: 16 examples in 10 ms.
    assert "= 1,600 x 8 x 0.581 = 7,436 examples/s" in throughput


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "collectives needs a config or a run: add --config FILE.py"),
        (["runs/a", "--config", LM], "collectives needs a config or a run"),
        (["runs/a", "runs/b"], "takes one run folder; leave the others out"),
        (["runs/a", "--config.seed=1"], "'--config.seed=1': fields belong to --config"),
        (["--config", f"{QUICKSTART}:tiny"], "a study has several updates"),
        (["--config", LM, "--config.x=1"], "config.x"),
        (["--config", LM, "--devices=2"], "--devices is for the cost of sending"),
        (["--config", LM, "--bandwidth=0"], "--bandwidth=0 must be above 0"),
        (
            ["--config", LM, "--bandwidth=1", "--devices=1"],
            "--devices=1 must be above 1: one device sends nothing",
        ),
        (["--config", LM, "--bandwidth=nan"], "--bandwidth=nan must be above 0"),
        (["--config", LM, "--target=v9"], "--target=v9 is no target; use v4, v5e"),
        (["runs/nowhere"], "holds no config.json, so it is no run folder"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_a_sentence(argv, message, capsys):
    assert report(*argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "bug" not in line


@pytest.mark.parametrize(
    "option", ["--config=a.py", "--target=v5e:2x2", "--bandwidth=1", "--compute-ms=2"]
)
def test_its_options_belong_to_no_other_report(option, capsys):
    assert cli.main(["report", "runs/a", option]) == 2
    assert f"{option.split('=')[0]} belongs to the word" in capsys.readouterr().err


def test_a_target_without_its_compiler_fails_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert report("--config", LM, "--target", "v5e:2x2") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs libtpu, which is not installed" in line and "'echo-jax[aot]'" in line


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
