"""``echo-jax probe`` as it is typed, and what it finds out about a config."""

import contextlib
import io
import json
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest

import echo_jax as ej
from echo_jax import cli, runs
from echo_jax.config.check import check_config
from echo_jax.config.flags import load_with_flags
from echo_jax.data.pipeline.dataset import PipelineSpec
from echo_jax.data.pipeline.stage_calls import stage_calls
from echo_jax.data.pipeline.stages import Stages
from echo_jax.data.pipeline.storage import StorageSpec
from echo_jax.training import probe

ROOT = Path(__file__).parents[1]
QUICKSTART = f"{ROOT}/configs/quickstart.py:tiny"


@pytest.fixture(scope="module")
def probed(tmp_path_factory) -> tuple[dict, str]:
    """What a probe of a study writes as JSON, and what it prints."""
    file = tmp_path_factory.mktemp("probe") / "probe.json"
    argv = ["probe", "--config", QUICKSTART, "--seconds", "1", "--json", str(file)]
    # Steps on many virtual devices take long.
    argv += ["--config.base.mesh.data", "1"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert cli.main(argv) == 0
    return json.loads(file.read_text()), printed.getvalue()


@pytest.mark.slow
def test_a_probe_of_a_study_measures_its_base(probed):
    found, _ = probed
    assert found["batch_size"] == 32
    assert found["ratio"] == found["t_up_s"] / found["t_down_s"]
    assert [stage["name"] for stage in found["stages"]] == ["read", "decode", "batch"]
    assert [row["factor"] for row in found["predicted"]] == list(range(1, 9))
    assert found["runs"][0]["factor"] == 1
    assert found["runs"][0]["seconds_per_update"] == found["observed_s"]


@pytest.mark.slow
def test_the_storage_is_simulated_as_the_study_does(probed):
    read = probed[0]["stages"][0]
    # A read sleeps; R is 4, so a batch waits for longer than it takes to handle.
    assert read["wall_s"] > 2 * read["cpu_s"]


@pytest.mark.slow
def test_advice_names_fields_of_the_config(probed):
    found, printed = probed
    assert found["advised_factor"] > 1
    assert "--config.base.data.threads" in " ".join(found["advice"])
    assert f"--config.base.echo.factor={found['advised_factor']} " in found["how"]
    assert "--config.base.echo.after=decode" in found["how"]
    # Of a hundred batches.
    assert found["how"].endswith("--config.base.echo.buffer=3200")
    assert found["how"] in printed
    assert "95 % interval" in printed


@pytest.mark.slow
def test_what_a_probe_advises_can_be_run(probed):
    config = load_with_flags(QUICKSTART, probed[0]["how"].split())
    check_config(config.base)
    assert config.base.echo.order == "spread"


@pytest.mark.parametrize(
    ("path", "flag"),
    [("lm.py:tiny", "--config."), ("quickstart.py:tiny", "--config.base.")],
)
def test_advice_is_flags_of_the_config_that_was_given(path, flag, monkeypatch):
    options = []
    monkeypatch.setattr(probe, "compile_functions", mock.MagicMock())
    monkeypatch.setattr(
        probe, "probe", lambda *args, **kw: options.append(kw["options"])
    )
    config = load_with_flags(f"{ROOT}/configs/{path}", [])
    if "arms" in config:
        config.storage_ratio = 0.0
    runs.run_probe(config)
    (found,) = options
    after = found.echo.format(factor=2.0, after="decode", buffer=64)
    names = [found.threads, found.workers, found.prefetch, *after.split()]
    assert all(name.startswith(flag) for name in names)
    assert f"({flag}echo.where=device)" in found.device
    load_with_flags(f"{ROOT}/configs/{path}", after.split())


class _Report:
    def to_json(self):
        return '{"ratio": 4.0}'

    def __str__(self):
        return "a table"


@pytest.fixture
def asked(monkeypatch):
    """Catches what ``echo-jax probe`` would measure."""
    calls = []

    def run_probe(config, *, seconds, on_progress):
        calls.append((config, seconds))
        on_progress("loader alone", 0.25)
        return _Report()

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


def test_without_a_file_the_table_is_printed(asked, capsys):
    assert cli.main(["probe", "--config", QUICKSTART]) == 0
    assert asked[0][1] == 20.0
    assert capsys.readouterr().out == "a table\n"


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["probe", "--help"])
    assert (
        "  echo-jax probe --config configs/quickstart.py\n" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds=0"], "seconds=0.0 must be above 0; 20 is a good choice"),
        (["--config.base.batch_size=0"], "batch_size=0 must be at least 1"),
        (["--config.storage_ratio=-1"], "storage_ratio=-1.0 must be at least 0"),
        (
            [
                "--config.base.distributed.num_processes=2",
                "--config.base.distributed.coordinator=localhost:1",
            ],
            "num_processes=2: a study and a probe run in one process",
        ),
        (["--workdir=x"], "unknown option '--workdir'"),
        (["--json=nowhere/x.json"], "--json=nowhere/x.json: there is no folder"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(options, message, capsys):
    assert cli.main(["probe", "--config", QUICKSTART, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_library_has_the_instrument():
    assert callable(ej.probe)
    assert isinstance(ej.rates, ModuleType)


def test_stage_calls_do_what_a_batch_needs():
    read = []

    class Source(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    stages = Stages(
        Source([b"a", b"b", b"c"]),
        decode=lambda record: {"x": np.array(record[0])},
        augment=lambda item, seed: {"x": item["x"] + seed},
    )
    pipeline = PipelineSpec("decode", batch_size=8, storage=StorageSpec())
    calls = stage_calls(stages, pipeline)
    assert list(calls) == ["read", "decode", "augment", "batch"]
    assert len(read) == 8 and set(read) <= {0, 1, 2}
    records = calls["read"]()
    assert len(records) == 8 and len(read) == 16
    decoded = [item["x"] for item in calls["decode"]()]
    assert decoded == [b"abc"[index] for index in read[:8]]
    augmented = [item["x"] for item in calls["augment"]()]
    assert augmented == [x + seed for seed, x in enumerate(decoded)]
    assert calls["batch"]()["x"].tolist() == decoded
