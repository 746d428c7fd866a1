"""A synthetic image data set: coloured shapes, drawn from counters.

It needs no download and still exercises the work of real images, because its records
are JPEG files. It is not a benchmark: results on it show how an echo behaves, not how
good a model is.
"""

import hashlib
from typing import Any

import cv2
import numpy as np

from echo_jax.data.augment import Augment, Flip, PadCrop
from echo_jax.data.images.decode import decode_image, pad_crop_flip
from echo_jax.echo.keys import seed_for_use

IMAGE_SIZE = 32
"""Height and width of an image, in pixels."""

SHIFT_PIXELS = 4
"""How far augmentation shifts an image at most."""

_JPEG_QUALITY = 90
# Draw larger and average down, because a shape of 10 pixels needs smooth edges.
_OVERSAMPLING = 4
_PIXEL_NOISE = 10.0


def _regular(num_corners: int, *inner: float) -> np.ndarray:
    radii = np.resize([1.0, *inner], num_corners)
    angles = 2 * np.pi * np.arange(num_corners) / num_corners
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], axis=-1)


# Overlapping polygons leave a hole, which makes the ring.
def _outlines() -> dict[str, list[np.ndarray]]:
    arm = 0.36
    half_cross = [(arm, 1), (arm, arm), (1, arm), (1, -arm), (arm, -arm), (arm, -1)]
    cross = np.concatenate([np.array(half_cross), -np.array(half_cross)])
    bow = np.array([(-1, -0.8), (1, 0.8), (1, -0.8), (-1, 0.8)])
    return {
        "circle": [_regular(48)],
        "square": [_regular(4)],
        "triangle": [_regular(3)],
        "hexagon": [_regular(6)],
        "star": [_regular(10, 0.45)],
        "ring": [_regular(48), 0.55 * _regular(48)],
        "cross": [cross / np.hypot(1, arm)],
        "bow": [bow / np.hypot(1, 0.8)],
    }


_OUTLINES = _outlines()

CLASS_NAMES = tuple(_OUTLINES)
"""What is drawn; a label is an index into it."""


def draw_shape(label: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a random image of a class, uint8[IMAGE_SIZE, IMAGE_SIZE, 3]."""
    cover = shape_cover(label, rng)
    background = rng.uniform(0, 255, size=3)
    shape_color = rng.uniform(0, 255, size=3)
    # Two colours closer than this could not be told apart under the noise.
    while np.abs(shape_color - background).max() < 80:
        shape_color = rng.uniform(0, 255, size=3)
    shade = np.linspace(-1, 1, IMAGE_SIZE, dtype=np.float32) * rng.uniform(-40, 40)
    image = background + shade[:, None, None] * (1 - cover)
    image = image * (1 - cover) + shape_color * cover
    image += rng.normal(0, _PIXEL_NOISE, size=image.shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def shape_cover(label: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a random shape's cover of each pixel, float32[H, W, 1], in [0, 1]."""
    angle = rng.uniform(0, 2 * np.pi)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    radius = rng.uniform(0.24, 0.38) * IMAGE_SIZE
    center = rng.uniform(radius, IMAGE_SIZE - radius, size=2)
    mask_size = IMAGE_SIZE * _OVERSAMPLING
    mask = np.zeros((mask_size, mask_size), np.uint8)
    polygons = [
        np.rint((center + radius * outline @ turn) * _OVERSAMPLING).astype(np.int32)
        for outline in _OUTLINES[CLASS_NAMES[label]]
    ]
    cv2.fillPoly(mask, polygons, 255)
    cover = cv2.resize(mask, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_AREA)
    return cover[..., None].astype(np.float32) / 255


class ShapeRecords:
    """The records: a byte with the label, then a JPEG file; splits differ in `seed`."""

    def __init__(self, num_records: int, seed: int):
        if num_records < 1:
            raise ValueError(
                f"A split of {num_records} images is empty; ask for at least 1."
            )
        self._records = [_encoded(seed, index) for index in range(num_records)]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> bytes:
        return self._records[index]

    def metadata(self) -> dict[str, Any]:
        """Returns the number, the size and the hash of the records."""
        return {
            "images": len(self._records),
            "bytes": sum(map(len, self._records)),
            "sha256": hashlib.sha256(b"".join(self._records)).hexdigest(),
        }


def _encoded(seed: int, index: int) -> bytes:
    label = index % len(CLASS_NAMES)
    rng = np.random.Generator(np.random.Philox(int(seed_for_use(seed, index, 0))))
    # OpenCV writes blue, green, red.
    image = draw_shape(label, rng)[..., ::-1]
    done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, _JPEG_QUALITY])
    if not done:
        raise RuntimeError(f"OpenCV could not encode image {index} as JPEG.")
    return bytes([label]) + data.tobytes()


def decode_shape(record: bytes) -> dict[str, np.ndarray]:
    """Returns the image, uint8[IMAGE_SIZE, IMAGE_SIZE, 3], and the label, int32[]."""
    return {"image": decode_image(record[1:]), "label": np.asarray(record[0], np.int32)}


def augment_shape(item: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Shifts and flips the image of a decoded record; the label stays."""
    image = pad_crop_flip(item["image"], seed, padding=SHIFT_PIXELS)
    return {**item, "image": image}


augment_shapes = Augment((PadCrop(SHIFT_PIXELS), Flip()))
"""`augment_shape` of a batch on the device: the same shifts and flips, drawn there."""
