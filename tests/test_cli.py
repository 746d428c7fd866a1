"""The commands as they are typed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo_jax import arms, cli, runs
from echo_jax.config.flags import load_with_flags

LONG_S = 600  # What takes longer hangs, however busy the machine is.
ROOT = Path(__file__).parents[1]
QUICKSTART = f"{ROOT}/configs/quickstart.py"
LM = f"{ROOT}/configs/lm.py:tiny"
ARMS = ["baseline", "batch_echo", "shuffle", "spread"]


@pytest.fixture
def trained(monkeypatch):
    """Catches what ``echo-jax train`` would train."""
    calls = []

    def catch(*args, connect):
        assert connect
        calls.append(args)

    monkeypatch.setattr(runs, "run_train", catch)
    return calls


def _refused(argv: list[str], capsys) -> str:
    """Runs a command that is refused; returns the one line that says why."""
    try:
        status = cli.main(argv)
    except SystemExit as end:
        status = end.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize("command", [[], ["train"], ["study"], ["sweep"], ["report"]])
def test_help_shows_an_example(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main([*command, "--help"])
    assert f"  {' '.join(['echo-jax', *command])} " in capsys.readouterr().out


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "echo_jax", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("usage: echo-jax")


@pytest.mark.parametrize(
    ("command", "errors", "unbuffered"),
    [
        ("--help", subprocess.PIPE, ""),  # printed by argparse
        pytest.param(
            "report {root}/results/fed --workdir {out}",  # by rich
            subprocess.PIPE,
            "",
            marks=pytest.mark.slow,
        ),
        ("prepare verify {data}", subprocess.PIPE, ""),  # by print
        ("prepare verify {data}", subprocess.PIPE, "1"),
        ("prepare verify {data}", subprocess.STDOUT, ""),
    ],
)
def test_a_reader_that_has_gone_ends_a_command_quietly(
    command, errors, unbuffered, tmp_path
):
    data, out = tmp_path / "data", tmp_path / "out"
    prepare = ["prepare", "text", f"{ROOT}/README.md", "--tokenizer", "bytes"]
    assert cli.main([*prepare, "--out", str(data)]) == 0
    reader, writer = os.pipe()
    os.close(reader)
    words = command.format(root=ROOT, data=data, out=out).split()
    done = subprocess.run(
        [sys.executable, "-m", "echo_jax", *words],
        stdout=writer,
        stderr=errors,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (1, b"")


def test_another_broken_pipe_is_no_reader_that_has_gone(monkeypatch, tmp_path, capsys):
    def lose_a_worker(config, workdir, connect):
        raise BrokenPipeError

    monkeypatch.setattr(runs, "run_train", lose_a_worker)
    assert cli.main(["train", "--config", LM, "--workdir", str(tmp_path)]) == 1
    assert "unexpected BrokenPipeError; this may be" in capsys.readouterr().err


def test_every_field_is_a_flag(trained, tmp_path):
    argv = ["train", "--config", LM, "--workdir", f"{tmp_path}/x"]
    argv += ["--config.echo.factor=3.0", "--config.optim.lr", "0.5"]
    argv += ["--config.stop_at_target", "--config.target=1", "--config.mesh.data", "-1"]
    assert cli.main(argv) == 0
    ((config, workdir),) = trained
    assert str(workdir) == str(tmp_path / "x")
    assert (config.echo.factor, config.optim.lr, config.mesh.data) == (3.0, 0.5, -1)
    assert config.stop_at_target is True
    # The variant was used, and the rest is as it says.
    assert config.updates == 60


def test_a_config_is_checked_once(monkeypatch, tmp_path):
    checked, trained = [], []
    monkeypatch.setattr(runs, "check_config", checked.append)
    monkeypatch.setattr(runs, "train_checked", lambda *args: trained.append(args))
    argv = ["train", "--config", LM, "--workdir", str(tmp_path)]
    assert cli.main([*argv, "--config.distributed.detect=False"]) == 0
    ((config, _, workdir, _),) = trained
    assert checked == [config] and str(workdir) == str(tmp_path)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--config.echo.facter=3",
            "--config.echo.facter: config.echo has no field 'facter', did you mean "
            "'factor'?; it has after, buffer, buffer_bytes, cap, factor, lanes",
        ),
        ("--config.ecko.factor=3", "config has no field 'ecko', did you mean 'echo'?"),
        ("--config.seed.x=3", "config.seed has no field 'x'; it has no fields"),
        ("--config.echo=3", "--config.echo is a group; set one of its fields: after"),
        (
            "--config.seed=1.5",
            "--config.seed=1.5: it takes a whole number, such as 10 or 1e3; it is 0 ",
        ),
        ("--config.seed=2e-3", "--config.seed=2e-3: it takes a whole number"),
        ("--config.optim.lr=fast", "lr=fast: it takes a number, such as 0.1 or 1e-3"),
        ("--config.stop_at_target=2", "stop_at_target=2: it takes true or false"),
        ("--config.optim.boundaries=(5,", "(5,: it takes values in parentheses"),
        ("--noconfig.seed", "for a field that is true or false; set --config.seed="),
        ("--config.echo.factor=many", "it takes a number, or 'auto'"),
        ("--config.data.threads=2.5", "it takes an integer, or 'auto'"),
        ("--config.echo.factor", "--config.echo.factor: it needs a value; it is 1.0"),
        ("--workdri=x", "unknown option '--workdri', did you mean '--workdir'?"),
        ("stray", "'stray' belongs to no option; remove it"),
        ("--config.batch_size=0", "config.batch_size=0 must be at least 1; set --con"),
        ("--config.precision.compute=bf16", "compute='bf16' must be one of float32, "),
        ("--config.model.dtype=float32", "config.model has no field 'dtype'"),
        ("--config.workload=lmm", "lmm"),
        ("--config.data.source=none.txt", "none.txt"),
        (
            "--config.data.train_examples=15",
            "config.batch_size=32 is more than the 15 examples that are trained on, so "
            "that a batch would hold one several times; set --config.batch_size=8, or",
        ),
    ],
)
def test_what_is_mistyped_is_named_in_one_line(flag, message, tmp_path, capsys):
    workdir = tmp_path / "x"
    line = _refused(["train", "--config", LM, "--workdir", str(workdir), flag], capsys)
    assert line.startswith("echo-jax train: ")
    assert message in line
    # A corrected command must not find the folder taken.
    assert not workdir.exists()


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--config.updates=1e3", 1000),
        ("--config.updates=1_000", 1000),
        ("--config.data.threads=1e1", 10),
        ("--config.model.vocab=300", 300),
        ("--config.model.positions=sinusoidal", "sinusoidal"),
        ("--config.data.train_examples=64", 64),
    ],
)
def test_a_flag_sets_what_is_meant(flag, value):
    config = load_with_flags(LM, [flag])
    for name in flag.partition("=")[0].split(".")[1:]:
        config = config[name]
    assert config == value and type(config) is type(value)


def test_a_field_that_a_config_leaves_out_is_set_for_the_base_of_a_study():
    study = load_with_flags(f"{QUICKSTART}:tiny", ["--config.base.model.tied"])
    assert study.base.model.tied is True


@pytest.mark.parametrize("field", ["updates", "arms.spread.updates"])
def test_a_field_of_all_arms_is_named(field, capsys):
    argv = ["study", "--config", QUICKSTART, "--workdir", "x", f"--config.{field}=5"]
    assert "; of all arms it is --config.base.updates" in _refused(argv, capsys)


@pytest.mark.parametrize("where", ["host", "device"])
def test_an_echo_that_cannot_be_is_refused_in_one_line(where, tmp_path, capsys):
    argv = ["train", "--config", LM, "--workdir", str(tmp_path / "x")]
    argv += ["--config.echo.factor=3.0", "--config.echo.order=spread"]
    # On one device, whatever devices there are.
    argv += [f"--config.echo.where={where}", "--config.mesh.data=1"]
    assert "buffer=1 is too small for order='spread'" in _refused(argv, capsys)
    assert not (tmp_path / "x").exists()


def test_a_missing_config_is_named(tmp_path, capsys):
    argv = ["train", "--config", "nowhere.py", "--workdir", str(tmp_path)]
    assert "'nowhere.py' is not a file" in _refused(argv, capsys)


def test_an_unknown_variant_is_named(tmp_path, capsys):
    argv = ["train", "--config", f"{LM}y", "--workdir", str(tmp_path)]
    assert "variant 'tinyy' is unknown; use " in _refused(argv, capsys)


def test_a_missing_option_is_named(capsys):
    line = _refused(["train", "--config", LM], capsys)
    assert line == (
        "echo-jax train: the following arguments are required: --workdir; "
        "see echo-jax train --help"
    )


def test_a_file_as_workdir_is_refused(tmp_path, capsys):
    (tmp_path / "file").touch()
    argv = ["train", "--config", LM, "--workdir", f"{tmp_path}/file"]
    assert str(tmp_path / "file") in _refused(argv, capsys)


def test_a_config_of_the_other_command_is_sent_there(tmp_path, capsys):
    argv = ["--config", f"{QUICKSTART}:tiny", "--workdir", f"{tmp_path}/x"]
    assert "run it with 'echo-jax study'" in _refused(["train", *argv], capsys)
    argv[1] = LM
    assert "run it with 'echo-jax train'" in _refused(["study", *argv], capsys)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.storage_ratio=-1", "config.storage_ratio=-1.0 must be at least 0"),
        ("--config.arms.spread.echo.order=spraed", "arm spread: config.echo.order="),
        # The last arm: those before it would run for minutes.
        ("--config.arms.spread.echo.buffer=1", "arm spread: buffer=1 is too small"),
    ],
)
def test_a_study_is_checked_before_its_first_arm(flag, message, tmp_path, capsys):
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", f"{tmp_path}/x"]
    assert message in _refused([*argv, flag], capsys)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (runs.Interrupted(update=3, signum=signal.SIGINT), 130, "after update 3"),
        (runs.Interrupted(update=3, signum=signal.SIGTERM), 143, "after update 3"),
        (runs.Interrupted(update=3, signum=signal.SIGHUP), 129, "after update 3"),
        (runs.DataTimeoutError("for a batch", update=3), 75, "after update 3"),
        (KeyboardInterrupt(), 130, "interrupted; run the same command to resume"),
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
    first, second = capsys.readouterr().err.splitlines()
    assert message in first
    assert second == f"  echo-jax train --config {LM} --workdir '{tmp_path}/a b'"


def test_a_loss_that_is_not_finite_fails_the_command(monkeypatch, tmp_path, capsys):
    def diverge(*args, **options):
        raise runs.NonFiniteLossError("the loss of update", 7, None)

    monkeypatch.setattr(runs, "run_train", diverge)
    assert cli.main(["train", "--config", LM, "--workdir", str(tmp_path)]) == 1
    assert "of update 7 is not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (
            "communication:tiny",
            "--config.base.mesh.data=1",
            "arm every_4: config.local.schedule='every' changes nothing on 1 device; "
            "8 devices are here: set --config.mesh.data=-1",
        ),
        (
            "communication:echo",
            "--config.base.mesh.data=1",
            "arm every_4: config.local.schedule='every' changes nothing on 1 device",
        ),
        (
            "sweeps/s7_communication:tiny",
            "--config.base.mesh.data=1",
            "arm every: config.local.schedule='every' changes nothing on 1 device",
        ),
        (
            "quickstart:tiny",
            "--config.base.mesh.data=1 --config.base.batch.statistics=device",
            "config.batch.statistics='device' changes nothing on 1 device",
        ),
    ],
)
def test_a_study_of_several_devices_is_refused_on_one(
    config, flags, message, tmp_path, capsys
):
    argv = ["study", "--config", config, "--workdir", f"{tmp_path}/x", *flags.split()]
    assert message in _refused(argv, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_device_is_told_how_it_becomes_several(tmp_path):
    argv = ["study", "--config", "communication:tiny", "--workdir", f"{tmp_path}/x"]
    done = subprocess.run(
        [sys.executable, "-m", "echo_jax", *argv],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 before the command" in done.stderr


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """The folder of a study that ran, as the README has it, but tiny."""
    folder = tmp_path_factory.mktemp("study") / "quickstart"
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", str(folder)]
    assert cli.main(argv) == 0
    return folder


def _json(path: Path) -> dict:
    return json.loads(path.read_text())


@pytest.mark.slow
def test_a_study_leaves_its_arms_and_its_report(study):
    assert {path.name for path in study.iterdir()} == {
        *("study.json", "table.md", "figure.png", "figure.svg", "report.html"),
        *ARMS,
    }
    metadata = _json(study / "study.json")
    assert metadata["arms"] == ARMS
    summaries = {arm: _json(study / arm / "summary.json") for arm in ARMS}
    assert all(summary["reached"] for summary in summaries.values())
    assert [s["echo"]["order"] for s in summaries.values()] == [
        *("consecutive", "consecutive", "shuffle", "spread")
    ]
    assert summaries["baseline"]["repeats"] == 0
    assert all(summaries[arm]["repeats"] > 0 for arm in ARMS[1:])


@pytest.mark.slow
def test_all_arms_read_from_the_storage_that_was_calibrated(study):
    metadata = _json(study / "study.json")
    found = metadata["calibration"]
    wait_s = 4.0 * found["t_down_s"] - found["t_up_without_latency_s"]
    assert found["latency_s"] == pytest.approx(max(wait_s, 0) / 32, rel=1e-12)
    for arm in ARMS:
        assert (
            _json(study / arm / "config.json")["data"]["storage"] == metadata["storage"]
        )
        assert _json(study / arm / "summary.json")["simulated_storage"]
    assert metadata["storage"]["latency_s"] == found["latency_s"]
    assert "simulated storage" in (study / "table.md").read_text()


@pytest.mark.slow
def test_a_study_goes_on_where_it_stopped(study, capsys):
    kept = ["study.json", *(f"{arm}/summary.json" for arm in ARMS[:3])]
    before = {name: (study / name).read_bytes() for name in kept}
    spread = _json(study / "spread" / "summary.json")
    # As if it was killed while it wrote the last arm's summary.
    (study / "spread" / "summary.json").unlink()
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", str(study)]
    assert cli.main(argv) == 0
    assert {name: (study / name).read_bytes() for name in kept} == before
    again = _json(study / "spread" / "summary.json")
    for field in ("params_sha256", "updates", "fresh", "repeats"):
        assert again[field] == spread[field]
    out = capsys.readouterr().out
    assert "Measuring a training step" not in out
    assert "Arm 4 of 4: spread" in out


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_study_that_a_signal_stops_is_resumed_by_the_command_it_prints(
    signum, tmp_path
):
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", str(tmp_path / "x")]
    # An arm that runs until it is stopped.
    argv += ["--config.base.stop_at_target=false", "--config.base.updates=100000"]
    command = [sys.executable, "-m", "echo_jax", *argv]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "update 40 " in line:
                process.send_signal(signum)
                break
        _, err = process.communicate(timeout=LONG_S)
    assert process.returncode == 128 + signum
    assert err.splitlines()[-1] == f"  {shlex.join(['echo-jax', *argv])}"
    assert not (tmp_path / "x" / "baseline" / "summary.json").exists()
    if signum == signal.SIGINT:
        return  # Both leave the same behind, so one is resumed.

    stopped = re.search(r"stopped by \w+ after update (\d+)", err)
    assert stopped is not None
    argv[-1] = f"--config.base.updates={int(stopped[1]) + 10}"
    resumed = subprocess.run(
        [sys.executable, "-m", "echo_jax", *argv],
        capture_output=True,
        text=True,
        timeout=LONG_S,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes after update" in resumed.stdout
    assert "Measuring a training step" not in resumed.stdout
    assert (tmp_path / "x" / "report.html").exists()


@pytest.mark.slow
def test_a_study_of_another_ratio_is_refused(study, capsys):
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", str(study)]
    line = _refused([*argv, "--config.storage_ratio=2.0"], capsys)
    assert "holds a study of another storage_ratio" in line


@pytest.mark.slow
def test_a_study_of_another_base_names_the_field(study, capsys):
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", str(study)]
    before = (study / "study.json").read_bytes()
    line = _refused([*argv, "--config.base.optim.lr=0.5"], capsys)
    assert "optim.lr (0.003 -> 0.5)" in line
    assert (study / "study.json").read_bytes() == before


@pytest.mark.slow
def test_report_makes_the_files_again(study, capsys):
    names = ("table.md", "figure.png", "figure.svg", "report.html")
    before = {name: (study / name).read_bytes() for name in names}
    for name in names:
        (study / name).unlink()
    assert cli.main(["report", str(study)]) == 0
    assert {name: (study / name).read_bytes() for name in names} == before
    assert "spread" in capsys.readouterr().out


@pytest.mark.slow
def test_report_compares_run_folders(study, tmp_path, capsys):
    folders = [str(study / "baseline"), str(study / "spread")]
    assert cli.main(["report", *folders, "--workdir", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert ">spread</td>" in page
    assert "<td>shuffle</td>" not in page


def test_report_of_several_runs_needs_a_folder(tmp_path, capsys):
    line = _refused(["report", f"{tmp_path}/a", f"{tmp_path}/b"], capsys)
    assert line.endswith("add --workdir FOLDER")


def test_report_of_nothing_is_refused(tmp_path, capsys):
    line = _refused(["report", str(tmp_path)], capsys)
    assert "holds no config.json, so it is no run folder" in line


def test_report_refuses_an_unknown_option(tmp_path, capsys):
    line = _refused(["report", str(tmp_path), "--fast"], capsys)
    assert "unknown option '--fast'" in line


@pytest.mark.parametrize("command", ["train", "probe"])
def test_a_mistyped_variant_is_answered_in_the_words_of_its_config(
    command, tmp_path, capsys
):
    argv = [command, "--config", f"{ROOT}/configs/lm.py:tny"]
    workdir = ["--workdir", f"{tmp_path}/x"] if command == "train" else []
    line = _refused([*argv, *workdir], capsys)
    assert line.startswith(
        f"echo-jax {command}: variant 'tny' is unknown; use lm1b, c4"
    )
    assert "bug" not in line


def test_a_study_whose_first_arm_is_refused_leaves_nothing_behind(
    tmp_path, monkeypatch, capsys
):
    def refuse(config, workload, workdir, lock):
        raise ValueError("image 'a': it has 40x40 pixels")

    monkeypatch.setattr(arms, "train_checked", refuse)
    argv = ["study", "--config", f"{QUICKSTART}:tiny", "--workdir", f"{tmp_path}/x"]
    assert cli.main([*argv, "--config.storage_ratio=0"]) == 1
    assert "it has 40x40 pixels" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "there is nothing to try; add --over"),
        (
            ["--over", "optim.rl=log:1:2"],
            "no field 'optim.rl', did you mean 'optim.lr'",
        ),
        (["--over", "optim.lr"], "optim.lr: '' is no space to search; give SCALE:LOW"),
        (["--over", "optim.lr=log:0:1"], "'log:0:1' is no space to search"),
        (
            ["--over", "optim.lr=log:1:2", "--points", "0"],
            "config.search.points=0 must be at least 1",
        ),
        (["--over", "optim.lr=log:1:2", "--jobs=-1"], "jobs=-1"),
        (
            ["--over", "echo.cap=choice:1,2", "--config.echo.mode=adaptive"],
            "its config",
        ),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_in_a_sentence(
    tmp_path, capsys, argv, message
):
    folder = tmp_path / "sweep"
    config = ["--config", LM, "--workdir", str(folder)]
    assert message in _refused(["sweep", *config, *argv], capsys)
    assert not folder.exists()


def test_a_sweep_of_a_study_is_refused(tmp_path, capsys):
    study = f"{ROOT}/configs/quickstart.py"
    config = ["--config", study, "--workdir", str(tmp_path / "sweep")]
    said = _refused(["sweep", *config, "--over", "optim.lr=log:1:2"], capsys)
    assert "is a study already; run it with 'echo-jax study'" in said
