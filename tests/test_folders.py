"""Run folders of strangers: nothing in them is followed, waited for or trusted."""

import contextlib
import errno
import json
import os
import shutil
import socket
from pathlib import Path

import google_crc32c
import pytest
import tensorstore

from echo_jax import cli
from echo_jax.files import (
    DamagedFileError,
    FolderError,
    json_line,
    read_json,
    read_line,
    run_folder,
    unseal,
    write_json,
)


@pytest.fixture
def home(tmp_path):
    """Files of the user's outside of the folder, in which nothing may change."""
    (home := tmp_path / "home").mkdir()
    (home / "kept" / "9").mkdir(parents=True)
    for name in (".bashrc", "kept/9/file"):
        (home / name).write_text("mine")

    def seen():
        found = {path: path.stat() for path in home.rglob("*")}
        return {path: (of.st_ino, of.st_mtime_ns) for path, of in found.items()}

    before = seen()
    yield home
    assert seen() == before


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return run_folder(tmp_path / "run")


def plant(path, kind, home, to=".bashrc"):
    """Puts something else where a file of a run belongs."""
    if "link" in kind:
        os.symlink(home / (to if kind == "link" else "new"), path)
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fspath(path))
    else:
        os.mkdir(path)


KINDS = ["link", "dangling link", "named pipe", "socket", "folder"]
USES = {"read_bytes": [], "read_text": [], "write": ["new"], "append": ["new"]}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", USES)
def test_a_file_is_a_file_and_nothing_else(folder, home, kind, use):
    path = folder / "summary.json"
    plant(path, kind, home)
    before = os.lstat(path)
    with pytest.raises(FolderError, match="where a file belongs") as caught:
        getattr(path, use)(*USES[use])
    assert str(path) in str(caught.value)
    assert os.lstat(path).st_ino == before.st_ino
    # No half of a new file is left.
    assert os.listdir(folder) == ["summary.json"]


@pytest.mark.parametrize("name", ["sub/a.json", "sub/kept/a.json"])
@pytest.mark.parametrize("use", [*USES, "mkdir", "exists"])
def test_a_linked_folder_is_not_entered(folder, home, name, use):
    os.symlink(home, folder / "sub")
    with pytest.raises(FolderError, match="sub is a link where a folder belongs"):
        getattr(folder / name, use)(*USES.get(use, []))


def test_the_way_to_the_folder_is_the_users_own(tmp_path):
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "runs")
    for folder in (run_folder(tmp_path / "runs"), run_folder(tmp_path / "runs" / "a")):
        folder.mkdir()
        (folder / "b" / "c").mkdir()
        (folder / "b" / "c.json").write("1")
    assert (tmp_path / "disk" / "a" / "b" / "c.json").read_text() == "1"


def test_a_name_stays_below_its_folder_or_is_refused():
    for name in ("", ".", "..", "a/../../b", "a//b", "/a", "a/", "a\0"):
        with pytest.raises(FolderError, match="is no name of something in"):
            run_folder("/run") / name
    for name in ("...", "a/b", ".a", "é\n"):
        assert os.fspath(run_folder("/run") / name) == f"/run/{name}"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_the_old_file_and_no_other(folder, monkeypatch, error):
    path = folder / "a.json"
    path.write("old")

    def fail(*_):
        raise error(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error) as caught:
        path.write("new")
    assert error is KeyboardInterrupt or caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert os.listdir(folder) == ["a.json"]


