"""Images with boxes: from a record to an item of fixed shapes."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np

from echo_jax.data.images.decode import decode_image
from echo_jax.data.pipeline.stages import Item


@dataclass(frozen=True)
class DecodeBoxes:
    """Turns a record into a square image and its objects, in fixed shapes."""

    decode_record: Callable[[Any], dict[str, Any]]  # Returns the dict of kind coco.
    size: int
    max_boxes: int  # Objects to keep, the largest ones.
    # Whether to warn of the first image that has more: nobody counted them before.
    warns: bool = False

    def __call__(self, record: Any) -> Item:
        entries = self.decode_record(record)
        boxes, labels = _objects(entries, self.max_boxes, warns=self.warns)
        empty = self.max_boxes - len(boxes)
        return {
            "image": self._image(entries),
            "boxes": np.pad(boxes, ((0, empty), (0, 0))),
            "box_mask": np.arange(self.max_boxes) < len(boxes),
            "box_labels": np.pad(labels, (0, empty)),
        }

    def _image(self, entries: dict[str, Any]) -> np.ndarray:
        try:
            image = decode_image(entries["image"], as_stored=True)
        except ValueError as error:
            raise ValueError(f"image {entries['image_id']}: {error}") from error
        size = (entries["height"], entries["width"])
        if image.shape[:2] != size:
            raise ValueError(
                f"image {entries['image_id']} has {image.shape[:2]} rows and columns, "
                f"and its record says {size}: its boxes would be wrong. Prepare it "
                "again, with the annotations of these images."
            )
        return resize_to_square(image, self.size)


@dataclass(frozen=True)
class DecodeForEvaluation:
    """Adds ``"image_id"``, ``"height"`` and ``"width"`` to the decoded item."""

    decode: DecodeBoxes

    def __call__(self, record: Any) -> Item:
        entries = self.decode.decode_record(record)
        about = ("image_id", "height", "width")
        known = {name: np.asarray(entries[name], np.int64) for name in about}
        return self.decode(record) | known


def boxes_left_out(images_by_objects: Mapping[str, int], most: int) -> str:
    """Returns in words what a limit on the boxes of an image leaves out, or ""."""
    beyond = {int(n) - most: k for n, k in images_by_objects.items() if int(n) > most}
    boxes = sum(number * images for number, images in beyond.items())
    images = sum(beyond.values())
    of = f"{boxes} boxes of {images} image{'s' * (images > 1)}"
    return f"data.max_boxes={most} leaves out {of}" * bool(boxes)


def resize_to_square(image: np.ndarray, size: int) -> np.ndarray:
    """Returns an image without its aspect ratio, uint8[size, size, 3]."""
    # Average when reducing, which keeps small objects; else interpolate.
    is_larger = min(image.shape[:2]) > size
    how = cv2.INTER_AREA if is_larger else cv2.INTER_LINEAR
    return cv2.resize(image, (size, size), interpolation=how)


def _objects(
    entries: dict[str, Any], most: int, *, warns: bool
) -> tuple[np.ndarray, np.ndarray]:
    height, width = entries["height"], entries["width"]
    whole = np.array([height, width, height, width], np.float32)
    boxes = np.frombuffer(entries["boxes"], "<f4").reshape(-1, 4) / whole
    labels = np.frombuffer(entries["labels"], "<i4")
    crowd = np.frombuffer(entries["crowd"], np.uint8)
    if not len(boxes) == len(labels) == len(crowd):
        raise ValueError(
            f"image {entries['image_id']} has {len(boxes)} boxes, {len(labels)} labels "
            f"and {len(crowd)} flags of crowds; its record is damaged"
        )
    area = np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)
    # COCO's evaluation ignores crowds, so nothing is learned from them.
    is_object = (crowd == 0) & (area > 0)
    if warns and is_object.sum() > most:
        warnings.warn(
            f"image {entries['image_id']} has {is_object.sum()} boxes, and the largest "
            f"{most} are kept, as of every image with more; set "
            "--config.data.max_boxes higher to keep all",
            stacklevel=2,
        )
    # Keep the largest objects, in the order of the record.
    order = np.argsort(np.where(is_object, -area, np.inf), kind="stable")
    kept = np.sort(order[: min(most, is_object.sum())])
    return boxes[kept].astype(np.float32), labels[kept].astype(np.int32)
