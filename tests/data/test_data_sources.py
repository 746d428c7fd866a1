"""Data of others: the same records from every format, and what is refused."""

import importlib
import io
import json
import os
import pickle
import tarfile
import unicodedata
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds
from array_record.python.array_record_module import ArrayRecordWriter
from prepare_cases import make_image, member, write

import echo_jax as ej
from echo_jax.config import load_config
from echo_jax.data.sources import find_shards, open_source, pack, shards_metadata
from echo_jax.inference import evaluate_run
from echo_jax.runs import run_train

CLASSES = ["cat", "dög", "fish"]
SIZES = {"train": 30, "validation": 12}


def png(seed, height=32, width=32):
    return make_image(seed, ".png", (height, width))


IMAGES = {
    split: [
        {"image": png([i, size]), "label": i % 3, "name": f"{split}/{i:03}.png"}
        for i in range(size)
    ]
    for split, size in SIZES.items()
}
TEXTS = {
    split: [{"text": f"{split} says {i}: Größe".encode()} for i in range(size)]
    for split, size in SIZES.items()
}
OF_KIND = {"images": IMAGES, "text": TEXTS}
PNG = IMAGES["train"][0]["image"]


class Texts:
    """What a user would write."""

    splits = ("train", "validation")
    examples = TEXTS

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return SIZES[self.split]

    def __getitem__(self, index):
        return dict(self.examples[self.split][index])

    def metadata(self):
        return {"version": 3}


class Images(Texts):
    classes = CLASSES
    examples = IMAGES


FEW = {
    split: [{**e, "label": 2 - e["label"]} for e in examples if e["label"]]
    for split, examples in IMAGES.items()
}


class Few(Images):
    """Two of the classes, in another order and in another form of Unicode."""

    classes = ("fish", unicodedata.normalize("NFD", "dög"))
    examples = FEW

    def __len__(self):
        return len(FEW[self.split])


class Unknown(Few):
    classes = ("fish", "bird")


class WrongLabel(Images):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "label": 3}


class Empty(Images):
    def __len__(self):
        return 0


def members_of(kind, example, i):
    if kind == "text":
        return {f"{i:03}.txt": example["text"]}
    stem = example["name"].removesuffix("png")
    label = str(example["label"]).encode()
    return {f"{stem}png": example["image"], f"{stem}json": b"{}", f"{stem}cls": label}


def write_classes(folder):
    (folder / "classes.txt").write_text("\n".join(CLASSES) + "\n")


def write_wds(folder, kind):
    """Two archives for each split."""
    for split, examples in OF_KIND[kind].items():
        members = [members_of(kind, each, i) for i, each in enumerate(examples)]
        half = len(examples) // 2
        for shard, part in enumerate((members[:half], members[half:])):
            files = {name: content for each in part for name, content in each.items()}
            write(folder / f"{split}-{shard:03}.tar", files)
    write_classes(folder)
    return f"wds:{folder}"


def write_array_record(folder, kind):
    for split, examples in OF_KIND[kind].items():
        path = folder / f"{split}.array_record"
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for example in examples:
            writer.write(pack(example) if kind == "images" else example["text"])
        writer.close()
    write_classes(folder)
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
    write_parquet(folder, kind)
    files = {split: f"{folder}/{split}-00000-of-00001.parquet" for split in SIZES}
    of_parquet = importlib.import_module("datasets.packaged_modules.parquet.parquet")
    of_config = "datasets.BuilderConfig.create_config_id"
    with mock.patch(of_config, lambda *_, **__: "default"):
        of_parquet.Parquet(
            cache_dir=f"{os.environ['HF_HOME']}/datasets",
            dataset_name=f"ours_{kind}",
            data_files=files,
            hash="0",
        ).download_and_prepare()
    return f"hf:ours_{kind}"


CLASS_OF = {"images": "Images", "text": "Texts"}
FORMATS = {
    "wds": write_wds,
    "arrayrecord": write_array_record,
    "hf": write_hf,
    "parquet": write_parquet,
    "cache": write_cache,
    "python": lambda _, kind: f"python:{__name__}:{CLASS_OF[kind]}",
}


def write_tfds(name, data_dir, example, splits=("train",), form="array_record"):
    builder = tfds.builder(name, data_dir=data_dir, file_format=form)

    def generate(self, download):
        return {split: ((i, example(i)) for i in range(5)) for split in splits}

    with mock.patch.object(type(builder), "_split_generators", generate):
        builder.download_and_prepare()


