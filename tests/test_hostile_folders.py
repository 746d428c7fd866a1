"""Run folders of strangers, as the commands meet them: see `tests.test_folders`."""

import json
import os
import shutil
from pathlib import Path

import google_crc32c
import pytest
import tensorstore

from echo_jax import cli

LM = str(Path(__file__).parents[1] / "configs" / "lm.py") + ":tiny"
SECRET = "aws_secret_access_key = 12345"
SHELL = "x; touch ${HOME}/owned; echo"

# Nothing is said here of the programs.
pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def train(workdir, updates):
    argv = ["train", "--config", LM, "--workdir", str(workdir)]
    flags = {"updates": updates, "eval_every": 2, "checkpoint_every": 2}
    flags |= {"optim.warmup_updates": 0, "optim.schedule": "constant"}
    # So that all of it is compiled in a second or two, and nothing on the side.
    flags |= {"mesh.data": 1, "dispatch.mode": "loop", "model.num_layers": 1}
    return cli.main([*argv, *(f"--config.{k}={v}" for k, v in flags.items())])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger") / "run"
    assert train(folder, 2) == 0
    return folder


@pytest.fixture
def stranger(trained, tmp_path):
    """A run folder, to plant something in."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def _seen(home):
    """All that tells a change; when something was last read does not."""
    found = {path: path.stat() for path in home.rglob("*")}
    return {
        path: (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        for path, stat in found.items()
    }


@pytest.fixture
def home(tmp_path):
    """Files of the user's, in which nothing may change."""
    home = tmp_path / "home"
    (home / "kept" / "9").mkdir(parents=True)
    (home / "kept" / "9" / "file").write_text("mine")
    (home / ".bashrc").write_text("mine")
    (home / "credentials").write_text(json.dumps({"updates": SECRET, "a": SECRET}))
    before = _seen(home)
    yield home
    assert _seen(home) == before


def planted(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    os.symlink(target, path)


REPORT = ["table.md", "figure.png", "figure.svg", "report.html"]
FILES = ["config.json", "summary.json", "metrics.jsonl", "environment.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_report_reads_no_links(stranger, home, capsys, name):
    planted(stranger / name, home / "credentials")
    assert cli.main(["report", str(stranger)]) == 2
    assert f"{stranger / name} is a link where a file" in capsys.readouterr().err
    assert not (stranger / "report.html").exists()


@pytest.mark.parametrize(
    "name", ["table.md", "figure.png", "figure.svg", "report.html"]
)
def test_a_report_writes_through_no_links(stranger, home, capsys, name):
    planted(stranger / name, home / ".bashrc")
    assert cli.main(["report", str(stranger)]) == 2
    assert f"{stranger / name} is a link" in capsys.readouterr().err


def test_a_report_uses_no_names_that_a_stranger_can_know(stranger, home, capsys):
    """What wrote shell text of a study into a file that a shell runs."""
    study = stranger.parent / "study"
    study.mkdir()
    for arm in ("baseline", "other"):
        shutil.copytree(stranger, study / arm)
    about = {"name": SHELL, "arms": ["baseline", "other"], "storage": {}}
    (study / "study.json").write_text(json.dumps({**about, "calibration": {}}))
    for name in REPORT:
        planted(study / f".{name}.new", home / ".bashrc")
    assert cli.main(["report", str(study)]) == 0
    assert SHELL in (study / "table.md").read_text()


@pytest.mark.parametrize("name", [*FILES, "checkpoints"])
def test_a_run_goes_on_through_no_links(stranger, home, capsys, name):
    target = "kept" if name == "checkpoints" else "credentials"
    planted(stranger / name, home / target)
    assert train(stranger, 4) == 2
    assert f"{stranger / name} is a link where a" in capsys.readouterr().err


def test_a_run_goes_on_beside_links_of_known_names(stranger, home):
    for name in FILES:
        planted(stranger / f".{name}.new", home / ".bashrc")
    assert train(stranger, 4) == 0


@pytest.mark.parametrize("path", ["2", "2/state/d", "2/host/metadata"])
def test_checkpoints_have_no_links_in_them(stranger, home, capsys, path):
    planted(stranger / "checkpoints" / path, home / "kept" / "9")
    assert train(stranger, 4) == 2
    assert f"checkpoints/{path} is a link" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_nobody_waits_for_a_named_pipe(stranger, capsys, name):
    (stranger / name).unlink()
    os.mkfifo(stranger / name)
    assert cli.main(["report", str(stranger)]) == 2
    assert f"{stranger / name} is a named pipe" in capsys.readouterr().err
    assert train(stranger, 4) == 2
    assert f"{stranger / name} is a named pipe" in capsys.readouterr().err


def test_a_reference_inside_of_a_checkpoint_leads_nowhere_else(tmp_path):
    """Orbax's arrays lie in OCDBT databases, whose nodes name the files of values."""
    base = tmp_path / "database"
    ocdbt = {
        "driver": "ocdbt",
        "base": f"file://{base}/",
        "config": {"compression": None, "max_inline_value_bytes": 0},
        "value_data_prefix": "in/",
    }
    content = b"content " * 20
    tensorstore.KvStore.open(ocdbt).result()["array"] = content
    (value,) = (base / "in").iterdir()
    shutil.copy(value, tmp_path)  # What lies outside is as long, and could be read.
    nodes = [path for path in (base / "d").iterdir() if b"in/" in path.read_bytes()]
    for node in nodes:
        changed = node.read_bytes()[:-4].replace(b"in/", b"../")
        crc = google_crc32c.value(changed).to_bytes(4, "little")
        node.write_bytes(changed + crc)
    value.unlink()
    assert nodes
    with pytest.raises(ValueError, match=r'Invalid key: ".*/database/\.\./'):
        tensorstore.KvStore.open(ocdbt).result().read("array").result()
