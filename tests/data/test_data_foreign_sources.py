"""Data of others: the same records from every format, and what is refused."""

import io
import itertools
import json
import os
import pickle
import shutil
import sys
import tarfile
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from slow_cases import slow_but_for

from echo_jax.config import load_config
from echo_jax.config.saved import read_config, refuse_code
from echo_jax.data.sources import wds
from echo_jax.data.sources.prepared import pack
from echo_jax.data.sources.shard_files import find_shards, shards_metadata
from echo_jax.data.sources.source import open_source
from echo_jax.data.text.sequences import open_sequences
from echo_jax.echo.spec import EchoSpec
from echo_jax.files.folders import run_folder
from echo_jax.inference.evaluate import evaluate_run
from echo_jax.inference.run import load_run
from echo_jax.runs import run_train
from echo_jax.workloads import build

CLASSES = ["cat", "dög", "fish"]
SIZES = {"train": 30, "validation": 12}


def image(split, i):
    shape = (32, 32, 3)
    pixels = np.random.default_rng([i, len(split)]).integers(0, 256, shape, np.uint8)
    return cv2.imencode(".png", pixels)[1].tobytes()


IMAGES = {
    split: [
        {"image": image(split, i), "label": i % 3, "name": f"{split}/{i:03}.png"}
        for i in range(size)
    ]
    for split, size in SIZES.items()
}
TEXTS = {
    split: [{"text": f"{split} says {i}: Größe".encode()} for i in range(size)]
    for split, size in SIZES.items()
}
OF_KIND = {"images": IMAGES, "text": TEXTS}


class Examples:
    """What a user would write."""

    splits = ("train", "validation")
    kind = "images"

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return SIZES[self.split]

    def __getitem__(self, index):
        return dict(OF_KIND[self.kind][self.split][index])

    def metadata(self):
        return {"version": 3}


class Images(Examples):
    classes = CLASSES


class Texts(Examples):
    kind = "text"


class WrongLabel(Images):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "label": 3}


class NumpyLabel(Images):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "label": np.int64(1)}


class Empty(Images):
    def __len__(self):
        return 0