def test_ctrl_c_at_the_end_of_a_write_is_what_is_raised(folder, monkeypatch):
    replace = os.replace

    def interrupted(*args, **options):
        replace(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        (folder / "file").write("new")
    monkeypatch.undo()
    assert (folder / "file").read_text() == "new"
    assert os.listdir(folder) == ["file"]


def test_what_a_killed_write_left_is_removed_and_nothing_else(folder):
    keep = ["a.json", ".a.json.new", ".a.json.0123456789abcdef.old", "x.new"]
    for name in [*keep, ".a.json.0123456789abcdef.new"]:
        (folder / name).write("")
    folder.remove_unfinished()
    assert sorted(os.listdir(folder)) == sorted(keep)
    (folder / "none").remove_unfinished()


def test_what_is_too_large_missing_or_no_text_is_named(folder):
    path = folder / "summary.json"
    path.write(b"1234\xff")
    assert path.read_bytes(5) == b"1234\xff"
    with pytest.raises(FolderError, match=r"summary.json is not text in UTF-8"):
        path.read_text()
    with pytest.raises(FolderError, match="has 5 bytes, and at most 4 are read"):
        path.read_bytes(4)
    os.truncate(path, 1 << 40)
    with pytest.raises(FolderError, match="at most 268435456"):
        path.read_bytes()
    for path in (folder / "a.json", folder / "b" / "a.json"):
        with pytest.raises(FileNotFoundError, match=f"{path.parent}"):
            path.read_bytes()
        assert not path.exists() and not path.is_dir()


@pytest.mark.parametrize("kind", ["link", "named pipe"])
@pytest.mark.parametrize("name", ["", "8", "8/state/x/planted"])
def test_others_are_given_files_and_folders_alone(folder, home, kind, name):
    path = folder / "checkpoints"
    planted = path / name if name else path
    if name:
        (path / "9" / "state").mkdir()
        (path / "9" / "state" / "array").write("1")
        assert os.fspath(path.for_others()) == os.fspath(path)
    planted.parent.mkdir()
    plant(planted, kind, home)
    with pytest.raises(FolderError, match=f"{planted} is a .* where a "):
        path.for_others()


def test_only_what_is_in_the_folder_is_removed(folder, home):
    path = folder / "profile"
    (path / "a").mkdir()
    (path / "b.json").write("1")
    os.symlink(home, path / "a" / "link")
    for _ in range(2):
        path.remove()
        assert not path.exists()
    os.symlink(home, path)
    with pytest.raises(FolderError, match="profile is a link where a folder belongs"):
        path.remove()


def test_whatever_bit_of_a_line_flips_is_seen():
    content = {"updates": 60, "loss": 1.5, "é": [None, "a"]}
    line = json_line(content).encode()
    for flip in range(8 * len(line)):
        damaged = bytearray(line)
        damaged[flip // 8] ^= 1 << flip % 8
        with contextlib.suppress(ValueError):
            # Only the name of the checksum changed, or a space became another one.
            assert read_line(bytes(damaged)).items() >= content.items()


def test_json_without_numbers_for_what_is_none_replaces_a_file_whole(folder):
    path = folder / "a.json"
    write_json(path, {"a": [1.5, float("nan")], "b": {"c": float("inf")}, "d": 2**70})
    expected = {"a": [1.5, None], "b": {"c": None}, "d": 2**70}
    assert unseal(json.loads(path.read_text())) == expected == read_json(path)
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == expected and os.listdir(folder) == ["a.json"]
    assert read_json(folder / "missing.json") is None
    # One of an earlier version has no checksum.
    path.write('{"updates": 60}')
    assert read_json(path) == {"updates": 60}


FIELDS = {"updates": int, "echo?.factor": float}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        *((damage, "") for damage in (b"{", b"[]", b"[" * 100_000)),
        (b'{"updates": 61, "crc32": "00000000"}', "it does not have the checksum"),
        (b"{}", "it lacks 'updates'"),
        (b'{"updates": "9"}', "'updates' is '9'"),
        (b'{"updates": 9, "echo": 1}', "it lacks 'echo.factor'"),
    ],
    ids=range(7),
)
def test_a_damaged_file_and_what_it_lacks_is_named(folder, content, what):
    path = folder / "a.json"
    path.write(content)
    with pytest.raises(DamagedFileError, match=rf"a\.json is damaged: {what}.*; put"):
        read_json(path, FIELDS)
    write_json(path, {"updates": 9})
    assert read_json(path, FIELDS) == {"updates": 9}


