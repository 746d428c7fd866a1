"""The reader of prepared folders: exact, and strict about what it reads."""

import hashlib
import json
import os
import pickle
import resource
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from prepare_cases import class_folders, prepare, write

from echo_jax.data.sources import (
    PreparedError,
    open_prepared,
    open_source,
    pack,
    read_info,
    unpack,
    verify,
)

FILES = class_folders(10)


@pytest.fixture
def folder(tmp_path):
    """Several shards, of a few hundred bytes each."""
    prepare(tmp_path / "out", write(tmp_path / "source", FILES), shard_mb=0.001)
    return tmp_path / "out"


def change(folder, edit):
    path = folder / "dataset.json"
    info = json.loads(path.read_text())
    edit(info)
    path.write_text(json.dumps(info))


def test_records_are_read_by_any_index_from_any_thread_and_process(folder):
    prepared = open_prepared(folder, "train")
    assert len(prepared) == 10 and len(prepared.info["splits"]["train"]["shards"]) > 1
    expected = [(name, FILES[name]) for name in sorted(FILES)]
    for index in [9, 0, 5, np.int64(3), np.uint8(9)]:
        record = unpack(prepared[index])
        assert (record["name"], record["image"]) == expected[index]
    for index in (-1, 10, 2**40):
        with pytest.raises(IndexError, match=f"record {index} of 10 in split 'train'"):
            prepared[index]
    every = [*prepared]
    assert [unpack(record)["name"] for record in every] == sorted(FILES)
    again = pickle.loads(pickled := pickle.dumps(prepared))
    assert len(pickled) < 300 and again.info == prepared.info
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(again.__getitem__, [*range(10)] * 20)] == every * 20


def test_of_many_shards_a_quarter_of_the_limit_is_open(folder, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8, 8))
    open_before = len(os.listdir("/proc/self/fd"))
    prepared = open_prepared(folder, "train")
    for read in (prepared, pickle.loads(pickle.dumps(prepared))):
        assert [unpack(record)["name"] for record in read] == sorted(FILES)
    assert len(prepared.info["splits"]["train"]["shards"]) > 4
    assert 0 < len(os.listdir("/proc/self/fd")) - open_before <= 2 * 2


def test_too_many_open_files_are_no_damage(folder):
    prepared = open_prepared(folder, "train")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(PreparedError) as caught:
            prepared[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert "too many files are open, of at most 3: raise the limit" in str(caught.value)
    assert "ulimit -n" in str(caught.value) and "again" not in str(caught.value)


@pytest.mark.parametrize("missing", ["nowhere", "dataset.json/below", "empty"])
def test_a_missing_or_unfinished_folder_is_refused(folder, missing):
    (folder / "empty").mkdir()
    with pytest.raises(
        PreparedError, match=r"is not a prepared folder: it has no data"
    ):
        read_info(folder / missing)
    with pytest.raises(PreparedError, match="no split 'test'; it has train"):
        open_prepared(folder, "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged: Expecting"),
        (b'{"format": 2}', "has format 2; this version reads 1"),
        (b'{"format": 1}', "is damaged: KeyError"),
        (b'{"format": 1, "kind": "films", "splits": {}}', "kind 'films' is none of"),
    ],
)
def test_another_dataset_json_is_refused(folder, content, message):
    (folder / "dataset.json").write_bytes(content)
    with pytest.raises(PreparedError, match=message):
        read_info(folder)


def test_what_a_disk_changes_is_seen(folder):
    whole = [*open_prepared(folder, "train")]
    shards = sorted(folder.glob("*.arrayrecord"))
    assert verify(folder) == len(shards)
    first, content = shards[0], shards[0].read_bytes()
    at = content.index(whole[0][-40:])
    first.write_bytes(content[:at] + b"\0" + content[at + 1 :])
    with pytest.raises(PreparedError, match=r"record 0 in split 'train' of .* verify"):
        open_prepared(folder, "train")[0]
    first.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    open_prepared(folder, "train")
    with pytest.raises(PreparedError, match=f"{first.name}' has the hash"):
        verify(folder)
    first.write_bytes(content[:-1])
    with pytest.raises(PreparedError, match=f"{first.name}' is .* bytes long; it was"):
        open_prepared(folder, "train")
    first.unlink()
    with pytest.raises(PreparedError, match=f"{first.name}' is missing; it was writ"):
        open_prepared(folder, "train")


def test_a_file_beside_the_shards_is_what_was_written(folder):
    content = b"subwords"
    (folder / "tokenizer.model").write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    about = {"file": "tokenizer.model", "bytes": len(content), "sha256": digest}
    change(folder, lambda info: info.update(files=[about]))
    prepared = open_prepared(folder, "train")
    assert prepared.read_file("tokenizer.model") == content
    with pytest.raises(PreparedError, match=r"has no file '\.\./source/cat/000.jpg'"):
        prepared.read_file("../source/cat/000.jpg")
    (folder / "tokenizer.model").write_bytes(b"subwordt")
    with pytest.raises(PreparedError, match=r"tokenizer\.model' has the hash"):
        open_prepared(folder, "train").read_file("tokenizer.model")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", ""])
def test_a_shard_outside_of_the_folder_is_refused(folder, name):
    change(folder, lambda i: i["splits"]["train"]["shards"][0].update(file=name))
    with pytest.raises(PreparedError, match="lies outside of the folder"):
        open_prepared(folder, "train")


def test_counts_that_differ_are_refused(folder):
    change(folder, lambda info: info["splits"]["train"].update(examples=11))
    with pytest.raises(PreparedError, match="shards hold 10 of 11"):
        open_prepared(folder, "train")

    def count_one_more(info):  # As a version that believed a damaged note has done.
        info["splits"]["train"]["shards"][1]["examples"] += 1

    change(folder, count_one_more)
    assert len(open_prepared(folder, "train")) == 11
    with pytest.raises(
        PreparedError, match=r"holds \d records, and dataset\.json says"
    ):
        verify(folder)


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        pack({"a": 1}) + b"x",
        *map(msgpack.packb, (3, {"a": [1]}, {"a": {"b": 1}}, {"a": True}, {b"a": 2})),
        msgpack.packb({"a": msgpack.ExtType(1, b"x")}),
        msgpack.packb({str(key): key for key in range(65)}),
        b"\x81\xa1a\xc6\xff\xff\xff\xff",  # Says that it has 2**32 - 1 bytes.
        b"\x91" * 5000,
        b"\x81\xa1a\xa1\xff",
    ],
    ids=range(13),
)
def test_what_is_no_record_is_refused(record):
    with pytest.raises(ValueError, match=r"record"):
        unpack(record)
    entries = {"a": 2**63 - 1, "b": b"\x00\xff", "c": 1.5, "d": "é", "e": -1}
    assert unpack(pack(entries)) == entries


OTHERS = {"image": [1, "x"], "label": [b"x", 1.0, -1, 2**31, 2**63], "name": [1, b"x"]}


def test_a_record_that_lacks_an_entry_or_has_another_type_is_refused(folder):
    opened, decode = open_source(str(folder), "train", "images")
    entries = unpack(opened[0])
    assert decode(opened[0]) == entries and entries.keys() == OTHERS.keys()
    for name in OTHERS:
        less = {other: entries[other] for other in entries if other != name}
        with pytest.raises(ValueError, match=f"has no {name}. .*echo-jax prepare"):
            decode(pack(less))
        for other in OTHERS[name]:
            with pytest.raises(ValueError, match=f"record .* has '{name}'"):
                decode(pack(entries | {name: other}))
