"""Files of a run folder are replaced whole, and what is damaged is named."""

import errno
import json
import os
import shutil

import google_crc32c
import pytest
import tensorstore

from echo_jax.files import (
    DamagedFileError,
    read_json,
    remove_unfinished,
    run_folder,
    write,
    write_json,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run").mkdir()
    return run_folder(tmp_path / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_failed_write_leaves_the_old_file_and_no_other(folder, monkeypatch, error):
    path = folder / "a.json"
    write(path, "old")

    def fail(*_):
        raise error(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error) as caught:
        write(path, "new")
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
        write(folder / "file", "new")
    monkeypatch.undo()
    assert (folder / "file").read_text() == "new"
    assert os.listdir(folder) == ["file"]


def test_what_a_killed_write_left_is_removed_and_nothing_else(folder):
    keep = ["a.json", ".a.json.0123456789abcdef.old", "x.new"]
    for name in [*keep, ".a.json.0123456789abcdef.new"]:
        (folder / name).write_text("")
    remove_unfinished(folder)
    assert sorted(os.listdir(folder)) == sorted(keep)
    remove_unfinished(folder / "none")


def test_json_without_numbers_for_what_is_none_replaces_a_file_whole(folder):
    path = folder / "a.json"
    write_json(path, {"a": [1.5, float("nan")], "b": {"c": float("inf")}, "d": 2**70})
    expected = {"a": [1.5, None], "b": {"c": None}, "d": 2**70}
    assert json.loads(path.read_text()) == expected == read_json(path)
    with pytest.raises(TypeError):
        write_json(path, {"new": object()})
    assert read_json(path) == expected and os.listdir(folder) == ["a.json"]
    assert read_json(folder / "missing.json") is None
    # One of an earlier version has a checksum.
    write(path, '{"updates": 60, "crc32": "00000000"}')
    assert read_json(path) == {"updates": 60}


FIELDS = {"updates": int, "echo?.factor": float}


@pytest.mark.parametrize(
    ("content", "what"),
    [
        *((damage, "") for damage in (b"{", b"[]", b"[" * 100_000)),
        (b"{}", "it lacks 'updates'"),
        (b'{"updates": "9"}', "'updates' is '9'"),
        (b'{"updates": 9, "echo": 1}', "it lacks 'echo.factor'"),
    ],
    ids=range(6),
)
def test_a_damaged_file_and_what_it_lacks_is_named(folder, content, what):
    path = folder / "a.json"
    write(path, content)
    with pytest.raises(DamagedFileError, match=rf"a\.json is damaged: {what}.*; put"):
        read_json(path, FIELDS)
    write_json(path, {"updates": 9})
    assert read_json(path, FIELDS) == {"updates": 9}


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