LM = ["train", "--config", f"{Path(__file__).parents[1]}/configs/lm.py:tiny"]
FILES = ["config.json", "summary.json", "metrics.jsonl", "environment.json"]
REPORT = ["table.md", "figure.png", "figure.svg", "report.html"]


def train(workdir, updates):
    flags = {"updates": updates, "eval_every": 2, "checkpoint_every": 2}
    flags |= {"optim.warmup_updates": 0, "optim.schedule": "constant"}
    # So that all of it is compiled in a second or two, and nothing on the side.
    flags |= {"mesh.data": 1, "model.num_layers": 1}
    argv = [*LM, "--workdir", str(workdir)]
    return cli.main([*argv, *(f"--config.{k}={v}" for k, v in flags.items())])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, all_compiled_soon):
    path = tmp_path_factory.mktemp("stranger") / "run"
    assert train(path, 2) == 0
    return path


@pytest.fixture
def stranger(trained, tmp_path, home):
    """Copies a run and plants something in it; returns the name of its kind."""

    def plants(name, to):
        shutil.copytree(trained, tmp_path / "run")
        path, kind = tmp_path / "run" / name, "link" if to else "named pipe"
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        plant(path, kind, home, to)
        # No name of a file that is not finished is one that a stranger can know.
        for file in (*FILES, *REPORT):
            plant(tmp_path / "run" / f".{file}.new", "link", home)
        return tmp_path / "run", f"{path} is a {kind} where a "

    return plants


@pytest.mark.parametrize("to", [".bashrc", None])
@pytest.mark.parametrize("name", [*FILES[:3], *REPORT[2:]])
def test_a_report_reads_and_writes_through_no_links_and_waits_for_no_pipes(
    stranger, capsys, name, to
):
    run, said = stranger(name, to)
    assert cli.main(["report", str(run)]) == 2
    assert said in capsys.readouterr().err
    assert name in REPORT or not (run / "report.html").exists()
    (run / name).unlink()
    if name in REPORT:
        assert cli.main(["report", str(run)]) == 0


@pytest.mark.parametrize(
    ("name", "to"),
    [
        *((name, to) for name in FILES for to in (".bashrc", None)),
        ("checkpoints", "kept"),
        *(
            (f"checkpoints/{at}", "kept/9")
            for at in ("2", "2/state/d", "2/host/metadata")
        ),
    ],
)
def test_a_run_goes_on_through_no_links_and_waits_for_no_pipes(
    stranger, trained, capsys, name, to
):
    run, said = stranger(name, to)
    assert train(run, 4) == 2
    assert said in capsys.readouterr().err
    if name == FILES[0] and to:
        (run / name).unlink()
        shutil.copy(trained / name, run / name)
        assert train(run, 4) == 0


def test_a_reference_inside_of_a_checkpoint_leads_nowhere_else(tmp_path):
    """Orbax's arrays lie in OCDBT databases, whose nodes name the files of values."""
    base = tmp_path / "database"
    ocdbt = {
        "driver": "ocdbt",
        "base": f"file://{base}/",
        "config": {"compression": None, "max_inline_value_bytes": 0},
        "value_data_prefix": "in/",
    }
    tensorstore.KvStore.open(ocdbt).result()["array"] = b"content " * 20
    (value,) = (base / "in").iterdir()
    shutil.move(value, tmp_path)  # What lies outside is as long, and could be read.
    nodes = [path for path in (base / "d").iterdir() if b"in/" in path.read_bytes()]
    for node in nodes:
        changed = node.read_bytes()[:-4].replace(b"in/", b"../")
        crc = google_crc32c.value(changed).to_bytes(4, "little")
        node.write_bytes(changed + crc)
    assert nodes
    with pytest.raises(ValueError, match=r'Invalid key: ".*/database/\.\./'):
        tensorstore.KvStore.open(ocdbt).result().read("array").result()
