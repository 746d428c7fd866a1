"""Photographs in four rotations, which a network tells apart: the data of S9.

A photograph is stored once. Reading example i gives photograph i // 4, turned by
i % 4 quarters. The file's EXIF orientation says so, and its pixels stay as they are.
The photographs lie in ``data/photographs``: see `s9_photographs`.

Configs name the classes as ``python:rotations:NAME``; PYTHONPATH leads to this folder.
"""

import struct
from typing import Any

import cv2

from echo_jax.data.images.decode import resize_center_crop
from echo_jax.data.sources.source import open_source

FOLDER, SIDE = "data/photographs", 36
# EXIF's numbers of a picture to be turned clockwise by 0 to 3 quarters.
_ORIENTATIONS = (1, 6, 3, 8)
# All images, decoded once in a process, for what no clock measures.
_DECODED: dict[int, dict[str, Any]] = {}


class Rotations:
    """Every photograph in its four rotations, as the bytes of a JPEG file.

    Split ``"judged"`` has the examples of ``"train"``, decoded once and kept: the loss
    on them is taken often, and takes no time from training.
    """

    splits = ("train", "judged")
    classes = ("upright", "right", "upside_down", "left")
    share = 0.0  # Of the examples, how many stay in memory decoded, from the first on.

    def __init__(self, split: str):
        self._photographs, self._decode = open_source(FOLDER, "train", "images")
        judged = split == "judged"
        self._most = int(len(self) * (1 if judged else self.share))
        self._kept = _DECODED if judged else {}

    def __len__(self) -> int:
        return 4 * len(self._photographs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self._kept:
            return self._kept[index]
        photograph, turn = divmod(index, 4)
        image = turned(self._decode(self._photographs[photograph])["image"], turn)
        if index < self._most:
            square = resize_center_crop(image, SIDE, resize=SIDE)
            image = cv2.imencode(".bmp", square[..., ::-1])[1].tobytes()
        example = {"image": image, "label": turn, "name": str(index)}
        if index < self._most:
            self._kept[index] = example
        return example


class Cached(Rotations):
    """Keeps every decoded image, `SIDE` pixels square, for the next epochs."""

    share = 1.0


class HalfCached(Rotations):
    """Keeps the first half, as if memory had no room for more.

    Where each example is read once an epoch, no other half would do better.
    """

    share = 0.5


class Decoded(Cached):
    """Keeps decoded images for all trainings of a process: for searches."""

    def __init__(self, split: str):
        super().__init__(split)
        self._kept = _DECODED


def turned(jpeg: bytes, quarters: int) -> bytes:
    """Returns a JPEG file to be shown turned clockwise by 0 to 3 quarters.

    >>> turned(b"\\xff\\xd8\\xff\\xd9", 1)[2:4].hex()
    'ffe1'
    """
    entry = struct.pack(">HHIHH", 0x0112, 3, 1, _ORIENTATIONS[quarters], 0)
    exif = b"Exif\0\0" + struct.pack(">2sHIH", b"MM", 42, 8, 1) + entry + bytes(4)
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]
