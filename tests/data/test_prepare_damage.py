"""What a disk does to a folder that is not finished: seen, said and made again."""

import json

import pytest
from prepare_cases import class_folders, contents, write_folder

from echo_jax.data.prepare import (
    PrepareError,
    Settings,
    TextSettings,
    prepare_images,
    prepare_text,
    workspace,
)

SHARD_MB = 1200 / 2**20
NOTE, SHARD = "train-00001.json", "train-00001.arrayrecord"


@pytest.fixture
def source(tmp_path):
    return write_folder(tmp_path / "source", class_folders(10))


def _interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def stopped(monkeypatch, out, prepare, before="publish"):
    """Stops a command before it puts everything in its place."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(workspace.Workspace, before, _interrupt)
        prepare(out)
    return out / ".prepare"


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-20])


def count_one_more(path):
    """Changes a note as one bit of a digit does."""
    content = path.read_text()
    shard = json.loads(content)["shard"]["examples"]
    changed = content.replace(f'"examples": {shard}', f'"examples": {shard ^ 1}')
    assert changed != content
    path.write_text(changed)


def count_without_a_checksum(path):
    """Changes a note of an earlier version, which has none."""
    content = json.loads(path.read_text())
    content.pop("crc32")
    content["shard"]["examples"] += 1
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (NOTE, count_one_more, "its note is damaged: it does not have the checksum"),
        (NOTE, cut, "its note is damaged"),
        (NOTE, count_without_a_checksum, "records, and its note says"),
        (SHARD, flip, "it has another hash than its note says"),
        (SHARD, cut, "it has another hash than its note says"),
        (SHARD, lambda path: path.unlink(), "it is gone"),
    ],
)
def test_a_damaged_shard_or_note_is_made_again_and_said(
    source, tmp_path, monkeypatch, name, damage, said
):
    heard = []

    def prepare(out):
        settings = {"shard_mb": SHARD_MB, "on_progress": lambda what, _: told(what)}
        prepare_images([source], Settings(out=out, **settings))

    told = heard.append
    prepare(tmp_path / "whole")
    out = tmp_path / "out"
    work = stopped(monkeypatch, out, prepare)
    assert len([*work.glob("*.arrayrecord")]) > 2
    damage(work / name)
    heard.clear()
    prepare(out)
    assert contents(out) == contents(tmp_path / "whole")
    (again,) = [what for what in heard if "again" in what]
    assert again.startswith("making shard 1 of train again (") and said in again


def test_a_shard_that_is_in_its_place_is_compared_too(source, tmp_path, monkeypatch):
    def prepare(out):
        prepare_images([source], Settings(out=out, shard_mb=SHARD_MB))

    prepare(tmp_path / "whole")
    out = tmp_path / "out"
    work = stopped(monkeypatch, out, prepare)
    flip(work / SHARD)
    (whole,) = (tmp_path / "whole").glob("train-00001-*")
    (work / SHARD).rename(out / whole.name)
    prepare(out)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("damage", [flip, cut])
def test_a_damaged_plan_is_refused_or_made_anew(source, tmp_path, monkeypatch, damage):
    def prepare(out):
        prepare_images([source], Settings(out=out, shard_mb=SHARD_MB))

    prepare(tmp_path / "whole")
    # Before the first shard, there is nothing to lose.
    out = tmp_path / "early"
    damage(stopped(monkeypatch, out, prepare, before="write_shard") / "plan.json")
    prepare(out)
    assert contents(out) == contents(tmp_path / "whole")
    out = tmp_path / "late"
    work = stopped(monkeypatch, out, prepare)
    before = contents(work)
    damage(work / "plan.json")
    with pytest.raises(PrepareError, match=r"plan.json is damaged: .* so remove --out"):
        prepare(out)
    del before["plan.json"]
    assert before.items() <= contents(work).items()


@pytest.mark.parametrize(
    ("name", "damage"),
    [("tokenizer.model", flip), ("tokenizer.model.json", cut), (NOTE, count_one_more)],
)
def test_damaged_subwords_and_tokens_are_made_again(
    tmp_path, monkeypatch, name, damage
):
    (tmp_path / "a.txt").write_text("the cat sat on a mat, and ate the hat\n" * 60)
    text = TextSettings(vocab=280, block=16)

    def prepare(out):
        settings = Settings(out=out, shard_mb=0.0003)
        prepare_text([f"{tmp_path}/a.txt"], settings, text)

    prepare(tmp_path / "whole")
    out = tmp_path / "out"
    damage(stopped(monkeypatch, out, prepare) / name)
    prepare(out)
    assert contents(out) == contents(tmp_path / "whole")