def file_of(i, *size):
    return io.BytesIO(png(i, *size))


@pytest.fixture(scope="module", autouse=True)
def caches(tmp_path_factory):
    """Those of Hugging Face, and of tensorflow-datasets with three datasets."""
    folder = tmp_path_factory.mktemp("tfds")
    for name, other, example in (
        ("cifar10", "test", lambda i: {"image": file_of(i), "label": i, "id": f"x{i}"}),
        (
            "imagenet2012",
            "validation",
            lambda i: {
                "image": file_of(i, 40, 50),
                "label": 7 * i,
                "file_name": f"{i}",
            },
        ),
        ("lm1b", "test", lambda i: {"text": f"Größe {i}"}),
    ):
        write_tfds(name, folder, example, ("train", other))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hub")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TFDS_DATA_DIR", str(folder))
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


def examples_of(opened):
    records, decode = pickle.loads(pickle.dumps(opened))
    assert all(type(records[i]) is bytes for i in range(len(records)))
    return [decode(records[i]) for i in range(len(records))]


@pytest.mark.parametrize("kind", OF_KIND)
@pytest.mark.parametrize("name", FORMATS)
def test_records_are_what_was_written(source_of, name, kind):
    source = source_of(name, kind)
    for split, examples in OF_KIND[kind].items():
        opened = open_source(source, split, kind)
        if name == "hf" and kind == "images":
            # `save_to_disk` leaves folders out of names.
            examples = [{**e, "name": Path(e["name"]).name} for e in examples]
        assert examples_of(opened) == examples
        info, metadata = opened[0].info, json.loads(json.dumps(opened[0].metadata()))
        assert info["kind"] == kind and info["splits"].keys() == SIZES.keys()
        assert kind == "text" or info["classes"] == CLASSES
        expected = {"source": source, "split": split, "examples": len(examples)}
        assert expected.items() <= metadata.items()
        assert name == "python" or len(metadata["fingerprint"]) == 64


def refusal(source, kind="images", split="train"):
    with pytest.raises(ValueError) as caught:
        open_source(source, split, kind)
    return str(caught.value)


@pytest.mark.parametrize("name", ["wds", "parquet"])
def test_a_missing_split_and_another_kind_are_refused(source_of, name):
    source = source_of(name, "images")
    said = refusal(source, split="extra")
    assert "no split 'extra'; it has train, validation" in said
    assert source in refusal(source, "coco")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{__name__}:WrongLabel", "has label 3; there are 3 classes"),
        (f"{__name__}:Texts", "no classes"),
        (f"{__name__}:Empty", "has no example in split 'train'"),
        (f"{__name__}:Nothing", "cannot be imported"),
        # No other code is called by its name.
        ("os:system", "has no splits. Name a class with splits"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(source, said):
    assert said in refusal(f"python:{source}")


def test_the_config_of_a_run_folder_names_no_code(tmp_path, compiled_soon):
    fields = {"data.source": f"python:{__name__}:Images", "batch_size": 8}
    fields |= {"data.eval_examples": 0, "model.width": 4, "mesh.data": 1}
    fields |= {"updates": 2, "eval_every": 2, "optim.warmup_updates": 1}
    run_train(load_config("configs/cifar.py:tiny", fields), tmp_path)
    run = ej.load_run(tmp_path)  # Its model needs no data.
    with pytest.raises(ValueError, match="names code"):
        evaluate_run(run)
    assert evaluate_run(run, source=fields["data.source"]).metrics
    # Other data may have some of the classes.
    few = [example for example in IMAGES["validation"] if example["label"]]
    found = run.predict([e["image"] for e in few])["probabilities"].argmax(axis=1)
    right = found == [e["label"] for e in few]
    metrics = evaluate_run(run, source=f"python:{__name__}:Few").metrics
    assert metrics["accuracy"] == pytest.approx(right.mean())
    with pytest.raises(ValueError, match=r"1 of 2 classes that .* such as 'bird'"):
        evaluate_run(run, source=f"python:{__name__}:Unknown")


@pytest.mark.parametrize("label", [b"4\n", b"4.0"])
def test_shards_without_a_list_of_classes_count_them(tmp_path, label):
    write(tmp_path / "train.tar", {"a.PNG": PNG, "a.cls": label})
    records, decode = open_source(f"wds:{tmp_path}", "train", "images")
    assert records.info["classes"] == ["0", "1", "2", "3", "4"]
    assert decode(records[0]) == {"image": PNG, "label": 4, "name": "a.PNG"}


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"a.png": PNG}, "needs .cls, its label"),
        ({"a.cls": b"1"}, "needs one of .jpg"),
        ({"a.png": PNG, "a.cls": b"-1"}, "is b'-1'; a label is a number"),
        ({"a.png": PNG, "./a.png": PNG}, "two members 'a.png'"),
        ({"../a.png": PNG}, "leads out of the folder"),
        ({"a\x1b[2J.png": PNG}, "not printable"),
        ({"a": member("a.png", tarfile.SYMTYPE, linkname="/etc/passwd")}, "is a link"),
    ],
)
def test_hostile_and_broken_archives_are_refused(tmp_path, members, said):
    write(tmp_path / "train.tar", members)
    found = refusal(f"wds:{tmp_path}")
    assert said in found and "\x1b" not in found