def write_tar(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def members_of(kind, example, i):
    if kind == "text":
        return [(f"{i:03}.txt", example["text"])]
    label = str(example["label"]).encode()
    json_ = (example["name"].replace("png", "json"), b"{}")
    return [(example["name"], example["image"]), json_, (json_[0][:-4] + "cls", label)]


def write_wds(folder, kind):
    """Two archives for each split."""
    for split, examples in OF_KIND[kind].items():
        half = len(examples) // 2
        for shard, part in enumerate((examples[:half], examples[half:])):
            members = [
                member
                for i, example in enumerate(part)
                for member in members_of(kind, example, i)
            ]
            write_tar(folder / f"{split}-{shard:03}.tar", members)
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return f"wds:{folder}"


def write_array_record(folder, kind):
    for split, examples in OF_KIND[kind].items():
        writer = ArrayRecordWriter(
            str(folder / f"{split}.array_record"), "group_size:1"
        )
        for example in examples:
            writer.write(pack(example) if kind == "images" else example["text"])
        writer.close()
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return f"arrayrecord:{folder}"


def hugging_face(kind):
    datasets = pytest.importorskip("datasets", reason="pip install 'echo-jax[hf]'")
    splits = {}
    for split, examples in OF_KIND[kind].items():
        if kind == "text":
            rows = {"text": [example["text"].decode() for example in examples]}
            features = datasets.Features(text=datasets.Value("string"))
        else:
            named = [{"bytes": e["image"], "path": e["name"]} for e in examples]
            rows = {"photo": named, "kind": [e["label"] for e in examples]}
            features = datasets.Features(
                photo=datasets.Image(), kind=datasets.ClassLabel(names=CLASSES)
            )
        splits[split] = datasets.Dataset.from_dict(rows, features=features)
    return datasets.DatasetDict(splits)


def write_hf(folder, kind):
    hugging_face(kind).save_to_disk(str(folder / "saved"))
    return f"hf:{folder / 'saved'}"


def write_parquet(folder, kind):
    for split, data in hugging_face(kind).items():
        data.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
    return f"hf:{folder}"


def write_cache(folder, kind):
    """What the cache holds after a dataset was loaded by its name."""
    datasets = pytest.importorskip("datasets", reason="pip install 'echo-jax[hf]'")
    name = f"echo-jax/{kind}"
    for split, data in hugging_face(kind).items():
        data.to_parquet(str(folder / f"{split}.parquet"))
    files = {split: str(folder / f"{split}.parquet") for split in SIZES}
    cached = f"{os.environ['HF_HOME']}/datasets"
    builder = datasets.load_dataset_builder(
        "parquet", data_files=files, cache_dir=str(folder)
    )
    builder.download_and_prepare()
    made = Path(builder.cache_dir)
    copy = Path(cached) / f"echo-jax___{kind}/default/0.0.0" / made.name
    shutil.copytree(made, copy)
    info = json.loads((copy / "dataset_info.json").read_text())
    info.update(dataset_name=kind, config_name="default")
    (copy / "dataset_info.json").write_text(json.dumps(info))
    for path in copy.glob("parquet-*.arrow"):
        path.rename(copy / path.name.replace("parquet", kind, 1))
    return f"hf:{name}"


def write_python(folder, kind):
    del folder
    return f"python:{__name__}:{'Images' if kind == 'images' else 'Texts'}"


FORMATS = {
    "wds": write_wds,
    "arrayrecord": write_array_record,
    "hf": write_hf,
    "parquet": write_parquet,
    "cache": write_cache,
    "python": write_python,
}


@pytest.fixture(scope="module", autouse=True)
def hub_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def source_of(tmp_path_factory):
    """Writes the examples of a kind in a format, once."""
    made = {}

    def make(name, kind):
        if (name, kind) not in made:
            folder = tmp_path_factory.mktemp(f"{name}_{kind}")
            made[name, kind] = FORMATS[name](folder, kind)
        return made[name, kind]

    return make


@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.parametrize("name", FORMATS)
def test_records_are_what_was_written(source_of, name, kind):
    source = source_of(name, kind)
    for split, examples in OF_KIND[kind].items():
        opened = open_source(source, split, kind)
        for records, decode in (opened, pickle.loads(pickle.dumps(opened))):
            assert all(type(records[i]) is bytes for i in range(len(records)))
            found = [decode(records[i]) for i in range(len(records))]
            if name == "hf" and kind == "images":
                # `save_to_disk` leaves folders out of names.
                examples = [{**e, "name": Path(e["name"]).name} for e in examples]
            assert found == examples
            assert records.info["kind"] == kind
            assert records.info["splits"].keys() == SIZES.keys()
            if kind == "images":
                assert records.info["classes"] == CLASSES
            metadata = json.loads(json.dumps(records.metadata()))
            assert metadata["source"] == source and metadata["split"] == split
            assert metadata["examples"] == len(examples)
            assert name == "python" or len(metadata["fingerprint"]) == 64


def config_of(source, **overrides):
    fields = {
        "data.source": source,
        "batch_size": 8,
        "data.eval_examples": 0,
        "model.width": 4,
        "updates": 6,
        "echo.factor": 2.0,
        "echo.order": "spread",
        "echo.buffer": 24,
        "target": 0.0,
        "stop_at_target": False,
        "log_every": 2,
        "eval_every": 6,
        "optim.warmup_updates": 1,
        "dispatch.mode": "loop",
        "mesh.data": 1,
    }
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config("configs/cifar.py:tiny", {**fields, **named})


# The batches of all formats are compared below.
@pytest.mark.parametrize("name", slow_but_for(["wds"], FORMATS))
def test_a_run_trains_with_an_echo(source_of, name, tmp_path, compiled_soon):
    source = source_of(name, "images")
    summary = run_train(config_of(source), tmp_path)
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["workload"]["data"]["train"]["source"] == source
    assert (summary["updates"], summary["fresh"], summary["repeats"]) == (6, 32, 16)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "engine", ["grain", pytest.param("tfdata", marks=pytest.mark.slow)]
)
def test_a_position_is_gone_on_from_to_the_bit(source_of, name, engine):
    """In either engine, and with the batches of the first format."""
    spec = EchoSpec(factor=2, order="spread", buffer=24, batch_size=8)

    def batches(name):
        config = config_of(source_of(name, "images"), data__pipeline=engine)
        return closing(iter(build(config).train_dataset(spec)))

    with batches(name) as first, batches(name) as second, batches("wds") as other:
        for _ in range(3):
            next(first)
        state = first.get_state()
        second.set_state(state)
        rest = itertools.islice(other, 3, 9)
        for one, again, same in zip(
            itertools.islice(first, 6), itertools.islice(second, 6), rest, strict=True
        ):
            for key in one:
                np.testing.assert_array_equal(one[key], again[key])
                np.testing.assert_array_equal(one[key], same[key])


