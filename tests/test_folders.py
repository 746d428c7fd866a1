"""Run folders of strangers: nothing in them is followed, waited for or trusted."""

import errno
import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.files.folders import FolderError, RunPath, run_file, run_folder


@pytest.fixture
def victim(tmp_path):
    """A file of the user's outside of the folder, and what must stay in it."""
    file = tmp_path / "home" / ".bashrc"
    file.parent.mkdir()
    file.write_text("mine")
    yield file
    assert file.read_text() == "mine"
    assert [each.name for each in file.parent.iterdir()] == [".bashrc"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return run_folder(tmp_path / "run")


def plant(path, kind, victim):
    """Puts something else where a file of a run belongs."""
    if kind == "link":
        os.symlink(victim, path)
    elif kind == "dangling link":
        os.symlink(victim.parent / "new", path)
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.fspath(path))
    else:
        os.mkdir(path)


KINDS = ["link", "dangling link", "named pipe", "socket", "folder"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use", ["read_bytes", "read_text", "write", "append"])
def test_a_file_is_a_file_and_nothing_else(folder, victim, kind, use):
    path = folder / "summary.json"
    plant(path, kind, victim)
    before = os.lstat(path)
    with pytest.raises(FolderError, match="where a file belongs") as caught:
        getattr(path, use)(*(["new"] if use in ("write", "append") else []))
    assert str(path) in str(caught.value)
    assert os.lstat(path).st_ino == before.st_ino
    # No half of a new file is left.
    assert os.listdir(folder) == ["summary.json"]


@pytest.mark.parametrize("name", ["sub/a.json", "sub/deep/a.json"])
@pytest.mark.parametrize("use", ["read_bytes", "write", "append", "mkdir", "exists"])
def test_a_linked_folder_is_not_entered(folder, victim, name, use):
    (victim.parent / "deep").mkdir()
    os.symlink(victim.parent, folder / "sub")
    path = folder / name
    with pytest.raises(FolderError, match="sub is a link where a folder belongs"):
        getattr(path, use)(*(["new"] if use in ("write", "append") else []))
    (victim.parent / "deep").rmdir()


def test_a_planted_file_that_a_write_might_use_is_left_alone(folder, victim):
    """A link of the name that a new file had until it was whole."""
    os.symlink(victim, folder / ".table.md.new")
    (folder / "table.md").write("new")
    assert (folder / "table.md").read_text() == "new"
    assert os.readlink(folder / ".table.md.new") == str(victim)


def test_the_way_to_the_folder_is_the_users_own(tmp_path):
    """Their links are followed: run folders often lie on another disk."""
    (tmp_path / "disk").mkdir()
    os.symlink(tmp_path / "disk", tmp_path / "runs")
    for folder in (run_folder(tmp_path / "runs"), run_folder(tmp_path / "runs" / "a")):
        folder.mkdir()
        (folder / "b" / "c").mkdir()
        (folder / "b" / "c.json").write("1")
        assert (folder / "b" / "c.json").read_text() == "1"
    assert (tmp_path / "disk" / "a" / "b" / "c.json").read_text() == "1"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/../../b", "/etc/passwd", "a//b", "\0"]
)
def test_no_name_leads_out_of_the_folder(folder, name):
    with pytest.raises(FolderError, match="is no name of something in"):
        folder / name


@given(st.text(max_size=30))
def test_a_name_stays_below_its_folder_or_is_refused(name):
    root = run_folder("/run")
    try:
        path = root / name
    except FolderError:
        return
    assert os.path.normpath(path) == os.fspath(path)
    assert os.fspath(path).startswith("/run/")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_the_old_file_and_no_other(folder, monkeypatch, error):
    path = folder / "a.json"
    path.write("old")

    def fail(*_):
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error):
        path.write("new")
    assert path.read_text() == "old"
    assert os.listdir(folder) == ["a.json"]


@pytest.mark.parametrize(("is_new", "last"), [(False, "replace"), (True, "unlink")])
def test_ctrl_c_at_the_end_of_a_write_is_what_is_raised(
    folder, monkeypatch, is_new, last
):
    """Found by F2: a missing file was, and the command said to name one."""
    real = getattr(os, last)

    def interrupted(*args, **options):
        real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, last, interrupted)
    with pytest.raises(KeyboardInterrupt):
        (folder / "file").write("new", is_new=is_new)
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


def test_a_file_that_is_too_large_is_not_read(folder):
    path = folder / "summary.json"
    path.write("12345")
    assert path.read_bytes(5) == b"12345"
    with pytest.raises(FolderError, match="has 5 bytes, and at most 4 are read"):
        path.read_bytes(4)
    # One that says little of what it holds is read as far as it says.
    os.truncate(path, 1 << 40)
    with pytest.raises(FolderError, match="at most 268435456"):
        path.read_bytes()


def test_text_that_is_none_is_refused(folder):
    (folder / "a.json").write(b"\xff")
    with pytest.raises(FolderError, match=r"a.json is not text in UTF-8"):
        (folder / "a.json").read_text()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "folder"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_others_are_given_files_and_folders_alone(folder, victim, kind, depth):
    path = folder / "checkpoints"
    (path / "8" / "state").mkdir()
    (path / "8" / "state" / "array").write("1")
    assert os.fspath(path.for_others()) == os.fspath(path)
    names = ["", "8/planted", "8/state/planted", "8/state/x/planted"]
    planted = folder / "linked" if not depth else path / names[depth]
    planted.parent.mkdir()
    plant(planted, kind, victim)
    with pytest.raises(FolderError, match=f"{planted} is a .* where a "):
        (planted if not depth else path).for_others()


def test_a_linked_folder_among_files_is_found(folder, victim):
    path = folder / "checkpoints"
    path.mkdir()
    os.symlink(victim.parent, path / "8")
    with pytest.raises(FolderError, match="checkpoints/8 is a link"):
        path.for_others()


def test_only_what_is_in_the_folder_is_removed(folder, victim):
    path = folder / "profile"
    (path / "a").mkdir()
    (path / "b.json").write("1")
    os.symlink(victim.parent, path / "a" / "link")
    path.remove()
    assert not path.exists()
    path.remove()
    os.symlink(victim.parent, path)
    with pytest.raises(FolderError, match="profile is a link where a folder belongs"):
        path.remove()


def test_what_is_missing_is_named_as_it_was_asked_for(folder):
    for path in (folder / "a.json", folder / "b" / "a.json"):
        with pytest.raises(FileNotFoundError) as caught:
            path.read_bytes()
        assert str(caught.value.filename) in (str(path), str(path.parent))
        assert not path.exists() and not path.is_dir()


def test_a_file_is_in_a_folder():
    assert run_file("tape.json") == RunPath(run_folder(".").root, ("tape.json",))
    assert str(run_file("/tape.json")) == "/tape.json"
    assert str(run_file("runs/a/tape.json")) == "runs/a/tape.json"
    file = run_folder("a") / "b"
    assert run_file(file) is file and run_folder(file) is file


def test_an_error_of_the_system_names_the_file(tmp_path, monkeypatch):
    """An open file knows its name no more."""
    (tmp_path / "x.json").write_text("old")

    def fill(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(OSError) as caught:
        (run_folder(tmp_path) / "x.json").write("new")
    assert caught.value.filename == str(tmp_path / "x.json")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"