def test_archives_that_are_cut_off_are_refused(tmp_path):
    path, source = tmp_path / "train.tar", f"wds:{tmp_path}"
    write(path, {"a.png": PNG, "a.cls": b"0"})
    whole = path.read_bytes()
    records, _ = open_source(source, "train", "images")
    # In the content, where the next header would be, in it, and in the end mark.
    header = 512 + -(-len(PNG) // 512) * 512
    for length in (header, header + 200, header + 1024 + 100, 600):
        path.write_bytes(whole[:length])
        assert "damaged, cut off" in refusal(source)
    with pytest.raises(ValueError, match="it was changed while it was read"):
        records[0]


def test_records_say_no_classes_by_themselves(tmp_path):
    source = write_array_record(tmp_path, "images")
    (tmp_path / "classes.txt").unlink()
    assert "says no classes" in refusal(source)
    (tmp_path / "train.array_record").write_bytes(b"no records")
    write_classes(tmp_path)
    assert "cannot be read" in refusal(source)


def test_names_of_classes_are_read_through_no_link(tmp_path):
    """They go into files of a run, which are shown to others."""
    write(tmp_path / "train-0.tar", {"a.jpg": b"\xff\xd8", "a.cls": b"0"})
    secret, classes = tmp_path / "credentials", tmp_path / "classes.txt"
    secret.write_text("password")
    classes.symlink_to(secret)
    said = "classes.txt' is a link, not a file, or too large; put a file of at most"
    assert said in refusal(f"wds:{tmp_path}")
    classes.unlink()
    os.mkfifo(classes)  # Whoever opens it waits for ever.
    assert said in refusal(f"wds:{tmp_path}")
    classes.unlink()
    classes.write_bytes(b"a" * (2**20 + 1))
    assert said in refusal(f"wds:{tmp_path}")


def test_shards_are_found_by_the_words_of_their_names(tmp_path):
    for name in ("train-000.tar", "train-001.tar", "x_val_0.tar"):
        (tmp_path / name).touch()
    train = [tmp_path / "train-000.tar", tmp_path / "train-001.tar"]
    both = {"train": train, "val": [tmp_path / "x_val_0.tar"]}
    for pattern, expected in (
        ("{train-000,train-001,x_val_0}.tar", both),
        ("", both),
        ("*.tar", both),
        ("train-{000..001}.tar", {"train": train}),
    ):
        assert find_shards("", f"{tmp_path}/{pattern}", ".tar") == expected
    (tmp_path / "photos.tar").touch()
    for pattern, said in (
        ("train-{000..002}.tar", "train-002.tar. is missing"),
        ("train-{0..999999}.tar", "more than 100000 files"),
        ("{0..9999}{0..9999}", "more than 100000 files"),
        ("nothing", "is missing"),
        ("", r"photos.tar' must end with .* name one split"),
    ):
        with pytest.raises(ValueError, match=said):
            find_shards("wds:x", f"{tmp_path}/{pattern}", ".tar")


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
    assert "holds no file that ends with .parquet" in refusal(f"hf:{tmp_path}")


def test_a_fingerprint_is_of_what_the_docs_say(tmp_path):
    """16 pieces of 64 KiB, from the first byte to the last; all of 1 MiB."""
    path = tmp_path / "train.tar"
    for size, starts in ((1 << 20, range(0, 1 << 20, 1 << 16)), (7 << 20, None)):
        starts = starts or [k * (size - (1 << 16)) // 15 for k in range(16)]
        content = bytearray(np.random.default_rng(0).bytes(size))
        path.write_bytes(content)
        found = {shards_metadata([path])["fingerprint"]}
        for byte in (starts[0], starts[7], starts[7] + (1 << 16) - 1, size - 1):
            content[byte] ^= 1
            path.write_bytes(content)
            found.add(shards_metadata([path])["fingerprint"])
        assert len(found) == 5
    content[starts[7] + (1 << 16)] ^= 1  # Between two pieces.
    path.write_bytes(content)
    assert shards_metadata([path])["fingerprint"] in found


def test_another_label_is_seen_wherever_it_lies(tmp_path):
    """Labels, names and sizes of all examples have a fingerprint of their own."""
    found = []
    for name, label in (("a.jpg", b"1"), ("a.jpg", b"2"), ("b.jpg", b"1")):
        members = {name: b"\xff\xd8", f"{name[0]}.cls": label}
        write(tmp_path / "train-0.tar", members)
        write_classes(tmp_path)
        records, _ = open_source(f"wds:{tmp_path}", "train", "images")
        found.append(records.metadata()["examples_fingerprint"])
    assert len({*found}) == 3


def test_images_and_texts_of_tensorflow_datasets():
    opened = open_source("tfds:imagenet2012", "train", "images")
    assert len(opened[0].info["classes"]) == 1000
    # Its writer shuffles.
    found = sorted(examples_of(opened), key=lambda example: example["label"])
    wanted = [
        {"image": png(i, 40, 50), "label": 7 * i, "name": f"{i}"} for i in range(5)
    ]
    assert found == wanted and type(found[0]["label"]) is int
    texts = examples_of(open_source("tfds:lm1b", "train", "text"))
    assert {text["text"].decode() for text in texts} == {f"Größe {i}" for i in range(5)}
    # The validation split may have another name.
    metadata = open_source("tfds:cifar10", "validation", "images")[0].metadata()
    assert metadata.pop("bytes") > 5 * 1000
    assert metadata == {
        "source": "tfds:cifar10",
        "kind": "images",
        "version": str(tfds.builder("cifar10").version),
        "split": "test",
        "examples": 5,
    }


@pytest.mark.parametrize(
    ("source", "kind", "split", "said"),
    [
        ("tfds:cifar100", "images", "train", "'array_record').download_and_prepare()"),
        ("tfds:cifar10", "images", "extra", "no split 'extra'; it has train, test"),
        ("tfds:cifar10", "coco", "train", "no feature 'image/id'"),
        ("", "images", "train", "data.source is empty"),
    ],
)
def test_what_tensorflow_datasets_lacks_is_refused(source, kind, split, said):
    assert said in refusal(source, kind, split)


@pytest.mark.slow
def test_files_without_random_access_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    write_tfds("lm1b", tmp_path, lambda i: {"text": "x"}, form="tfrecord")
    assert "cannot be read by index. Remove " in refusal("tfds:lm1b", "text")


@pytest.mark.slow
def test_scenes_of_tensorflow_datasets(tmp_path, monkeypatch):
    """Prepared with TensorFlow, which takes ten seconds to import."""

    def scene(i):
        box = tfds.features.BBox(ymin=0.1, xmin=0.2, ymax=0.5, xmax=0.6)
        found = {"area": 300 + i, "bbox": box, "id": i, "is_crowd": i > 1, "label": 3}
        about = {"image/filename": "x", "image/id": 100 + i}
        return {"image": file_of(i, 40, 50), "objects": [found] * i, **about}

    write_tfds("coco/2017", tmp_path, scene)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    opened = open_source("tfds:coco/2017", "train", "coco")
    # The names come with the real annotations.
    assert opened[0].info["categories"][3] == {"id": 3, "name": "3"}
    found = {example["image_id"]: example for example in examples_of(opened)}
    for i in range(3):
        example = found[100 + i]
        stored = cv2.imdecode(np.frombuffer(png(i, 40, 50), np.uint8), 1)[..., ::-1]
        np.testing.assert_array_equal(example["image"], stored)
        assert (example["height"], example["width"]) == (40, 50)
        boxes = np.frombuffer(example["boxes"], np.float32).reshape(-1, 4)
        np.testing.assert_allclose(boxes, np.tile([4, 10, 20, 30], (i, 1)), rtol=1e-6)
        assert np.frombuffer(example["labels"], np.int32).tolist() == [3] * i
        assert np.frombuffer(example["crowd"], np.uint8).tolist() == [i > 1] * i
        assert np.frombuffer(example["area"], np.float32).tolist() == [300 + i] * i
