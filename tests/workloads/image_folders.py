"""Prepared folders of random images, as `echo-jax prepare images` makes them."""

import cv2
import numpy as np

from echo_jax.data.prepare.images import prepare_images
from echo_jax.data.prepare.job import Settings


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