@pytest.mark.parametrize("name", FORMATS)
def test_documents_are_packed(source_of, name):
    text = open_sequences(source_of(name, "text"), seq_len=64, tokenizer="bytes")
    assert bytes(text.decode(text.train[0])["tokens"][1:15].astype(np.uint8)) == (
        b"train says 0: "
    )


def refusal(source, kind="images", split="train"):
    with pytest.raises(ValueError) as caught:
        open_source(source, split, kind)
    return str(caught.value)


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_split_and_another_kind_are_refused(source_of, name):
    said = refusal(source_of(name, "images"), split="extra")
    assert "no split 'extra'; it has train, validation" in said
    assert source_of(name, "images") in refusal(source_of(name, "images"), "coco")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WrongLabel", "has label 3; there are 3 classes"),
        ("NumpyLabel", "has 'label' of type int64; give int"),
        ("Texts", "no classes"),
        ("Empty", "has no example in split 'train'"),
        ("Nothing", "cannot be imported"),
        ("config_of", "is no class with splits"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(name, said):
    assert said in refusal(f"python:{__name__}:{name}")


def test_no_other_code_is_called_by_its_name():
    for name in ("os:system", "shelve:DbfilenameShelf", "subprocess:Popen"):
        assert "is no class with splits" in refusal(f"python:{name}")
    assert "cannot be imported" in refusal("python:nowhere.at.all:Class")


def test_the_config_of_a_run_folder_names_no_code(tmp_path, compiled_soon):
    run_train(config_of(f"python:{__name__}:Images", updates=2), tmp_path)
    with pytest.raises(
        ValueError, match="names code, which is not run for a run folder"
    ):
        refuse_code(read_config(run_folder(tmp_path)))
    run = load_run(tmp_path)  # Its model needs no data.
    with pytest.raises(ValueError, match="names code"):
        evaluate_run(run)
    assert evaluate_run(run, source=f"python:{__name__}:Images").metrics


def one_example(tmp_path, *members):
    write_tar(tmp_path / "train.tar", members)
    return refusal(f"wds:{tmp_path}")


PNG = image("train", 0)


@pytest.mark.parametrize("label", [b"4\n", b"4.0"])
def test_shards_without_a_list_of_classes_count_them(tmp_path, label):
    write_tar(tmp_path / "train.tar", [("a.PNG", PNG), ("a.cls", label)])
    records, decode = open_source(f"wds:{tmp_path}", "train", "images")
    assert records.info["classes"] == ["0", "1", "2", "3", "4"]
    assert decode(records[0]) == {"image": PNG, "label": 4, "name": "a.PNG"}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("a.png", PNG)], "needs .cls, its label"),
        ([("a.cls", b"1")], "needs one of .jpg"),
        ([("a.png", PNG), ("a.cls", b"-1")], "is b'-1'; a label is a number"),
        ([("a.png", PNG), ("a.cls", b"0.5")], "is b'0.5'; a label is a number"),
        ([("a.png", PNG), ("a.cls", b"9" * 16)], "a label is a number from 0"),
        ([("a.png", PNG), ("a.png", PNG)], "two members 'a.png'"),
        ([("../a.png", PNG)], "leads out of the folder"),
        ([("/etc/a.png", PNG)], "leads out of the folder"),
        ([("a\x1b[2J.png", PNG)], "not printable"),
        ([("a" * 2000 + ".png", PNG)], "more than 1024 characters"),
    ],
)
def test_hostile_and_broken_archives_are_refused(tmp_path, members, said):
    found = one_example(tmp_path, *members)
    assert said in found and "\x1b" not in found


