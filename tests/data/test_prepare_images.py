"""Class folders become labelled records, exactly, wherever the making was stopped."""

import contextlib
import errno
import hashlib
import itertools
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
from prepare_cases import (
    class_folders,
    contents,
    make_image,
    member,
    prepare,
    records,
    refusal,
    write,
)

from echo_jax.data.prepare import PrepareError
from echo_jax.data.sources import read_info
from echo_jax.files import FolderInUseError, FolderLock, run_folder

FILES = class_folders(12)
SHARD_MB = 1200 / 2**20


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source", FILES)


def test_records_and_dataset_json_are_those_of_the_files(source, tmp_path):
    out = tmp_path / "out"
    info = prepare(out, source, shard_mb=SHARD_MB)
    assert info["classes"] == ["ant", "cat"]
    assert records(out, "train") == [
        {"image": FILES[name], "label": int(name.startswith("cat")), "name": name}
        for name in sorted(FILES)
    ]
    assert info == json.loads((out / "dataset.json").read_text())
    assert info == read_info(out) and (info["format"], info["kind"]) == (1, "images")
    assert {*info["features"]} == {"image", "label", "name"}
    (split,) = info["splits"].values()
    total = len(split["shards"])
    assert split["examples"] == sum(each["examples"] for each in split["shards"]) == 12
    assert total == round(sum(map(len, FILES.values())) / 1200)
    files = contents(out)
    files.pop("dataset.json")
    assert {shard["file"]: shard["sha256"] for shard in split["shards"]} == {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items()
    }
    assert [*files] == [f"train-{k:05}-of-{total:05}.arrayrecord" for k in range(total)]
    (metadata,) = info["source"]["train"]
    assert metadata["path"] == source and metadata["files"] == 12
    # The same command changes nothing.
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare(out, source, shard_mb=SHARD_MB) == info
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_sources_follow_one_another_and_labels_are_those_of_train(source, tmp_path):
    more = write(tmp_path / "more.tar.gz", {"bee/0.jpg": make_image(50)})
    other = write(tmp_path / "other", {"cat/x.png": make_image(99, ".png")})
    info = prepare(tmp_path / "out", source, more, f"validation={other}")
    names = [record["name"] for record in records(tmp_path / "out", "train")]
    assert names == [*sorted(FILES), "bee/0.jpg"]
    assert info["classes"] == ["ant", "bee", "cat"]
    (record,) = records(tmp_path / "out", "validation")
    assert record["label"] == 2 and record["image"] == make_image(99, ".png")


class Stop(BaseException):
    """Stands for a kill: nothing handles it."""


@pytest.fixture
def stop_at(monkeypatch):
    """Makes everything that lasts countable, and one of it the last."""
    steps, last = itertools.count(), [None]

    def lose(descriptor):
        """Takes half of what was written, as a failure of power does."""
        with contextlib.suppress(OSError):  # What is open for reading is whole.
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)

    def stopping(function, before=lambda *args, **kwargs: None):
        def wrapped(*args, **kwargs):
            if next(steps) == last[0]:
                before(*args, **kwargs)
                raise Stop
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(Path, "replace", stopping(Path.replace))
    monkeypatch.setattr(Path, "open", stopping(Path.open))
    monkeypatch.setattr(os, "replace", stopping(os.replace))
    monkeypatch.setattr(os, "fsync", stopping(lambda descriptor: None, lose))
    monkeypatch.setattr(shutil, "rmtree", stopping(shutil.rmtree))

    def set_last(step):
        nonlocal steps
        taken, steps = next(steps), itertools.count()
        last[0] = step
        return taken

    return set_last


