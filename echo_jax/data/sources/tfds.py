"""Datasets prepared by tensorflow-datasets, read by index.

Only their files are read: neither TensorFlow nor the code that made them is needed. A
record is bytes until it is decoded. The files must be in a format with random access,
which is not the default of tensorflow-datasets. Shuffling and resuming need it.
"""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from tensorflow_datasets.core.read_only_builder import builder_from_files

from echo_jax.data.images.decode import decode_image
from echo_jax.data.sources.source import ForeignRecords, Opened

# The features of each kind of data.
_FEATURES = {
    "images": ("image", "label"),
    "coco": ("image", "image/id", "objects"),
    "text": ("text",),
}
# Features that may hold the name of an image.
_NAMES = ("file_name", "id")


class TfdsData:
    """A dataset prepared in ``TFDS_DATA_DIR``, or in ``~/tensorflow_datasets``."""

    def __init__(self, name: str, kind: str):
        """Opens ``NAME``, ``NAME/CONFIG`` or ``NAME:VERSION``."""
        self._name, self._kind = name, kind
        self._builder = _builder(name)
        self.splits = list(self._builder.info.splits)
        features = self._builder.info.features
        for feature in _FEATURES[kind]:
            if feature not in features:
                raise ValueError(
                    f"data.source='tfds:{name}' has no feature {feature!r}, so it is "
                    f"no data of kind {kind}; it has {', '.join(features)}."
                )

    def open(self, split: str) -> Opened:
        """Returns the records of a split, and their decoder."""
        try:
            source = self._builder.as_data_source(
                split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
            )
        except NotImplementedError as error:
            raise ValueError(
                f"data.source='tfds:{self._name}' is prepared in a format that cannot "
                f"be read by index. Remove {self._builder.data_dir}, and prepare it "
                f"again:\n{_command(self._name)}"
            ) from error
        info, features = self._builder.info, self._builder.info.features
        about: dict[str, Any] = {
            "kind": self._kind,
            "splits": {s: {"examples": n.num_examples} for s, n in info.splits.items()},
        }
        if self._kind == "images":
            about["classes"] = features["label"].names
        elif self._kind == "coco":
            names = features["objects"]["label"].names
            about["categories"] = [{"id": i, "name": n} for i, n in enumerate(names)]
        metadata = {
            "source": f"tfds:{self._name}",
            "kind": self._kind,
            "version": str(info.version),
            "split": split,
            "examples": info.splits[split].num_examples,
            "bytes": info.splits[split].num_bytes,
        }
        return TfdsRecords(source, about, metadata), _Decode(features, self._kind)


class TfdsRecords(ForeignRecords):
    """Serialised records of a split; category ids are the dataset's labels."""

    def __getitem__(self, index: int) -> bytes:
        return self.examples[index]


@dataclass(frozen=True)
class _Decode:
    features: Any
    kind: str

    def __call__(self, record: bytes) -> dict[str, Any]:
        skip = {"image": tfds.decode.SkipDecoding()} if self.kind != "text" else None
        example = self.features.deserialize_example_np(record, decoders=skip)
        if self.kind == "text":
            return {"text": example["text"]}
        if self.kind == "images":
            name = next((example[key] for key in _NAMES if key in example), b"")
            return {
                "image": example["image"],
                "label": int(example["label"]),
                "name": name.decode(errors="replace"),
            }
        # The size of an image is not stored, so it is decoded.
        image = decode_image(example["image"], as_stored=True)
        objects = example["objects"]
        height, width = image.shape[:2]
        boxes = np.array(objects["bbox"], np.float32).reshape(-1, 4)
        scale = np.array([height, width, height, width], np.float32)
        return {
            "image": image,
            "image_id": int(example["image/id"]),
            "height": height,
            "width": width,
            "boxes": (boxes * scale).tobytes(),
            "labels": np.array(objects["label"], np.int32).tobytes(),
            "crowd": np.array(objects["is_crowd"], np.uint8).tobytes(),
            "area": np.array(objects["area"], np.float32).tobytes(),
        }


def _builder(name: str) -> Any:
    data_dir = os.environ.get("TFDS_DATA_DIR")
    try:
        return builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        where = data_dir or "~/tensorflow_datasets (TFDS_DATA_DIR names another folder)"
        raise ValueError(
            f"data.source='tfds:{name}' is not prepared in {where}. This downloads and "
            f"prepares it:\n{_command(name)}\n"
            "Some datasets, such as c4 and coco, need TensorFlow for that, but not to "
            "be read: pip install 'echo-jax[tfdata]'."
        ) from error


def _command(name: str) -> str:
    return (
        'python -c "import tensorflow_datasets as tfds; '
        f"tfds.builder('{name}', file_format='array_record').download_and_prepare()\""
    )
