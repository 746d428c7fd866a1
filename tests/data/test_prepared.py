"""The reader of prepared folders: exact, and strict about what it reads."""

import hashlib
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest
from prepare_cases import class_folders, write_folder

from echo_jax.data.prepare import Settings, prepare_images
from echo_jax.data.sources.entries import DecodeRecord
from echo_jax.data.sources.prepared import (
    PreparedError,
    open_prepared,
    pack,
    read_info,
    unpack,
    verify,
)
from echo_jax.files.json_files import seal, unseal

FILES = class_folders(10)


@pytest.fixture
def folder(tmp_path):
    source = write_folder(tmp_path / "source", FILES)
    out = tmp_path / "out"
    # Several shards, of a few hundred bytes each.
    prepare_images([source], Settings(out=out, shard_mb=0.001))
    return out


def change(folder, edit):
    path = folder / "dataset.json"
    info = unseal(json.loads(path.read_text()))
    edit(info)
    path.write_text(json.dumps(seal(info)))


def test_records_are_read_by_any_index_in_any_order(folder):
    prepared = open_prepared(folder, "train")
    names = sorted(FILES)
    assert len(prepared) == 10 and len(prepared.info["splits"]["train"]["shards"]) > 1
    for index in [9, 0, 5, np.int64(3), np.uint8(9)]:
        record = unpack(prepared[index])
        assert record["name"] == names[index]
        assert record["image"] == FILES[names[index]]


@pytest.mark.parametrize("index", [-1, 10, 2**40])
def test_an_index_outside_is_an_error(folder, index):
    with pytest.raises(IndexError, match=f"record {index} of 10 in split 'train'"):
        open_prepared(folder, "train")[index]


def test_iteration_ends(folder):
    assert len([*open_prepared(folder, "train")]) == 10


def test_it_pickles_as_a_path(folder):
    prepared = open_prepared(folder, "train")
    pickled = pickle.dumps(prepared)
    again = pickle.loads(pickled)
    assert len(pickled) < 300
    assert [*again] == [*prepared] and again.info == prepared.info


def test_threads_read_the_same(folder):
    prepared = open_prepared(folder, "train")
    with ThreadPoolExecutor(8) as pool:
        read = [*pool.map(prepared.__getitem__, [*range(10)] * 20)]
    assert read == [*open_prepared(folder, "train")] * 20


def test_facts_name_the_content(folder, tmp_path):
    metadata = open_prepared(folder, "train").metadata()
    assert metadata == {
        "source": str(folder),
        "kind": "images",
        "split": "train",
        "examples": 10,
        "sha256": metadata["sha256"],
    }
    other = tmp_path / "other"
    source = write_folder(tmp_path / "less", class_folders(9))
    prepare_images([source], Settings(out=other))
    assert open_prepared(other, "train").metadata()["sha256"] != metadata["sha256"]


def test_an_unfinished_folder_is_refused(folder):
    (folder / "dataset.json").unlink()
    with pytest.raises(
        PreparedError, match=r"has no dataset\.json, which is written l"
    ):
        open_prepared(folder, "train")


@pytest.mark.parametrize("missing", ["nowhere", "dataset.json/below"])
def test_a_missing_folder_is_refused(folder, missing):
    with pytest.raises(PreparedError, match="is no prepared folder"):
        read_info(folder / missing)


def test_an_unknown_split_is_refused_with_those_there_are(folder):
    with pytest.raises(PreparedError, match="no split 'test'; it has train"):
        open_prepared(folder, "test")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is damaged: Expecting"),
        (b'{"format": "\xff"}', "is damaged: .* codec can"),
        (b"[]", "is damaged: it holds a JSON list"),
        (b'{"format": 2}', "has format 2; this version reads 1"),
        (b'{"format": 1, "crc32": "00000000"}', "is damaged: it does not have the che"),
        (b'{"format": 1}', "is damaged: KeyError"),
        (b'{"format": 1, "kind": "films", "splits": {}}', "kind 'films' is none of"),
        (b'{"format": 1, "kind": "text", "splits": []}', "is damaged"),
    ],
)
def test_another_dataset_json_is_refused(folder, content, message):
    (folder / "dataset.json").write_bytes(content)
    with pytest.raises(PreparedError, match=message):
        read_info(folder)


def test_a_dataset_json_that_is_no_file_is_refused(folder):
    (folder / "dataset.json").unlink()
    os.mkfifo(folder / "dataset.json")  # Whoever opens it waits for ever.
    with pytest.raises(PreparedError, match="is a named pipe where a file belongs"):
        read_info(folder)


def test_a_changed_count_is_seen(folder):
    path = folder / "dataset.json"
    path.write_text(path.read_text().replace('"label"', '"lebal"'))
    with pytest.raises(PreparedError, match="is damaged: it does not have the checks"):
        open_prepared(folder, "train")


def test_a_damaged_record_is_found_when_it_is_read(folder):
    whole = [*open_prepared(folder, "train")]
    shard = min(folder.glob("*.arrayrecord"))
    content = shard.read_bytes()
    at = content.index(whole[0][-40:])
    shard.write_bytes(content[:at] + b"\0" + content[at + 1 :])
    with pytest.raises(PreparedError, match=r"record 0 in split 'train' of .* verify"):
        open_prepared(folder, "train")[0]


