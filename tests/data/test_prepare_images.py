"""Class folders become labelled records, exactly, wherever the making was stopped."""

import contextlib
import hashlib
import itertools
import json
import os
from pathlib import Path

import pytest
from prepare_cases import (
    class_folders,
    contents,
    make_image,
    records,
    write_folder,
    write_tar,
    write_zip,
)

from echo_jax.data.prepare import PrepareError, Settings, prepare_images, workspace
from echo_jax.data.prepare.errors import allowed
from echo_jax.data.prepare.job import is_held_out, parse_sources
from echo_jax.data.sources.prepared import PreparedError, read_info
from echo_jax.files.json_files import unseal
from echo_jax.files.lock import FolderInUseError

FILES = class_folders(12)
SHARD_MB = 1200 / 2**20


def prepare(out, *sources, **settings):
    return prepare_images(sources, Settings(out=out, **settings))


def refusal(out, *sources, **settings):
    with pytest.raises(PrepareError) as caught:
        prepare(out, *sources, **settings)
    with pytest.raises(PreparedError):
        read_info(out)
    return str(caught.value)


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "source", FILES)


def test_records_have_the_bytes_and_labels_of_their_files(source, tmp_path):
    info = prepare(tmp_path / "out", source)
    assert info["classes"] == ["ant", "cat"]
    assert records(tmp_path / "out", "train") == [
        {"image": FILES[name], "label": int(name.startswith("cat")), "name": name}
        for name in sorted(FILES)
    ]


