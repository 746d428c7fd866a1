"""`SsdCrop` and `Flip` on the host, as pure functions of (item, seed)."""

import cv2
import numpy as np

from echo_jax.data.augment.boxes import flip_boxes
from echo_jax.data.detection.crop import NUM_DRAWS, choose_windows, crop_windows
from echo_jax.data.pipeline.stages import Item
from echo_jax.echo.keys import mix

__all__ = ["flip", "ssd_crop"]


def ssd_crop(item: Item, seed: int) -> Item:
    """Returns a random window of an item, resized; see `SsdCrop`."""
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
    """Returns the item, mirrored left to right if the seed is odd."""
    if seed % 2 == 0:
        return item
    mirrored = np.ascontiguousarray(item["image"][:, ::-1])
    flipped = flip_boxes(_as_batch(item), np.array([True]))
    return _with_boxes({**item, "image": mirrored}, flipped)


def _as_batch(item: Item) -> Item:
    return {name: item[name][None] for name in ("boxes", "box_mask")}


def _with_boxes(item: Item, batch: Item) -> Item:
    return {**item, "boxes": batch["boxes"][0], "box_mask": batch["box_mask"][0]}
