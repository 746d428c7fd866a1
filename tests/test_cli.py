"""The commands as they are typed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from echo_jax import cli, runs
from echo_jax.config import check_config, load_with_flags

LONG_S = 600  # What takes longer hangs, however busy the machine is.
ROOT = Path(__file__).parents[1]
QUICKSTART = f"{ROOT}/configs/quickstart.py"
LM = f"{ROOT}/configs/lm.py:tiny"
ARMS = ["baseline", "batch_echo", "shuffle", "spread"]


def _refused(argv: list[str], capsys) -> str:
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    ("command", "errors"),
    [
        ("--help", subprocess.PIPE),  # printed by argparse
        ("prepare verify {data}", subprocess.PIPE),
        ("prepare verify {data}", subprocess.STDOUT),
    ],
)
def test_a_reader_that_has_gone_ends_a_command_quietly(command, errors, tmp_path):
    data = tmp_path / "data"
    prepare = ["prepare", "text", f"{ROOT}/README.md", "--tokenizer", "bytes"]
    assert cli.main([*prepare, "--out", str(data)]) == 0
    reader, writer = os.pipe()
    os.close(reader)
    argv = [sys.executable, "-m", "echo_jax", *command.format(data=data).split()]
    # Unbuffered, argparse would not see that --help was not read.
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(argv, stdout=writer, stderr=errors, env=env)
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (1, b"")


TINY = """
import sys
from tiny_workload import as_synthetic, registered, tiny_config
from echo_jax import cli
from echo_jax.config.study import default_study
def get_config(variant):
    arms = {"baseline": {}, "batch": {"echo": {"factor": 2.0}}}
    config = tiny_config()
    return config if variant == "train" else default_study("Echoes", config, arms)
if __name__ == "__main__":
    with registered(as_synthetic):
        sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    ("command", "last"),
    [
        ("train", "summary.json"),
        pytest.param("study", "report.html", marks=pytest.mark.slow),
    ],
)
def test_a_training_whose_reader_has_gone_says_so_and_goes_on(command, last, tmp_path):
    tiny, run = tmp_path / "tiny.py", tmp_path / "run"
    tiny.write_text(TINY)
    argv = [sys.executable, tiny, command, f"--config={tiny}:{command}"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/tests/training"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    argv.append(f"--workdir={run}")
    with subprocess.Popen(argv, env=env, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read()
    said = "nobody reads its output any more; it goes on, and prints no more"
    assert (process.returncode, errors) == (0, f"echo-jax: {said}\n")
    assert (run / last).exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--noconfig.seed", "for a field that is true or false; set --config.seed="),
        ("--workdri=x", "unknown option '--workdri', did you mean '--workdir'?"),
        ("stray", "unknown option 'stray'"),
        ("--config=nowhere.py", "'nowhere.py' is not a file"),
        (f"--config={LM}y", "variant 'tinyy' is unknown; use lm1b, c4"),
        (f"--config={QUICKSTART}:tiny", "run it with 'echo-jax study'"),
        (f"--workdir={ROOT}/README.md", "README.md"),
    ],
)
def test_a_mistyped_option_is_named_in_one_line(given, message, tmp_path, capsys):
    line = _refused(["train", "--config", LM], capsys)
    assert line.startswith("echo-jax train: the following arguments are required: --w")
    argv = ["train", "--config", LM, "--workdir", f"{tmp_path}/x", given]
    line = _refused(argv, capsys)
    assert line.startswith("echo-jax train: ") and message in line
    assert not (tmp_path / "x").exists()


