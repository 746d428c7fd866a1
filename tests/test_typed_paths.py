"""Paths as they are typed: ``~`` is the home folder, wherever a path may stand."""

import os

import pytest

from echo_jax import cli
from echo_jax.data.prepare import Settings, TextSettings, prepare_text
from echo_jax.data.sources import open_source
from echo_jax.data.text import open_sequences
from echo_jax.files import FolderError, run_folder


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with data in it; the command runs in an empty one."""
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir(), here.mkdir()
    (home / "a.txt").write_text("to be or not to be " * 40)
    sources = [f"train={home}/a.txt", f"validation={home}/a.txt"]
    settings = Settings(out=home / "prepared")
    prepare_text(sources, settings, TextSettings(tokenizer="bytes", block=16))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    yield home
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("command", "made"),
    [
        ("configs copy quickstart ~/new", "quickstart.py"),
        ("prepare text ~/a.txt --tokenizer=bytes --out=~/new", "dataset.json"),
    ],
)
def test_a_command_reads_and_writes_in_the_home_folder(command, made, home, capsys):
    assert cli.main(command.split()) == 0, capsys.readouterr().err
    assert (home / "new" / made).is_file()


@pytest.mark.parametrize(
    "command",
    [
        "configs show ~/none.py",
        "prepare images ~/prepared --classes=~/none.csv --out=~/new",
        "prepare text ~/a.txt --tokenizer-model=~/none --out=~/new",
        "train --config=~/none.py:tiny --workdir=~/new",
        "train --config=lm:tiny --workdir=~/new --config.data.source=~/none.txt",
        "train --config=lm:tiny --workdir=~/new --config.echo.mode=adaptive "
        "--config.echo.replay=~/none.json --config.echo.buffer=64",
    ],
)
def test_a_command_says_which_file_of_the_home_folder_is_not_there(
    command, home, capsys
):
    assert cli.main(command.split()) == 2
    assert f"{home}/none" in capsys.readouterr().err


def test_data_is_found_in_the_home_folder(home):
    assert open_sequences("~/prepared", seq_len=16).vocab == 257
    assert open_sequences("~/a.txt,~/*.txt", seq_len=16).vocab == 256
    for scheme in ("wds", "arrayrecord"):
        with pytest.raises(ValueError, match=f"'{home}/prepared' holds no file"):
            open_source(f"{scheme}:~/prepared", "train", "images")


@pytest.mark.parametrize("name", ["~/runs", "~nobody_of_this_name/runs"])
def test_a_home_folder_that_nobody_knows_is_refused(name, monkeypatch):
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of no account
    with pytest.raises(FolderError, match=f"{name} begins with '~'.*./{name} is"):
        run_folder(name)
