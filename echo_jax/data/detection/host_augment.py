"""Augmentation of images with boxes on the host, as pure functions of (item, seed).

They are the stages of `echo_jax.data.augment` and `SsdCrop`, one item at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from echo_jax.data.augment.boxes import flip_boxes
from echo_jax.data.detection.crop import NUM_DRAWS, choose_windows, crop_windows
from echo_jax.data.host_colour import distort_colours
from echo_jax.data.stages import Item
from echo_jax.echo.keys import mix, use_seed

__all__ = ["AugmentItem", "colour", "flip", "ssd_crop"]


@dataclass(frozen=True)
class AugmentItem:
    """Stages one after the other, each with randomness of its own.

    Attributes:
      stages: Functions of an item and a ``uint64`` seed, that write to neither.
    """

    stages: tuple[Callable[[Item, int], Item], ...]

    def __call__(self, item: Item, seed: int) -> Item:
        """Returns the augmented item; see `Stages`."""
        for number, stage in enumerate(self.stages):
            item = stage(item, int(use_seed(seed, number, 0)))
        return item


def ssd_crop(item: Item, seed: int) -> Item:
    """Returns what `SsdCrop` makes of an item: a window of it, resized.

    Args:
      item: From `DecodeBoxes`.
      seed: Decides everything.
    """
    image = item["image"]
    height, width = image.shape[:2]
    batch = _as_batch(item)
    # 24 bits, as many as a float32 below 1 has.
    draws = (mix(seed, np.arange(NUM_DRAWS)) >> np.uint64(40)).astype(np.float32)
    windows = choose_windows(
        draws[None] / np.float32(2**24),
        batch["boxes"],
        batch["box_mask"],
        height=height,
        width=width,
    )
    top, left, rows, columns = windows[0].tolist()
    crop = image[top : top + rows, left : left + columns]
    resized = cv2.resize(crop, (width, height), interpolation=cv2.INTER_LINEAR)
    cropped = crop_windows(batch, windows, (height, width))
    return _with_boxes({**item, "image": resized}, cropped)


def flip(item: Item, seed: int) -> Item:
    """Returns the item, mirrored left to right half the time.

    Args:
      item: From `DecodeBoxes`.
      seed: Decides it.
    """
    if seed % 2 == 0:
        return item
    mirrored = np.ascontiguousarray(item["image"][:, ::-1])
    flipped = flip_boxes(_as_batch(item), np.array([True]))
    return _with_boxes({**item, "image": mirrored}, flipped)


def colour(item: Item, seed: int) -> Item:
    """Returns the item with other colours; see `distort_colours`."""
    return {**item, "image": distort_colours(item["image"], seed)}


def _as_batch(item: Item) -> Item:
    return {name: item[name][None] for name in ("boxes", "box_mask")}


def _with_boxes(item: Item, batch: Item) -> Item:
    return {**item, "boxes": batch["boxes"][0], "box_mask": batch["box_mask"][0]}