def test_archives_that_are_cut_off_are_refused(tmp_path):
    write_tar(tmp_path / "train.tar", [("a.png", PNG), ("a.cls", b"0")])
    whole = (tmp_path / "train.tar").read_bytes()
    records, _ = open_source(f"wds:{tmp_path}", "train", "images")
    # In the content, where the next header would be, in it, and in the end mark.
    header = 512 + -(-len(PNG) // 512) * 512
    for length in (600, header, header + 200, header + 1024 + 100):
        (tmp_path / "train.tar").write_bytes(whole[:length])
        assert "damaged, cut off" in refusal(f"wds:{tmp_path}")
    (tmp_path / "train.tar").write_bytes(whole[:600])
    with pytest.raises(ValueError, match="it was changed while it was read"):
        records[0]


def test_links_in_archives_are_refused(tmp_path):
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        info = tarfile.TarInfo("a.png")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    assert "is a link" in refusal(f"wds:{tmp_path}")


def test_records_say_no_classes_by_themselves(tmp_path):
    source = write_array_record(tmp_path, "images")
    (tmp_path / "classes.txt").unlink()
    assert "says no classes" in refusal(source)
    (tmp_path / "train.array_record").write_bytes(b"no records")
    (tmp_path / "classes.txt").write_text("a\nb\nc")
    assert "cannot be read" in refusal(source)


def test_names_of_classes_are_read_through_no_link(tmp_path):
    """They go into files of a run, which are shown to others."""
    write_tar(tmp_path / "train-0.tar", [("a.jpg", b"\xff\xd8"), ("a.cls", b"0")])
    secret = tmp_path / "credentials"
    secret.write_text("password")
    classes = tmp_path / "classes.txt"
    classes.symlink_to(secret)
    assert "is a link where a file belongs" in refusal(f"wds:{tmp_path}")
    classes.unlink()
    os.mkfifo(classes)  # Whoever opens it waits for ever.
    assert "is a named pipe where a file belongs" in refusal(f"wds:{tmp_path}")


def test_shards_are_found_by_the_words_of_their_names(tmp_path):
    for name in ("train-000.tar", "train-001.tar", "x_val_0.tar"):
        (tmp_path / name).touch()
    folder = str(tmp_path)
    expected = {
        "train": [tmp_path / "train-000.tar", tmp_path / "train-001.tar"],
        "val": [tmp_path / "x_val_0.tar"],
    }
    assert find_shards("", f"{folder}/{{train-000,train-001,x_val_0}}.tar", ".tar") == (
        expected
    )
    assert find_shards("", folder, ".tar") == expected
    assert find_shards("", f"{folder}/*.tar", ".tar") == expected
    assert find_shards("", f"{folder}/train-{{000..001}}.tar", ".tar") == {
        "train": expected["train"]
    }
    for name, said in (
        (f"{folder}/train-{{000..002}}.tar", "there is no file .*train-002.tar"),
        (f"{folder}/train-{{0..999999}}.tar", "more than 100000 files"),
        (f"{folder}/{{0..9999}}{{0..9999}}", "more than 100000 files"),
        (f"{folder}/nothing", "there is no file"),
    ):
        with pytest.raises(ValueError, match=said):
            find_shards("wds:x", name, ".tar")
    (tmp_path / "photos.tar").touch()
    with pytest.raises(ValueError, match=r"photos.tar' is no file .* names one split"):
        find_shards("wds:x", folder, ".tar")


def test_columns_are_named_where_there_are_several(tmp_path):
    datasets = pytest.importorskip("datasets", reason="pip install 'echo-jax[hf]'")
    data = hugging_face("images")["train"]
    data = data.add_column("fine", [0] * len(data))
    data = data.cast_column("fine", datasets.ClassLabel(names=["all"]))
    data.save_to_disk(str(tmp_path / "saved"))
    source = f"hf:{tmp_path / 'saved'}"
    assert "has kind, fine of feature ClassLabel" in refusal(source)
    records, _ = open_source(f"{source}?label=fine", "train", "images")
    assert records.info["classes"] == ["all"]
    assert records.metadata()["columns"] == {"image": "photo", "label": "fine"}
    assert "none called 'x'" in refusal(f"{source}?label=x")
    assert "sets labels; what may follow" in refusal(f"{source}?labels=fine")
    assert "has no column of feature text" in refusal(source, "text")
    assert "cannot be opened" in refusal(f"hf:{tmp_path / 'nothing'}")
    assert "holds no file that ends with .parquet" in refusal(f"hf:{Path(tmp_path)}")


def test_a_package_that_is_missing_is_named_with_the_extra(monkeypatch):
    monkeypatch.delitem(sys.modules, "echo_jax.data.sources.hf", raising=False)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'echo-jax[hf]'" in refusal("hf:anything")


def test_a_run_does_not_go_on_with_other_shards(tmp_path, compiled_soon):
    (tmp_path / "data").mkdir()
    source = write_wds(tmp_path / "data", "images")
    run_train(config_of(source, updates=2), tmp_path / "run")
    shards = sorted((tmp_path / "data").glob("train-*.tar"))
    contents = [shard.read_bytes() for shard in shards]
    assert len({*contents}) == 2
    for shard, content in zip(shards, reversed(contents), strict=True):
        shard.write_bytes(content)
    with pytest.raises(ValueError, match="was trained on other data than those"):
        run_train(config_of(source, updates=4), tmp_path / "run")


def flip(path, byte):
    with path.open("r+b") as file:
        file.seek(byte)
        (before,) = file.read(1)
        file.seek(byte)
        file.write(bytes([before ^ 1]))


def fingerprint_without(path, byte):
    """The fingerprint of a file in which one byte is another."""
    flip(path, byte)
    found = shards_metadata([path])["fingerprint"]
    flip(path, byte)
    return found


def test_a_fingerprint_is_of_what_the_docs_say(tmp_path):
    """16 pieces of 64 KiB, from the first byte to the last; all of 1 MiB."""
    rng = np.random.default_rng(0)
    for mib in (1, 7):
        path = tmp_path / "train.tar"
        size = (mib << 20) + 4 * (mib > 1)
        path.write_bytes(rng.bytes(size))
        whole = shards_metadata([path])["fingerprint"]
        starts = [k * (size - (1 << 16)) // 15 for k in range(16)]
        seen = [byte for at in starts for byte in (at, at + (1 << 16) - 1)]
        assert seen[0] == 0 and seen[-1] == size - 1
        assert all(fingerprint_without(path, byte) != whole for byte in seen)
        between = (starts[7] + starts[8] + (1 << 16)) // 2
        assert (fingerprint_without(path, between) == whole) is (mib > 1)
        assert shards_metadata([path])["fingerprint"] == whole


def test_another_label_is_seen_wherever_it_lies(tmp_path, monkeypatch):
    """Labels, names and sizes are known of all examples; here nothing else is."""
    monkeypatch.setattr(wds, "shards_metadata", lambda paths: {})
    found = []
    for name, label in (("a.jpg", b"1"), ("a.jpg", b"2"), ("b.jpg", b"1")):
        members = [(name, b"\xff\xd8"), (f"{name[0]}.cls", label)]
        write_tar(tmp_path / "train-0.tar", members)
        (tmp_path / "classes.txt").write_text("\n".join("abc"))
        records, _ = open_source(f"wds:{tmp_path}", "train", "images")
        found.append(records.metadata()["examples_fingerprint"])
    assert len({*found}) == 3