def test_stopped_anywhere_it_goes_on_to_the_same_bytes(tmp_path, stop_at):
    files = {**class_folders(5), "cat/bad.jpg": b"", "ant/cut.jpg": make_image(0)[:99]}
    path, out = write(tmp_path / "x.tar.gz", files), tmp_path / "out"
    settings = {"shard_mb": SHARD_MB, "max_bad": "2", "holdout": 0.3}
    stop_at(None)
    prepare(out, path, workers=1, **settings)
    steps = stop_at(None)
    whole = contents(out)
    assert len(whole) > 3
    prepare(tmp_path / "workers", path, workers=7, **settings)
    assert contents(tmp_path / "workers") == whole
    for step in range(steps):
        stop_at(None)
        shutil.rmtree(out)
        stop_at(step)
        with pytest.raises(Stop):
            prepare(out, path, workers=1, **settings)
        stop_at(None)
        if (out / "dataset.json").exists():
            read_info(out)  # What is readable is whole.
        prepare(out, path, workers=1, **settings)
        assert contents(out) == whole, step


def interrupted(monkeypatch, function, before=(Path, "replace")):
    """Stops before shards are put in their places, or before something else."""

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(*before, interrupt)
        function()


AT_FIRST_SHARD = Path, "open"  # Which is how images are read.


def test_finished_shards_are_not_made_again(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: prepare(out, source, shard_mb=SHARD_MB))
    made = sorted(p.stat().st_ino for p in (out / ".prepare").glob("*.arrayrecord"))
    assert len(made) > 3 and not (out / "dataset.json").exists()
    prepare(out, source, shard_mb=SHARD_MB)
    assert sorted(p.stat().st_ino for p in out.glob("*.arrayrecord")) == made


def test_other_options_or_sources_are_refused(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: prepare(out, source))
    (new := Path(source, "cat", "new.jpg")).write_bytes(make_image(1))
    with pytest.raises(PrepareError, match="the source has changed"):
        prepare(out, source)
    new.unlink()
    for _ in range(2):
        with pytest.raises(PrepareError, match=r"--holdout was 0.0 and is 0.5\. Use t"):
            prepare(out, source, holdout=0.5)
        prepare(out, source, max_bad="5", workers=3)  # These two decide nothing.


def test_a_mistake_leaves_nothing_behind(source, tmp_path, monkeypatch):
    out = tmp_path / "a" / "out"
    assert "does not exist; name a file" in refusal(out, f"{tmp_path}/nothing.tar")
    # Found when the source was read, before any shard.
    other = write(tmp_path / "other", {"val/1.jpg": make_image(1)})
    refusal(out, source, f"validation={other}")
    assert not out.exists()
    # What a kill has left of a lock is in nobody's way.
    out.mkdir(parents=True)
    (out / ".lock").touch()
    interrupted(monkeypatch, lambda: prepare(out, source), AT_FIRST_SHARD)
    # Before the first shard, there is nothing to lose.
    Path(source, "cat", "new.jpg").write_bytes(make_image(1))
    assert prepare(out, source, holdout=0.5)["options"]["holdout"] == 0.5
    (tmp_path / "thesis.tex").touch()
    assert "is a file" in refusal(tmp_path / "thesis.tex", source)
    said = refusal(tmp_path, source)
    assert "holds 'a' and is not a prepared folder" in said
    assert not (tmp_path / ".prepare").exists()


def test_two_at_a_time_are_refused(source, tmp_path):
    in_use = pytest.raises(FolderInUseError, match="out is in use by process")
    with FolderLock(run_folder(tmp_path / "out")), in_use:
        prepare(tmp_path / "out", source)
    prepare(tmp_path / "out", source)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def count_one_more(path):
    note = json.loads(path.read_text())
    note["shard"]["examples"] ^= 1
    path.write_text(json.dumps(note))