ONE_DEVICE = "--config.base.mesh.data=1"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--config.updates=5", "; of all variants it is --config.base.updates"),
        (
            "--config.arms.spread.updates=5",
            "; of all variants it is --config.base.updates",
        ),
        (f"--config={LM}", "run it with 'echo-jax train'"),
        (
            "--config.arms.spread.echo.order=spraed",
            "variant spread: config.echo.order=",
        ),
        # The last variant: the others before it would run for minutes.
        ("--config.arms.spread.echo.buffer=1", "variant spread: buffer=1 is too small"),
        (
            f"--config=communication:tiny {ONE_DEVICE}",
            "variant every_4: config.local.sync_schedule='every' changes nothing on 1 "
            "device; 8 devices are here: set --config.mesh.data=-1",
        ),
        (
            f"--config.base.batch.statistics=device {ONE_DEVICE}",
            "config.batch.statistics='device' changes nothing on 1 device",
        ),
    ],
)
def test_a_study_is_checked_before_its_first_arm(flags, message, tmp_path, capsys):
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", f"{tmp_path}/x"]
    assert message in _refused([*argv, *flags.split()], capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (runs.Interrupted(update=3, signum=signal.SIGTERM), 143, "after update 3"),
        (runs.DataTimeoutError("for a batch"), 75, "waited for a batch, which"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command to resume"),
        (runs.NonFiniteLossError("the loss of update", 7, None), 1, "update 7 is not"),
    ],
)
def test_an_interruption_prints_the_command_that_resumes(
    error, status, message, monkeypatch, tmp_path, capsys
):
    def stop(*args, **options):
        raise error

    monkeypatch.setattr(runs, "run_train", stop)
    argv = ["train", "--config", LM, "--workdir", f"{tmp_path}/a b"]
    assert cli.main(argv) == status
    first, *rest = capsys.readouterr().err.splitlines()
    assert message in first
    if status == 1:
        return
    (second,) = rest
    assert second == f"  echo-jax train --config {LM} --workdir '{tmp_path}/a b'"


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_a_study_is_stopped_resumed_and_reported(tmp_path, capsys):
    def read(path):
        return json.loads(path.read_text())

    study = tmp_path / "x"
    argv = ["study", "--config", f"{QUICKSTART}:storage", "--workdir", str(study)]
    argv += ["--config.base.target=4.0", "--config.base.data.eval_examples=64"]
    sizes = {"num_layers": 1, "seq_len": 32, "d_model": 32, "d_ff": 64}
    argv += [f"--config.base.model.{name}={size}" for name, size in sizes.items()]
    command = [sys.executable, "-m", "echo_jax", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "update 20 " in line:
                process.send_signal(signal.SIGUSR1)
                break
        _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signal.SIGUSR1
    assert re.search(r"stopped by \w+ after update (\d+)", err)
    assert err.splitlines()[-1] == f"  {shlex.join(['echo-jax', *argv])}"
    assert not (study / "baseline" / "summary.json").exists()

    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "resumes after update" in out and "Measuring a training step" not in out
    shown = ("table.md", "figure.png", "figure.svg", "report.html")
    assert {path.name for path in study.iterdir()} == {"study.json", *shown, *ARMS}
    metadata = read(study / "study.json")
    assert metadata["arms"] == ARMS
    found = metadata["calibration"]
    wait_s = 4.0 * found["t_down_s"] - found["t_up_without_latency_s"]
    assert found["latency_s"] == pytest.approx(max(wait_s, 0) / 32, rel=1e-12)
    assert metadata["storage"]["latency_s"] == found["latency_s"]
    orders = ("consecutive", "consecutive", "window_shuffle", "spread")
    for arm, order in zip(ARMS, orders, strict=True):
        summary = read(study / arm / "summary.json")
        assert summary["reached"] and summary["simulated_storage"]
        assert summary["echo"]["order"] == order
        assert (summary["repeats"] > 0) == (arm != "baseline")
        config = read(study / arm / "config.json")
        assert config["data"]["storage"] == metadata["storage"]
    assert "simulated storage" in (study / "table.md").read_text()

    before = {path: path.read_bytes() for path in study.rglob("*") if path.is_file()}
    spread = study / "spread" / "summary.json"
    # As if it was killed while it wrote the last arm's summary.
    spread.unlink()
    assert cli.main(argv) == 0
    again, last = read(spread), json.loads(before[spread])
    for field in ("params_sha256", "updates", "fresh", "repeats"):
        assert again[field] == last[field]
    assert "variant 4 of 4: spread" in capsys.readouterr().out

    kept = {name: (study / name).read_bytes() for name in ("study.json", *shown)}
    assert kept["study.json"] == before[study / "study.json"]
    for name in shown:
        (study / name).unlink()
    assert cli.main(["report", str(study)]) == 0
    assert {name: (study / name).read_bytes() for name in kept} == kept
    arms = [str(study / "baseline"), str(study / "spread")]
    assert cli.main(["report", *arms, "--workdir", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">spread</td>" in page and "<td>shuffle</td>" not in page

    capsys.readouterr()
    line = _refused([*argv, "--config.storage_ratio=2.0"], capsys)
    assert "holds a study of another storage_ratio" in line
    line = _refused([*argv, "--config.base.optim.lr=0.5"], capsys)
    assert "optim.lr (0.003 -> 0.5)" in line
    assert (study / "study.json").read_bytes() == kept["study.json"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a b", "add --workdir FOLDER"),
        (str(ROOT), "holds no config.json, so it is not a run folder"),
        ("a --fast", "unknown option '--fast'; see echo-jax report study --help"),
        ("a --updates 3", "unknown option '--updates'"),
        ("", "echo-jax report study: the following arguments are required: FOLDER"),
        ("study", "are required: FOLDER; see echo-jax report study --help"),
        ("--workdir w ./scaling", "echo-jax report: scaling is not a folder"),
        ("scaling a b", "required: --workdir; see echo-jax report scaling --help"),
        ("--debug scaling --workdir w", "are required: FOLDER"),
        ("scaling a --config lm:tiny --workdir w", "unknown option '--config'"),
        ("examples a --config lm:tiny", "--config: not allowed with argument RUN"),
        ("examples a --config.seed=1", "unknown option '--config.seed=1'"),
        ("examples a b", "unknown option 'b'; see echo-jax report examples --help"),
    ],
)
def test_a_report_that_cannot_be_made_is_refused(given, message, capsys):
    assert message in _refused(["report", *given.split()], capsys)


def test_the_word_study_may_be_left_out():
    options = ["--workdir", "w", "a", "b"]
    parse = cli.make_parser().parse_args
    assert parse(["report", *options]) == parse(["report", "study", *options])


@pytest.mark.parametrize("word", ["a", "study a", "scaling a --workdir w"])
def test_debug_may_be_typed_before_a_word_and_after_it(word):
    parse = cli.make_parser().parse_args
    assert not parse(["report", *word.split()]).debug
    assert parse(["report", "--debug", *word.split()]).debug
    assert parse(["report", *word.split(), "--debug"]).debug


def test_the_versions_come_without_jax():
    code = (
        "import sys; from echo_jax.cli import main; sys.modules['jax'] = None; main()"
    )
    argv = [sys.executable, "-c", code, "--version"]
    done = subprocess.run(argv, capture_output=True, text=True)
    said = ", ".join(f"{name} {metadata.version(name)}" for name in ("echo-jax", "jax"))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{said}\n", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "there is nothing to try; add --over"),
        (f"--over optim.lr=log:1:2 --config={QUICKSTART}", "is a study already; run"),
        ("--over optim.rl=log:1:2", "no field 'optim.rl', did you mean 'optim.lr'"),
        ("--over optim.lr", "optim.lr: '' is not a space to search; give SCALE:LOW"),
        ("--over optim.lr=log:0:1", "'log:0:1' is not a space to search"),
        ("--over optim.lr=log:1:2 --points 0", "config.search.points=0 must be at le"),
        ("--over optim.lr=log:1:2 --jobs=-1", "jobs=-1"),
        (
            "--over echo.max_uses=choice:1,2 --config.echo.mode=adaptive",
            "a trial must not depend on measured times",
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_in_a_sentence(
    tmp_path, capsys, given, message
):
    folder = tmp_path / "sweep"
    config = ["--config", LM, "--workdir", str(folder)]
    assert message in _refused(["sweep", *config, *given.split()], capsys)
    assert not folder.exists()


@pytest.mark.slow
def test_a_probe_of_a_study_measures_its_base_and_names_its_fields(tmp_path, capsys):
    file = tmp_path / "probe.json"
    study = f"{QUICKSTART}:storage"
    argv = ["probe", "--config", study, "--seconds", "1", "--json", str(file)]
    assert cli.main([*argv, "--config.base.mesh.data", "1"]) == 0
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert [stage["name"] for stage in found["stages"]] == ["read", "decode", "batch"]
    # A read sleeps, as in the study: a batch waits for longer than it takes to handle.
    read = found["stages"][0]
    assert read["wall_s"] > 2 * read["cpu_s"]
    assert found["advised_factor"] > 1
    assert f"--config.base.echo.factor={found['advised_factor']} " in found["how"]
    assert "--config.base.echo.stage=decode" in found["how"]
    # Of a hundred batches.
    assert found["how"].endswith("--config.base.echo.buffer=3200")
    assert found["how"] in printed and "95 % interval" in printed
    # It can be run.
    config = load_with_flags(study, found["how"].split())
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
        (["--json=nowhere/x.json"], "--json=nowhere/x.json: there is no folder"),
    ],
)
def test_what_cannot_be_probed_is_refused_in_one_line(options, message, capsys):
    assert message in _refused(["probe", "--config", QUICKSTART, *options], capsys)