def test_a_missing_shard_is_refused(folder):
    shard = sorted(folder.glob("*.arrayrecord"))[1]
    shard.unlink()
    with pytest.raises(PreparedError, match=f"{shard.name}' is missing; it was writ"):
        open_prepared(folder, "train")


def test_a_shard_of_another_size_is_refused(folder):
    shard = min(folder.glob("*.arrayrecord"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(PreparedError, match=f"{shard.name}' is .* bytes long; it was"):
        open_prepared(folder, "train")


def test_verify_counts_the_records_of_shards(folder):
    """As a version that believed a damaged note has published them."""

    def count_one_more(info):
        split = info["splits"]["train"]
        split["examples"] += 1
        split["shards"][1]["examples"] += 1

    change(folder, count_one_more)
    assert len(open_prepared(folder, "train")) == 11
    with pytest.raises(
        PreparedError, match=r"holds \d records, and dataset\.json says"
    ):
        verify(folder)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_shard_that_leads_elsewhere_is_refused(folder, tmp_path, kind):
    shard = min(folder.glob("*.arrayrecord"))
    mine = tmp_path / "mine"
    shard.rename(mine)
    if kind == "pipe":
        os.mkfifo(shard)  # Whoever opens it waits for ever.
    else:
        shard.symlink_to(mine)
    for read in (verify, lambda folder: open_prepared(folder, "train")[0]):
        with pytest.raises(PreparedError, match=r"is a (link|named pipe) where a file"):
            read(folder)


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


def test_verify_finds_a_changed_byte(folder):
    assert verify(folder) == len([*folder.glob("*.arrayrecord")])
    shard = max(folder.glob("*.arrayrecord"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    open_prepared(folder, "train")
    with pytest.raises(PreparedError, match=f"{shard.name}' has the hash"):
        verify(folder)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".hidden", ""])
def test_a_shard_outside_of_the_folder_is_refused(folder, name):
    change(folder, lambda i: i["splits"]["train"]["shards"][0].update(file=name))
    with pytest.raises(PreparedError, match="lies outside of the folder"):
        open_prepared(folder, "train")


def test_counts_that_differ_are_refused(folder):
    change(folder, lambda info: info["splits"]["train"].update(examples=11))
    with pytest.raises(PreparedError, match="shards hold 10 of 11"):
        open_prepared(folder, "train")


def test_packed_entries_come_back():
    entries = {"a": 2**63 - 1, "b": b"\x00\xff", "c": 1.5, "d": "é", "e": -1}
    assert unpack(pack(entries)) == entries


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\xc1",
        pack({"a": b"1234"})[:-1],
        pack({"a": 1}) + b"x",
        msgpack.packb([1]),
        msgpack.packb(3),
        msgpack.packb({"a": [1]}),
        msgpack.packb({"a": {"b": 1}}),
        msgpack.packb({"a": None}),
        msgpack.packb({"a": True}),
        msgpack.packb({1: 2}),
        msgpack.packb({b"a": 2}),
        msgpack.packb({"a": msgpack.ExtType(1, b"x")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        msgpack.packb({str(key): key for key in range(65)}),
        # Says that it has 2**32 - 1 bytes.
        b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x91" * 5000,
        b"\x81\xa1a\xa1\xff",
    ],
)
def test_what_is_no_record_is_refused(record):
    with pytest.raises(ValueError, match=r"record"):
        unpack(record)


RECORDS = {
    "images": {"image": b"JPEG", "label": 3, "name": "cat/1.jpg"},
    "coco": {
        **dict.fromkeys(["image_id", "height", "width"], 5),
        **dict.fromkeys(["image", "boxes", "labels", "crowd", "area"], b""),
    },
    "text": {"tokens": b"abc"},
}
OTHERS = {bytes: [1, "x"], int: [b"x", 1.0, -1, 2**63], str: [1, b"x"]}
ENTRIES_OF_KINDS = [(kind, name) for kind, record in RECORDS.items() for name in record]


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_becomes_the_dict_of_its_kind(kind):
    assert DecodeRecord(kind)(pack(RECORDS[kind])) == RECORDS[kind]


@pytest.mark.parametrize(("kind", "name"), ENTRIES_OF_KINDS)
def test_a_record_that_lacks_an_entry_or_has_another_type_is_refused(kind, name):
    record = dict(RECORDS[kind])
    record[name + "_"] = value = record.pop(name)
    with pytest.raises(ValueError, match=f"bytes has no {name}. .*echo-jax prepare"):
        DecodeRecord(kind)(pack(record))
    for other in OTHERS[type(value)]:
        with pytest.raises(ValueError, match=f"record .* has '{name}'"):
            DecodeRecord(kind)(pack(RECORDS[kind] | {name: other}))


def test_a_label_that_no_array_of_labels_can_hold_is_refused():
    record = RECORDS["images"] | {"label": 2**31}
    with pytest.raises(ValueError, match=r"'label' 2147483648, outside of \[0, 21474"):
        DecodeRecord("images")(pack(record))
