"""``echo-jax probe`` as it is typed, and what it finds out about a config."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_jax import cli, runs
from echo_jax.config import check_config, load_with_flags

ROOT = Path(__file__).parents[1]
QUICKSTART = f"{ROOT}/configs/quickstart.py:tiny"


@pytest.mark.slow
def test_a_probe_of_a_study_measures_its_base_and_names_its_fields(tmp_path, capsys):
    file = tmp_path / "probe.json"
    argv = ["probe", "--config", QUICKSTART, "--seconds", "1", "--json", str(file)]
    assert cli.main([*argv, "--config.base.mesh.data", "1"]) == 0
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert [stage["name"] for stage in found["stages"]] == ["read", "decode", "batch"]
    # A read sleeps, as in the study: a batch waits for longer than it takes to handle.
    read = found["stages"][0]
    assert read["wall_s"] > 2 * read["cpu_s"]
    assert found["advised_factor"] > 1
    assert f"--config.base.echo.factor={found['advised_factor']} " in found["how"]
    assert "--config.base.echo.after=decode" in found["how"]
    # Of a hundred batches.
    assert found["how"].endswith("--config.base.echo.buffer=3200")
    assert found["how"] in printed and "95 % interval" in printed
    # It can be run.
    config = load_with_flags(QUICKSTART, found["how"].split())
    check_config(config.base)
    assert config.base.echo.order == "spread"


@pytest.fixture
def asked(monkeypatch):
    """Catches what ``echo-jax probe`` would measure."""
    calls = []

    def run_probe(config, *, seconds, on_progress):
        calls.append((config, seconds))
        on_progress("loader alone", 0.25)
        return SimpleNamespace(to_json=lambda: '{"ratio": 4.0}')

    monkeypatch.setattr(runs, "run_probe", run_probe)
    return calls


def test_a_dash_prints_json_and_nothing_else(asked, capsys):
    argv = ["probe", "--config", QUICKSTART, "--json", "-"]
    assert cli.main([*argv, "--config.base.batch_size=8", "--seconds=3"]) == 0
    ((config, seconds),) = asked
    assert (config.base.batch_size, seconds) == (8, 3.0)
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"ratio": 4.0}
    assert captured.err == " 25%  loader alone\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds=0"], "seconds=0.0 must be above 0; 20 is a good choice"),
        (
            [
                "--config.base.distributed.num_processes=2",
                "--config.base.distributed.coordinator=localhost:1",
            ],
            "num_processes=2: a study and a probe run in one process",
        ),
        (["--json=nowhere/x.json"], "--json=nowhere/x.json: there is no folder"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(options, message, capsys):
    assert cli.main(["probe", "--config", QUICKSTART, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