def test_dataset_json_says_what_there_is(source, tmp_path):
    out = tmp_path / "out"
    info = prepare(out, source, shard_mb=SHARD_MB)
    assert info == unseal(json.loads((out / "dataset.json").read_text()))
    assert info == read_info(out)
    (split,) = info["splits"].values()
    assert info["format"] == 1 and info["kind"] == "images"
    assert {*info["features"]} == {"image", "label", "name"}
    assert info["skipped"] == {"count": 0, "reasons": {}, "first": []}
    assert split["examples"] == 12
    assert len(split["shards"]) == round(sum(map(len, FILES.values())) / 1200)
    for number, shard in enumerate(split["shards"]):
        number_of = f"{number:05}-of-{len(split['shards']):05}"
        assert shard["file"] == f"train-{number_of}.arrayrecord"
        content = (out / shard["file"]).read_bytes()
        assert shard["bytes"] == len(content)
        assert shard["sha256"] == hashlib.sha256(content).hexdigest()
        assert 0 < shard["examples"] < 12
    (metadata,) = info["source"]["train"]
    assert metadata["path"] == source and metadata["files"] == 12
    # And nothing else lies there.
    names = {shard["file"] for shard in split["shards"]}
    assert contents(out).keys() == {"dataset.json", *names}


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".bz2", ".zip"])
def test_an_archive_gives_what_its_folder_does(source, tmp_path, suffix):
    # In the order of names, as a folder is read.
    files = {f"train/{name}": FILES[name] for name in sorted(FILES)}
    path = tmp_path / (f"x.tar{suffix}" if suffix != ".zip" else "x.zip")
    if suffix == ".zip":
        write_zip(path, files)
    else:
        write_tar(path, files, f"w:{suffix[1:]}")
    prepare(tmp_path / "tar", f"train={path}")
    prepare(tmp_path / "folder", source)
    expected = records(tmp_path / "folder", "train")
    for record in expected:
        record["name"] = f"train/{record['name']}"
    assert records(tmp_path / "tar", "train") == expected
    (metadata,) = read_info(tmp_path / "tar")["source"]["train"]
    assert metadata["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_labels_of_other_splits_are_those_of_train(source, tmp_path):
    few = {"cat/x.png": make_image(99, ".png")}
    other = write_folder(tmp_path / "other", few)
    info = prepare(tmp_path / "out", source, f"validation={other}")
    (record,) = records(tmp_path / "out", "validation")
    assert (record["label"], info["classes"]) == (1, ["ant", "cat"])
    assert record["image"] == few["cat/x.png"]


def test_several_sources_of_a_split_follow_one_another(source, tmp_path):
    more = write_tar(tmp_path / "more.tar", {"bee/000.jpg": make_image(50)})
    info = prepare(tmp_path / "out", source, more, shard_mb=SHARD_MB)
    names = [record["name"] for record in records(tmp_path / "out", "train")]
    assert names == [*sorted(FILES), "bee/000.jpg"]
    assert info["classes"] == ["ant", "bee", "cat"]


@pytest.mark.parametrize("suffix", ["", ".tar.gz"])
def test_workers_and_their_number_change_nothing(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    files = {**FILES, "cat/bad.jpg": b"", "ant/bad.jpg": FILES["cat/000.jpg"][:100]}
    write_tar(path, files, "w:gz") if suffix else write_folder(path, files)
    made = []
    for workers in (1, 2, 7):
        settings = {"workers": workers, "shard_mb": SHARD_MB, "max_bad": "2"}
        prepare(tmp_path / str(workers), str(path), **settings)
        made.append(contents(tmp_path / str(workers)))
    assert made[0] == made[1] == made[2]


class Stop(BaseException):
    """Stands for a kill: nothing handles it."""


def _lose(descriptor):
    """Takes half of what was written, as a failure of power does."""
    with contextlib.suppress(OSError):  # What is open for reading is whole.
        os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


@pytest.fixture
def stop_at(monkeypatch):
    """Makes everything that lasts countable, and one of it the last."""
    steps = itertools.count()
    last = [None]

    def stopping(function, before=lambda *args, **kwargs: None):
        def wrapped(*args, **kwargs):
            if next(steps) == last[0]:
                before(*args, **kwargs)
                raise Stop
            return function(*args, **kwargs)

        return wrapped

    class Writer(workspace.ArrayRecordWriter):
        write = stopping(workspace.ArrayRecordWriter.write)
        close = stopping(workspace.ArrayRecordWriter.close)

    monkeypatch.setattr(workspace, "ArrayRecordWriter", Writer)
    monkeypatch.setattr(Path, "replace", stopping(Path.replace))
    monkeypatch.setattr(Path, "open", stopping(Path.open))
    monkeypatch.setattr(workspace.os, "fsync", stopping(lambda descriptor: None, _lose))
    monkeypatch.setattr(workspace.shutil, "rmtree", stopping(workspace.shutil.rmtree))

    def set_last(step):
        nonlocal steps
        taken, steps = next(steps), itertools.count()
        last[0] = step
        return taken

    return set_last


@pytest.mark.parametrize("suffix", ["", ".tar.gz"])
def test_stopped_anywhere_it_goes_on_to_the_same_bytes(tmp_path, stop_at, suffix):
    files = {**class_folders(5), "cat/bad.jpg": b""}
    path = tmp_path / f"x{suffix}"
    write_tar(path, files, "w:gz") if suffix else write_folder(path, files)
    out = tmp_path / "out"
    settings = {"shard_mb": SHARD_MB, "max_bad": "1", "holdout": 0.3}

    def run():
        prepare(out, str(path), workers=1, **settings)

    stop_at(None)
    run()
    steps = stop_at(None)
    whole = contents(out)
    assert len(whole) > 3
    for step in range(steps):
        workspace.shutil.rmtree(out)
        stop_at(step)
        with pytest.raises(Stop):
            run()
        stop_at(None)
        if (out / "dataset.json").exists():
            # What is readable is whole.
            read_info(out)
        run()
        assert contents(out) == whole, step


def test_finished_shards_are_not_made_again(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    made = []
    write = workspace.Workspace.write_shard

    def write_and_tell(self, split, number, records, rest):
        if number == stops_at:
            raise KeyboardInterrupt
        made.append(number)
        return write(self, split, number, records, rest)

    monkeypatch.setattr(workspace.Workspace, "write_shard", write_and_tell)
    stops_at = 2
    with pytest.raises(KeyboardInterrupt):
        prepare(out, source, shard_mb=SHARD_MB)
    stops_at = None
    with pytest.raises(PreparedError, match=r"has no dataset\.json"):
        read_info(out)
    new = Path(source, "cat", "new.jpg")
    new.write_bytes(make_image(1))
    with pytest.raises(PrepareError, match="the source has changed"):
        prepare(out, source, shard_mb=SHARD_MB)
    new.unlink()
    info = prepare(out, source, shard_mb=SHARD_MB)
    assert made == [*range(len(info["splits"]["train"]["shards"]))]


def test_the_same_command_after_the_end_changes_nothing(source, tmp_path):
    out = tmp_path / "out"
    info = prepare(out, source)
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(out, source) == info
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


@pytest.mark.parametrize("is_finished", [True, False])
def test_other_options_or_sources_are_refused(
    source, tmp_path, monkeypatch, is_finished
):
    out = tmp_path / "out"
    if is_finished:
        prepare(out, source)
    else:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(workspace.Workspace, "publish", _interrupt)
            prepare(out, source)
    with pytest.raises(PrepareError, match=r"--holdout was 0.0 and is 0.5\. Use those"):
        prepare(out, source, holdout=0.5)
    with pytest.raises(PrepareError, match=r"--shard-mb was 256\.0 and is 1\.0"):
        prepare(out, source, shard_mb=1.0)
    # These two decide nothing.
    prepare(out, source, max_bad="5", workers=3)
    Path(source, "cat", "new.jpg").write_bytes(make_image(1))
    with pytest.raises(PrepareError, match="the source has changed"):
        prepare(out, source)


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def test_a_folder_of_something_else_is_left_alone(source, tmp_path):
    (tmp_path / "thesis.tex").touch()
    assert "holds 'source' and is no prepared folder" in refusal(tmp_path, source)
    assert "is a file" in refusal(tmp_path / "thesis.tex", source)
    assert not (tmp_path / ".prepare").exists()


def test_what_a_kill_has_left_of_a_lock_is_in_nobodys_way(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / f"..lock.{0:016x}.new").touch()
    prepare(out, source)
    prepare(tmp_path / "other", source)
    assert contents(out) == contents(tmp_path / "other")


def test_two_at_a_time_are_refused(source, tmp_path):
    in_use = pytest.raises(FolderInUseError, match="out is in use by process")
    with workspace.Workspace(tmp_path / "out", {}), in_use:
        prepare(tmp_path / "out", source)
    prepare(tmp_path / "out", source)


def test_a_mistake_leaves_nothing_behind(source, tmp_path):
    out = tmp_path / "a" / "out"
    assert "no such file" in refusal(out, f"{tmp_path}/nothing.tar")
    assert not out.exists()
    # Found when the source was read, before any shard.
    other = write_folder(tmp_path / "other", {"val/1.jpg": make_image(1)})
    refusal(out, source, f"validation={other}")
    assert not out.exists()
    out.mkdir(parents=True)
    refusal(out, source, f"validation={other}")
    assert contents(out) == {}
    prepare(out, source)


def test_what_was_stopped_before_the_first_shard_is_begun_anew(
    source, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workspace.Workspace, "write_shard", _interrupt)
        prepare(out, source)
    Path(source, "cat", "new.jpg").write_bytes(make_image(1))
    assert prepare(out, source, holdout=0.5)["options"]["holdout"] == 0.5


BAD = {
    "empty.jpg": (b"", "empty file"),
    "cut.jpg": (make_image(0)[:-10], "truncated"),
    "cut.png": (make_image(0, ".png")[:-40], "truncated"),
    "page.jpg": (b"<html>", "no JPEG, PNG, WebP, BMP or GIF: convert it to one"),
}


@pytest.mark.parametrize("suffix", ["", ".tar", ".tar.xz"])
def test_bad_images_are_skipped_counted_and_named(tmp_path, suffix):
    bad = {f"cat/{name}": content for name, (content, _) in BAD.items()}
    path = tmp_path / f"x{suffix}"
    if suffix:
        write_tar(path, {**bad, **FILES, "loose.jpg": b""}, f"w:{suffix[5:]}")
    else:
        write_folder(path, {**bad, **FILES, "loose.jpg": b""})
    settings = {"shard_mb": SHARD_MB}
    assert "--max-bad=5 or" in refusal(
        tmp_path / "out", str(path), max_bad="4", **settings
    )
    info = prepare(tmp_path / "out", str(path), max_bad="5", **settings)
    assert info["splits"]["train"]["examples"] == 12
    assert [r["name"] for r in records(tmp_path / "out", "train")] == (
        [*FILES] if suffix else sorted(FILES)
    )
    assert info["skipped"]["count"] == 5
    assert info["skipped"]["reasons"] == {
        "empty file": 1,
        "in no class folder": 1,
        "no JPEG, PNG, WebP, BMP or GIF: convert it to one": 1,
        "truncated": 2,
    }
    found = {bad["name"]: bad["reason"] for bad in info["skipped"]["first"]}
    assert found == {f"cat/{name}": reason for name, (_, reason) in BAD.items()} | {
        "loose.jpg": "in no class folder"
    }


@pytest.mark.parametrize(
    ("max_bad", "total", "expected"),
    [
        ("0", 500, 0),
        ("7", 5, 7),
        ("0%", 500, 0),
        ("0.1%", 999, 0),
        ("0.1%", 1000, 1),
        ("0.1%", 1999, 1),
        ("100%", 3, 3),
    ],
)
def test_what_may_be_bad_is_a_number_or_a_share(max_bad, total, expected):
    assert allowed(max_bad, total) == expected


@pytest.mark.parametrize("max_bad", ["", "%", "-1", "1.5", "101%", "-1%", "nan%", "x"])
def test_another_max_bad_is_refused(source, tmp_path, max_bad):
    assert f"--max-bad={max_bad} is neither" in refusal(
        tmp_path / "out", source, max_bad=max_bad
    )


def test_names_are_told_up_to_a_hundred(tmp_path):
    files = {**FILES, **{f"cat/bad{i:03}.jpg": b"" for i in range(150)}}
    source = write_folder(tmp_path / "x", files)
    message = refusal(tmp_path / "out", source, max_bad="3")
    assert "more than 3 of 162 are bad: train: 'cat/bad000.jpg' (empty file)" in message
    info = prepare(tmp_path / "out", source, max_bad="150")
    assert info["skipped"]["count"] == 150
    assert len(info["skipped"]["first"]) == 100


def test_images_of_an_unknown_class_are_bad(source, tmp_path):
    few = {"bee/1.jpg": make_image(1), "cat/2.jpg": make_image(2)}
    other = write_folder(tmp_path / "other", few)
    sources = source, f"validation={other}"
    message = refusal(tmp_path / "out", *sources)
    assert message.startswith(
        "split 'validation' has 1 images of 1 classes that train has not, such as "
        "'bee', by their folders, and train has 2, such as 'ant'; say with --classes"
    )
    assert message.endswith("or leave such images out with --max-bad=1")
    info = prepare(tmp_path / "out", *sources, max_bad="1")
    assert info["skipped"]["first"] == [
        {"split": "validation", "name": "bee/1.jpg", "reason": "of unknown class"}
    ]
    assert info["splits"]["validation"]["of_class"] == [0, 1]


def test_the_images_of_each_class_are_counted(tmp_path):
    files = {**class_folders(9), "ant/cut.jpg": FILES["ant/001.jpg"][:-9]}
    source = write_folder(tmp_path / "x", files)
    info = prepare(tmp_path / "out", source, holdout=0.4, max_bad="1")
    for split in ("train", "validation"):
        labels = [record["label"] for record in records(tmp_path / "out", split)]
        counts = [labels.count(0), labels.count(1)]
        assert info["splits"][split]["of_class"] == counts
    total = [info["splits"][s]["of_class"] for s in ("train", "validation")]
    assert [sum(of) for of in zip(*total, strict=True)] == [4, 5]


def test_a_name_that_is_there_twice_is_bad(tmp_path):
    # As after `tar --append` with a newer version of a file.
    path = write_tar(tmp_path / "x.tar", {**FILES, "./cat/000.jpg": make_image(99)})
    message = refusal(tmp_path / "out", path)
    assert "train: 'cat/000.jpg' (twice in the source)" in message
    prepare(tmp_path / "out", path, max_bad="1")
    images = {r["name"]: r["image"] for r in records(tmp_path / "out", "train")}
    assert images == FILES


def test_a_split_without_a_good_image_is_refused(tmp_path):
    source = write_folder(tmp_path / "x", {"cat/1.jpg": b"", "ant/1.jpg": b""})
    assert "no image is left for split 'train'" in refusal(
        tmp_path / "out", source, max_bad="2"
    )
    (tmp_path / "empty").mkdir()
    assert "where there are none; unpack" in refusal(
        tmp_path / "out2", f"{tmp_path}/empty"
    )
    of_others = {"cat.rar": b"", "ant.rar": b"", "README": b""}
    said = refusal(tmp_path / "out3", write_tar(tmp_path / "x.tar", of_others))
    assert "where there are 2 .rar, 1 without an ending; unpack" in said


def test_what_is_held_out_goes_by_names_alone(source, tmp_path):
    prepare(tmp_path / "out", source, holdout=0.4)
    parts = {
        split: {record["name"] for record in records(tmp_path / "out", split)}
        for split in ("train", "validation")
    }
    assert parts["train"] | parts["validation"] == {*FILES}
    assert parts["validation"] == {name for name in FILES if is_held_out(name, 0.4)}
    assert parts["train"] and parts["validation"]


def test_a_share_is_held_out():
    names = [f"name {number}" for number in range(10_000)]
    held_out = {name for name in names if is_held_out(name, 0.05)}
    # Five standard deviations of a binomial draw.
    assert abs(len(held_out) - 500) < 5 * (10_000 * 0.05 * 0.95) ** 0.5
    assert held_out <= {name for name in names if is_held_out(name, 0.1)}
    assert not any(is_held_out(name, 0.0) for name in names)


@pytest.mark.parametrize(
    ("arguments", "holdout", "message"),
    [
        (["train="], 0.0, "'train=' names no source"),
        (["a", "validation=b"], 0.1, "makes a validation split, and one is given"),
        (["test=a"], 0.1, "needs a train split"),
    ],
)
def test_sources_that_make_no_sense_are_refused(arguments, holdout, message):
    with pytest.raises(PrepareError, match=message):
        parse_sources(arguments, holdout)


def test_sources_are_named_by_split():
    assert parse_sources(["a", "val=b=c", "train=d", "./x=y"], 0.0) == {
        "train": ["a", "d", "./x=y"],
        "val": ["b=c"],
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"holdout": 1.0}, "--holdout=1.0"),
        ({"holdout": -0.1}, "--holdout=-0.1"),
        ({"workers": -1}, "--workers=-1"),
        ({"shard_mb": 0.0}, "--shard-mb"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, message):
    with pytest.raises(PrepareError, match=message):
        Settings(out=tmp_path, **settings)


def test_progress_goes_from_nothing_to_all(source, tmp_path):
    seen = []
    settings = {"on_progress": lambda what, part: seen.append((what, part))}
    path = write_tar(tmp_path / "x.tar.gz", FILES, "w:gz")
    prepare(tmp_path / "out", path, **settings)
    assert [*dict(seen)] == ["reading x.tar.gz", "checking and writing images"]
    for what in dict(seen):
        parts = [part for name, part in seen if name == what]
        assert parts == sorted(parts) and 0 < parts[0] <= parts[-1] == 1.0
