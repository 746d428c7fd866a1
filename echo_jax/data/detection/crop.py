"""The random crop of SSD, on the devices and on the host, and the host's flip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cv2
import jax
import numpy as np

from echo_jax.data.augment.geometry import crop_boxes, flip_boxes, resize_windows
from echo_jax.data.augment.stage import Batch, uniforms
from echo_jax.data.detection.boxes import box_area, intersection
from echo_jax.data.pipeline.stages import Item
from echo_jax.echo.keys import mix

# Minimum overlap (IoU) of a crop with an object. None is the whole image, and 0 is a
# crop without conditions. All are equally likely.
_LEAST_OVERLAPS = (None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9)
_TRIES = 50
_SMALLEST_SIDE = 0.3
_RATIOS = (0.5, 2.0)
_NUM_DRAWS = 1 + 4 * _TRIES


# Liu et al. 2016, section 2.2. The first of 50 windows that fits is taken, else the
# whole image. Sides follow the authors' code: 0.3 to 1 of the image's side, where the
# paper's "[0.1, 1]" is an area. A window shows the centre of an object. Boxes with
# their centre outside are masked out, the others clipped. It does not zoom out.
@dataclass(frozen=True)
class SsdCrop:
    """Cuts out a random window with a drawn minimum overlap, and resizes it."""

    def windows(self, batch: Mapping[str, Any], keys: jax.Array) -> jax.Array:
        """Returns top, left, height and width of the windows, int32[B, 4]."""
        height, width = batch["image"].shape[1:3]
        draws = uniforms(keys, _NUM_DRAWS)
        return _choose_windows(
            draws, batch["boxes"], batch["box_mask"], height=height, width=width
        )

    def __call__(self, batch: Mapping[str, Any], keys: jax.Array) -> Batch:
        """Returns the batch with cropped images, of the same shape and type."""
        image = batch["image"]
        windows = self.windows(batch, keys)
        cropped = resize_windows(image, windows, image.shape[1:3])
        return _crop_windows({**batch, "image": cropped}, windows, image.shape[1:3])


def _choose_windows(
    draws: Any, boxes: Any, mask: Any, *, height: int, width: int
) -> Any:
    xp = draws.__array_namespace__()
    scale, ratio, y, x = (draws[:, 1 + k :: 4] for k in range(4))
    side = _SMALLEST_SIDE + (1 - _SMALLEST_SIDE) * scale
    # Draw only ratios for which both sides fit into the image.
    least = xp.maximum(side**2, xp.full_like(side, _RATIOS[0]))
    most = xp.minimum(side**-2, xp.full_like(side, _RATIOS[1]))
    root = xp.sqrt(least + (most - least) * ratio)
    extent = xp.stack(
        [
            xp.clip(xp.round(height * side / root), 1, height),
            xp.clip(xp.round(width * side * root), 1, width),
        ],
        axis=-1,
    )
    whole = xp.asarray([[[height, width]]], dtype=extent.dtype)
    place = xp.stack([y, x], axis=-1)
    # A draw just below 1 may be rounded up to 1 by the product.
    origin = xp.minimum(xp.floor(place * (whole - extent + 1)), whole - extent)
    # The last candidate, which always fits, is the whole image.
    origin = xp.concatenate([origin, xp.zeros_like(origin[:, :1])], axis=1)
    extent = xp.concatenate([extent, whole + xp.zeros_like(extent[:, :1])], axis=1)
    fits = _fits(draws[:, :1], origin / whole, extent / whole, boxes, mask)
    index = xp.argmax(fits.astype(xp.int32), axis=1)[:, None, None]
    windows = xp.concatenate([origin, extent], axis=-1)
    chosen = xp.take_along_axis(windows, index, axis=1)[:, 0]
    return chosen.astype(xp.int32)


def _crop_windows(batch: Batch, windows: Any, size: tuple[int, int]) -> Batch:
    xp = windows.__array_namespace__()
    whole = xp.asarray([[*size, *size]], dtype=xp.float32)
    parts = windows.astype(float) / whole  # NumPy would do so, and jax in float32.
    return crop_boxes(batch, parts[:, :2], parts[:, 2:])


def _fits(draw: Any, origin: Any, extent: Any, boxes: Any, mask: Any) -> Any:
    xp = draw.__array_namespace__()
    candidates = xp.concatenate([origin, origin + extent], axis=-1)
    both = intersection(candidates, boxes)
    either = box_area(candidates)[:, :, None] + box_area(boxes)[:, None, :] - both
    middle = ((boxes[..., :2] + boxes[..., 2:]) / 2)[:, None]
    is_inside = (middle >= candidates[:, :, None, :2]) & (
        middle < candidates[:, :, None, 2:]
    )
    shows = xp.all(is_inside, axis=-1) & mask[:, None]
    # No window reaches 2, so None leaves the whole image.
    least = xp.asarray([2.0 if x is None else x for x in _LEAST_OVERLAPS])
    number = xp.floor(draw * len(_LEAST_OVERLAPS)).astype(xp.int32)
    wanted = least[xp.minimum(number, len(_LEAST_OVERLAPS) - 1)]
    overlaps = (both >= wanted[:, :, None] * either) & mask[:, None]
    fits = xp.any(overlaps, axis=-1) & xp.any(shows, axis=-1)
    return xp.concatenate([fits[:, :-1], xp.ones_like(fits[:, -1:])], axis=1)


def ssd_crop(item: Item, seed: int) -> Item:
    """Returns a random window of an item, resized; see `SsdCrop`."""
    image = item["image"]
    height, width = image.shape[:2]
    batch = _as_batch(item)
    # 24 bits, as many as a float32 below 1 has.
    draws = (mix(seed, np.arange(_NUM_DRAWS)) >> np.uint64(40)).astype(np.float32)
    windows = _choose_windows(
        draws[None] / np.float32(2**24),
        batch["boxes"],
        batch["box_mask"],
        height=height,
        width=width,
    )
    top, left, rows, columns = windows[0].tolist()
    crop = image[top : top + rows, left : left + columns]
    resized = cv2.resize(crop, (width, height), interpolation=cv2.INTER_LINEAR)
    cropped = _crop_windows(batch, windows, (height, width))
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
