"""Small sources for the prepare tests, and what to compare."""

import io
import json
import tarfile
import zipfile
from pathlib import Path

import cv2
import numpy as np
import pytest
import scipy.io

from echo_jax.data.prepare import PrepareError, Settings, prepare_images
from echo_jax.data.sources import open_prepared, unpack


def make_image(seed, suffix=".jpg", size=(12, 10)):
    """The bytes of an image that differs from seed to seed; size: height, width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    return cv2.imencode(suffix, pixels)[1].tobytes()


def class_folders(num_images=12, classes=("cat", "ant")):
    return {
        f"{classes[i % len(classes)]}/{i:03}.jpg": make_image(i)
        for i in range(num_images)
    }


TINY_IMAGENET = {
    "wnids.txt": b"n02\nn01\n",
    "words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tdugong, Dugong dugon\n",
    **{
        f"train/n{k % 2 + 1:02}/images/n{k % 2 + 1:02}_{k}.JPEG": make_image(k)
        for k in range(6)
    },
    "train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t9\t9\n",
    "train/n02/n02_boxes.txt": b"n02_1.JPEG\t0\t0\t9\t9\n",
    **{f"val/images/val_{k}.JPEG": make_image(50 + k) for k in range(3)},
    "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\n"
    b"val_1.JPEG\tn01\t0\t0\t9\t9\nval_2.JPEG\tn02\t0\t0\t9\t9\n",
    **{f"test/images/test_{k}.JPEG": make_image(70 + k) for k in range(2)},
}
"""Tiny-ImageNet's own layout."""


def write(path, files):
    """Writes a folder or, by its ending, an archive; gives its path.

    A value may be a TarInfo, of a member without content, and a key a ZipInfo.
    """
    path, suffix = Path(path), Path(path).suffix
    if suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    elif ".tar" in path.suffixes:
        with path.open("wb") as file:
            write_tar_to(file, files, f"w:{suffix[1:].removeprefix('tar')}")
    else:
        for name, content in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(content)
    return str(path)


def write_tar_to(file, files, mode="w"):
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):  # A member without content.
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def member(name, kind=tarfile.REGTYPE, size=0, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def write_devkit(path, classes, truth, *, packed=True, **more):
    fields = ("ILSVRC2012_ID", "WNID", "words", "num_children", "children")
    synsets = np.zeros((len(classes), 1), [(name, object) for name in fields])
    for row, (number, name) in enumerate(classes.items()):
        synsets[row, 0] = (number, name, "an animal", 0, np.zeros(0))
    meta = io.BytesIO()
    scipy.io.savemat(meta, {"synsets": synsets}, do_compression=packed)
    files = {
        "readme.txt": b"of 2012",
        "data/meta.mat": meta.getvalue(),
        "data/ILSVRC2012_validation_ground_truth.txt": truth,
        **more,
    }
    kit = {f"ILSVRC2012_devkit_t12/{name}": data for name, data in files.items()}
    return write(path, kit)


def write_imagenet(folder, *, packed=True):
    """Writes the three files of ImageNet: of train, of validation, and the devkit."""
    folder, train = Path(folder), {}
    for name in ("n02000002", "n01000001"):
        images = {f"{name}_{k}.JPEG": make_image(0) for k in range(2)}
        write_tar_to(file := io.BytesIO(), images)
        train[f"{name}.tar"] = file.getvalue()
    images = {f"ILSVRC2012_val_{n:08}.JPEG": make_image(0) for n in (1, 2, 3)}
    # Numbers in an order of their own, and one of a class that is no leaf.
    known = {7: "n02000002", 3: "n01000001", 1001: "n00000009"}
    return (
        write(folder / "ILSVRC2012_img_train.tar", train),
        write(folder / "ILSVRC2012_img_val.tar", images),
        write_devkit(
            folder / "ILSVRC2012_devkit_t12.tar.gz", known, b"3\n7\n3\n", packed=packed
        ),
    )


def write_parquet(path, labels):
    """Writes images with labels as Hugging Face's cifar10 has them."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    kind = {"names": ["cat", "ant"], "_type": "ClassLabel"}
    about = {"info": {"features": {"img": {"_type": "Image"}, "label": kind}}}
    labels = [label % 2 for label in labels]
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    rows = [{"bytes": make_image(k, ".png"), "path": None} for k in range(len(labels))]
    table = pyarrow.table(
        {"img": pyarrow.array(rows, image), "label": labels}
    ).replace_schema_metadata({"huggingface": json.dumps(about)})
    parquet.write_table(table, path, row_group_size=3)
    return str(path)


def coco_json(images, annotations, categories=((7, "cat"), (3, "ant"))):
    """A COCO file; images: id to (name, height, width); annotations as dicts."""
    return json.dumps(
        {
            "images": [
                {"id": key, "file_name": name, "height": height, "width": width}
                for key, (name, height, width) in images.items()
            ],
            "annotations": annotations,
            "categories": [{"id": key, "name": name} for key, name in categories],
        }
    ).encode()


def prepare(out, *sources, classes="auto", names=None, **settings):
    return prepare_images(sources, Settings(out=out, **settings), str(classes), names)


def refusal(out, *sources, **more):
    with pytest.raises(PrepareError) as caught:
        prepare(out, *sources, **more)
    assert not Path(out, "dataset.json").exists()
    return str(caught.value)


def records(folder, split):
    return [*map(unpack, open_prepared(folder, split))]


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }
