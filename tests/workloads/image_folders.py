"""Prepared folders of random images, and the configs of workloads on them."""

import cv2
import numpy as np

from echo_jax.config import load_config
from echo_jax.data.prepare import Settings, prepare_images

SMALL = [(32, 32)] * 30
SIZES = [(60, 80), (90, 50), (64, 64), (40, 120), (33, 33)] * 4
FIELDS = {
    "cifar": {"model.width": 4, "batch_size": 8, "data.eval_examples": 0},
    "imagenet": {
        "batch_size": 4,
        "data.train_examples": 0,
        "data.eval_split": "validation",
        "data.image_size": 32,
        "data.resize": 36,
        "data.augment": ("crop", "flip", "colour"),
        "model.stage_sizes": (1, 1),
        "model.width": 4,
        "model.virtual_batch": 2,
    },
    "shapes": {
        "batch_size": 8,
        "data.source": "synthetic",
        "data.train_examples": 64,
        "data.eval_examples": 20,
        "echo.stage": "batch",
    },
}


def write_images(folder, sizes, *, num_classes=3, seed=0):
    """Writes a JPEG file of every (height, width), in class folders by turns."""
    rng = np.random.default_rng(seed)
    for number, (height, width) in enumerate(sizes):
        path = folder / f"class_{number % num_classes}" / f"{number:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        cv2.imwrite(str(path), cv2.resize(coarse, (width, height)))


def prepare(folder, train_sizes, validation_sizes):
    """Makes a prepared folder in a folder of the test, and returns its path."""
    write_images(folder / "train", train_sizes)
    write_images(folder / "validation", validation_sizes, seed=1)
    sources = [f"{split}={folder / split}" for split in ("train", "validation")]
    prepare_images(sources, Settings(out=folder / "prepared"))
    return str(folder / "prepared")


def config_of(name, folder="", /, **overrides):
    """The config of a small model on a folder; "__" in a name stands for a dot."""
    fields = {**FIELDS[name], **({"data.source": folder} if folder else {})}
    fields |= {name.replace("__", "."): value for name, value in overrides.items()}
    return load_config(f"{name}:tiny", fields)
