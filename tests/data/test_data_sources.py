"""Sources: prepared folders and tensorflow-datasets give the same kind of dict."""

import io
import pickle
import subprocess
import sys
from unittest import mock

import cv2
import numpy as np
import pytest
import tensorflow_datasets as tfds

from echo_jax.data.images.decode import decode_image
from echo_jax.data.sources.source import Subset, open_source


def image(number, height=40, width=50):
    shape = (height, width, 3)
    return np.random.default_rng(number).integers(0, 256, shape, np.uint8)


def png(number):
    _, encoded = cv2.imencode(".png", image(number)[..., ::-1])
    return encoded.tobytes()


EXAMPLES = {
    "cifar10": lambda i: {
        "image": io.BytesIO(
            cv2.imencode(".png", image(i, 32, 32)[..., ::-1])[1].tobytes()
        ),
        "label": i % 10,
        "id": f"x{i}",
    },
    "imagenet2012": lambda i: {
        "image": io.BytesIO(png(i)),
        "label": 7 * i,
        "file_name": f"n{i}.JPEG",
    },
    "lm1b": lambda i: {"text": f"Größe {i}"},
}
SPLITS = {
    "cifar10": ("train", "test"),
    "imagenet2012": ("train", "validation"),
    "lm1b": ("train", "test"),
}


def write(name, data_dir, examples, file_format="array_record", splits=("train",)):
    """Prepares a dataset of tensorflow-datasets out of examples of our own."""
    builder = tfds.builder(name, data_dir=data_dir, file_format=file_format)

    def generate(self, download):
        return {split: enumerate(examples) for split in splits}

    with mock.patch.object(type(builder), "_split_generators", generate):
        builder.download_and_prepare()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    for name, example in EXAMPLES.items():
        examples = [example(i) for i in range(5)]
        write(name, folder, examples, splits=SPLITS[name])
    return folder


@pytest.fixture(autouse=True)
def in_data_dir(data_dir, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(data_dir))


def by_name(source, split, kind):
    records, decode = open_source(source, split, kind)
    assert all(type(records[i]) is bytes for i in range(len(records)))
    return records, [decode(records[i]) for i in range(len(records))]


def test_classes_and_images_of_tensorflow_datasets():
    records, found = by_name("tfds:imagenet2012", "train", "images")
    assert len(records) == 5 and len(records.info["classes"]) == 1000
    # Its writer shuffles.
    found = sorted(found, key=lambda example: example["label"])
    for i, example in enumerate(found):
        assert example.keys() == {"image", "label", "name"}
        assert (example["label"], example["name"]) == (7 * i, f"n{i}.JPEG")
        assert type(example["label"]) is int
        # Not decoded: how, is for the workload to say.
        assert example["image"] == png(i)
        np.testing.assert_array_equal(decode_image(example["image"]), image(i))


def test_text_of_tensorflow_datasets():
    _, found = by_name("tfds:lm1b", "train", "text")
    assert {example["text"].decode() for example in found} == {
        f"Größe {i}" for i in range(5)
    }


def test_facts_say_what_was_read():
    records, _ = open_source("tfds:cifar10", "train", "images")
    metadata = records.metadata()
    assert metadata.pop("bytes") > 5 * 1000
    assert metadata == {
        "source": "tfds:cifar10",
        "kind": "images",
        "version": str(tfds.builder("cifar10").version),
        "split": "train",
        "examples": 5,
    }
    assert records.info["splits"] == {s: {"examples": 5} for s in ("test", "train")}


def test_the_validation_split_may_have_another_name():
    assert open_source("tfds:cifar10", "validation", "images")[0].metadata()[
        "split"
    ] == ("test")
    records, _ = open_source("tfds:imagenet2012", "validation", "images")
    assert records.metadata()["split"] == "validation"
    with pytest.raises(ValueError, match=r"no split 'extra'; it has .*test"):
        open_source("tfds:cifar10", "extra", "images")


def test_sources_go_to_worker_processes():
    records, decode = pickle.loads(
        pickle.dumps(open_source("tfds:cifar10", "train", "images"))
    )
    assert decode(records[2])["label"] in range(5)
    assert records.metadata()["examples"] == 5


def test_what_is_not_prepared_names_the_command():
    with pytest.raises(
        ValueError, match=r"tfds:cifar100' is not prepared in .*tfds"
    ) as e:
        open_source("tfds:cifar100", "train", "images")
    assert (
        "tfds.builder('cifar100', file_format='array_record').download_and_prepare()"
        in str(e.value)
    )


@pytest.mark.slow
def test_files_without_random_access_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    write("lm1b", tmp_path, [EXAMPLES["lm1b"](0)], file_format="tfrecord")
    with pytest.raises(ValueError, match=r"cannot be read by index\. Remove .*lm1b"):
        open_source("tfds:lm1b", "train", "text")


def test_data_of_another_kind_is_refused():
    with pytest.raises(
        ValueError, match=r"no feature 'image'.* kind images; it has text"
    ):
        open_source("tfds:lm1b", "train", "images")
    with pytest.raises(ValueError, match="no feature 'image/id'"):
        open_source("tfds:cifar10", "train", "coco")
    with pytest.raises(ValueError, match=r"data\.source is empty"):
        open_source("", "train", "images")


_SCENES = """
import io, sys
from unittest import mock
import numpy as np
import tensorflow_datasets as tfds
from test_data_sources import png

def scene(i):
    box = tfds.features.BBox(ymin=0.1, xmin=0.2, ymax=0.5, xmax=0.6)
    object_ = {"area": 300 + i, "bbox": box, "id": i, "is_crowd": i > 1, "label": 3}
    return {"image": io.BytesIO(png(i)), "image/filename": "x", "image/id": 100 + i,
            "objects": [object_] * i}

builder = tfds.builder("coco/2017", data_dir=sys.argv[1], file_format="array_record")
generate = lambda self, download: {"train": ((i, scene(i)) for i in range(3))}
with mock.patch.object(type(builder), "_split_generators", generate):
    builder.download_and_prepare()
"""


@pytest.mark.slow
def test_scenes_of_tensorflow_datasets(tmp_path, monkeypatch):
    """Prepared with TensorFlow, which takes ten seconds to import, and read without."""
    here = __file__.rpartition("/")[0]
    subprocess.run(
        [sys.executable, "-c", _SCENES, str(tmp_path)],
        check=True, capture_output=True, cwd=here,
    )  # fmt: skip
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    records, found = by_name("tfds:coco/2017", "train", "coco")
    # The names come with the real annotations.
    assert records.info["categories"][3] == {"id": 3, "name": "3"}
    found = {example["image_id"]: example for example in found}
    for i in range(3):
        example = found[100 + i]
        np.testing.assert_array_equal(example["image"], image(i))
        assert (example["height"], example["width"]) == (40, 50)
        boxes = np.frombuffer(example["boxes"], np.float32).reshape(-1, 4)
        np.testing.assert_allclose(boxes, np.tile([4, 10, 20, 30], (i, 1)), rtol=1e-6)
        assert np.frombuffer(example["labels"], np.int32).tolist() == [3] * i
        assert np.frombuffer(example["crowd"], np.uint8).tolist() == [i > 1] * i
        assert np.frombuffer(example["area"], np.float32).tolist() == [300 + i] * i


def test_picked_records_are_those():
    subset = Subset([b"a", b"b", b"c"], (2, 0))
    assert len(subset) == 2 and [subset[0], subset[1]] == [b"c", b"a"]
