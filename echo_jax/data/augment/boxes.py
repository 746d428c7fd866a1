"""Boxes that follow their image through a crop or a flip.

Boxes are normalised ``(ymin, xmin, ymax, xmax)``, and masked rows are zeros, as in
`echo_jax.data.augment`. The functions take NumPy or jax arrays, so that a crop on the
host is the same.
"""

from typing import Any

from echo_jax.data.augment.stage import Batch

__all__ = ["crop_boxes", "flip_boxes"]


def crop_boxes(batch: Batch, origin: Any, size: Any) -> Batch:
    """Expresses boxes in the coordinates of a window of their image.

    A box is kept if its centre is in the window, and clipped to the window, as in SSD
    (Liu et al. 2016, section 2.2). The mask excludes the other boxes.

    Args:
      batch: Returned unchanged if it has no ``"boxes"``.
      origin: Top and left of the window, ``float32[B, 2]``, in units of the image's
        height and width.
      size: Height and width of the window, ``float32[B, 2]``, in the same units.

    Returns:
      A batch with new ``"boxes"`` and ``"box_mask"``, in the same rows.
    """
    if "boxes" not in batch:
        return batch
    xp = batch["boxes"].__array_namespace__()
    corners = batch["boxes"].reshape(*batch["boxes"].shape[:-1], 2, 2)
    corners = (corners - origin[:, None, None]) / size[:, None, None]
    center = corners.mean(axis=-2)
    is_inside = ((center >= 0) & (center < 1)).all(axis=-1)
    boxes = xp.clip(corners, 0, 1).reshape(batch["boxes"].shape)
    return _masked(batch, boxes, batch["box_mask"] & is_inside)


def flip_boxes(batch: Batch, is_flipped: Any) -> Batch:
    """Mirrors the boxes of some images left to right.

    Args:
      batch: Returned unchanged if it has no ``"boxes"``.
      is_flipped: The images to mirror, ``bool[B]``.

    Returns:
      A batch with new ``"boxes"``, in the same rows.
    """
    if "boxes" not in batch:
        return batch
    xp = batch["boxes"].__array_namespace__()
    top, left, bottom, right = xp.moveaxis(batch["boxes"], -1, 0)
    mirrored = xp.stack([top, 1 - right, bottom, 1 - left], axis=-1)
    boxes = xp.where(is_flipped[:, None, None], mirrored, batch["boxes"])
    return _masked(batch, boxes, batch["box_mask"])


def _masked(batch: Batch, boxes: Any, mask: Any) -> Batch:
    xp = boxes.__array_namespace__()
    boxes = xp.where(mask[..., None], boxes, 0).astype(batch["boxes"].dtype)
    return {**batch, "boxes": boxes, "box_mask": mask}