NOTE, SHARD = "train-00001.json", "train-00001.arrayrecord"


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (NOTE, cut, "its note is damaged: Expecting"),
        (NOTE, count_one_more, "records, and its note says"),
        (SHARD, flip, "another hash"),
        (SHARD, Path.unlink, "it is gone"),
    ],
)
def test_a_damaged_shard_or_note_is_made_again_and_said(
    source, tmp_path, monkeypatch, name, damage, said
):
    heard, whole, out = [], tmp_path / "whole", tmp_path / "out"
    settings = {"shard_mb": SHARD_MB, "on_progress": lambda what, _: heard.append(what)}
    prepare(whole, source, **settings)
    interrupted(monkeypatch, lambda: prepare(out, source, **settings))
    damage(path := out / ".prepare" / name)
    if said == "another hash":  # One that is in its place already is compared, too.
        path.rename(out / next(whole.glob("train-00001-*")).name)
    prepare(out, source, **settings)
    assert contents(out) == contents(whole)
    (again,) = [what for what in heard if "again" in what]
    assert again.startswith("making shard 1 of train again (") and said in again


def test_a_damaged_plan_is_refused_or_made_anew(source, tmp_path, monkeypatch):
    def make(name):
        return prepare(tmp_path / name, source, shard_mb=SHARD_MB)

    make("whole")
    interrupted(monkeypatch, lambda: make("early"), AT_FIRST_SHARD)
    flip(tmp_path / "early/.prepare/plan.json")
    make("early")
    assert contents(tmp_path / "early") == contents(tmp_path / "whole")
    interrupted(monkeypatch, lambda: make("late"))
    before = contents(tmp_path / "late")
    flip(tmp_path / "late/.prepare/plan.json")
    with pytest.raises(PrepareError, match=r"plan.json is damaged: .* so remove --out"):
        make("late")
    del before[".prepare/plan.json"]
    assert before.items() <= contents(tmp_path / "late").items()


BAD = {
    "cat/empty.jpg": (b"", "empty file"),
    "cat/cut.jpg": (make_image(0)[:-10], "truncated"),
    "cat/cut.png": (make_image(0, ".png")[:-40], "truncated"),
    "cat/cut.ppm": (make_image(0, ".ppm")[:-40], "truncated"),
    "cat/page.jpg": (b"<html>", "no JPEG, PNG, WebP, BMP, GIF or PPM: convert it to o"),
    "loose.jpg": (make_image(0), "in no class folder"),
}


def test_bad_images_are_skipped_counted_and_named(tmp_path):
    files = {**{name: content for name, (content, _) in BAD.items()}, **FILES}
    path, out = write(tmp_path / "x.tar.xz", files), tmp_path / "out"
    for max_bad, message in (
        *((few, "--max-bad=6 or") for few in ("5", "33%")),  # 33 % are 5.9 of 18.
        *((none, "is neither a number") for none in ("", "1.5", "101%", "nan%")),
    ):
        assert message in refusal(out, path, max_bad=max_bad, shard_mb=SHARD_MB)
    info = prepare(out, path, max_bad="34%", shard_mb=SHARD_MB)
    assert [record["name"] for record in records(out, "train")] == [*FILES]
    skipped = info["skipped"]
    assert skipped["count"] == 6 and skipped["reasons"]["truncated"] == 3
    found = {bad["name"]: bad["reason"] for bad in skipped["first"]}
    assert found.keys() == BAD.keys()
    assert all(found[name].startswith(reason) for name, (_, reason) in BAD.items())
    for split, of in info["splits"].items():
        labels = [record["label"] for record in records(out, split)]
        assert of["of_class"] == [labels.count(0), labels.count(1)] == [6, 6]


KINDS = ["", ".tar.gz", ".zip"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_one_by_its_name_or_its_content(tmp_path, kind):
    files = {"ant/0.jpg?size=large": make_image(0), "ant/1.JPE": make_image(1)}
    files |= {"cat/2.jfif": make_image(2), "cat/3.ppm": make_image(3, ".ppm")}
    files |= {"cat/4f7a": make_image(4), "cat/5.php": make_image(5, ".png")}
    info = prepare(tmp_path / "out", write(tmp_path / f"x{kind}", files))
    found = {
        record["name"]: record["image"] for record in records(tmp_path / "out", "train")
    }
    assert found == files and info["notes"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_files_and_folders_without_an_image_are_counted_by_kind(tmp_path, kind):
    others = ("ant/list", "cat/a.txt", "cat/b.TXT", "fish/x.csv")
    folder = {".zip": {"dog/": b""}, ".tar.gz": {"dog": member("dog", tarfile.DIRTYPE)}}
    files = {**FILES, **dict.fromkeys(others, b"no image"), **folder.get(kind, {})}
    source = write(tmp_path / f"x{kind}", files)
    if not kind:
        Path(source, "dog/young").mkdir(parents=True)
    assert prepare(tmp_path / "out", source)["notes"] == [
        "left out, as no images: 1 without an ending (such as train: ant/list), 2 .txt "
        "(such as train: cat/a.txt), 1 .csv (such as train: fish/x.csv), 2 folders "
        "without an image (such as train: dog)"
    ]


def test_too_many_open_files_make_no_image_bad(source, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        prepare(tmp_path / "out", source, max_bad="100%")


def test_images_of_an_unknown_class_are_bad(source, tmp_path):
    few = {"bee/1.jpg": make_image(1), "cat/2.jpg": make_image(2)}
    sources = source, f"validation={write(tmp_path / 'other', few)}"
    said = refusal(tmp_path / "out", *sources)
    assert said.endswith("or leave such images out with --max-bad=1")
    info = prepare(tmp_path / "out", *sources, max_bad="1")
    assert info["skipped"]["first"] == [
        {"split": "validation", "name": "bee/1.jpg", "reason": "of unknown class"}
    ]
    assert info["splits"]["validation"]["of_class"] == [0, 1]


def test_a_name_that_is_there_twice_is_bad(tmp_path):
    # As after `tar --append` with a newer version of a file.
    path = write(tmp_path / "x.tar", {**FILES, "./cat/000.jpg": make_image(99)})
    message = refusal(tmp_path / "out", path)
    assert "train: 'cat/000.jpg' (twice in the source)" in message
    prepare(tmp_path / "out", path, max_bad="1")
    images = {r["name"]: r["image"] for r in records(tmp_path / "out", "train")}
    assert images == FILES


def test_a_split_without_a_good_image_is_refused(tmp_path):
    source = write(tmp_path / "x", {"cat/1.jpg": b"", "ant/1.jpg": b""})
    said = refusal(tmp_path / "out", source, max_bad="2")
    assert "no image is left for split 'train'" in said
    of_others = {"cat.rar": b"", "ant.rar": b"", "README": b""}
    said = refusal(tmp_path / "out3", write(tmp_path / "x.tar", of_others))
    assert "where there are 2 .rar, 1 without an ending; unpack" in said


def test_what_is_held_out_goes_by_the_hash_of_names_alone(source, tmp_path):
    prepare(tmp_path / "out", source, holdout=0.4)
    hashes = {n: int(hashlib.sha256(n.encode()).hexdigest()[:16], 16) for n in FILES}
    for split, is_held_out in (("train", False), ("validation", True)):
        names = [record["name"] for record in records(tmp_path / "out", split)]
        expected = [n for n in FILES if (hashes[n] < 0.4 * 2**64) == is_held_out]
        assert names == sorted(expected) != []


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["train="], {}, "'train=' names no source"),
        (["a", "validation=b"], {"holdout": 0.1}, "makes a validation split, and one"),
        (["test=a"], {"holdout": 0.1}, "needs a train split"),
        (["./x=y"], {}, "'x=y' does not exist; name a file"),
        (["a"], {"holdout": 1.0}, "--holdout=1.0"),
        (["a"], {"workers": -1}, "--workers=-1"),
        (["a"], {"shard_mb": 0.0}, "--shard-mb"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path, arguments, settings, message
):
    assert message in refusal(tmp_path / "out", *arguments, **settings)
