"""Arithmetic on boxes: overlaps, and the offsets that a detector predicts.

Boxes are ``(ymin, xmin, ymax, xmax)``, as fractions of height and width unless stated
otherwise. The functions take NumPy or jax arrays and return the same kind.
"""

from typing import Any

VARIANCES = (0.1, 0.2)
"""What offsets of centres and of log sizes are divided by.

They bring both to about unit scale; the values are from the authors' SSD code (Liu
et al. 2016).
"""


def box_area(boxes: Any) -> Any:
    """Returns the areas of boxes, ``[...]``; 0 if an edge is on the wrong side."""
    xp = boxes.__array_namespace__()
    sides = xp.clip(boxes[..., 2:] - boxes[..., :2], 0, None)
    return sides[..., 0] * sides[..., 1]


def intersection(first: Any, second: Any) -> Any:
    """Returns the common area of each pair of boxes, ``[..., M, N]``."""
    xp = first.__array_namespace__()
    one, other = first[..., :, None, :], second[..., None, :, :]
    low = xp.maximum(one[..., :2], other[..., :2])
    high = xp.minimum(one[..., 2:], other[..., 2:])
    return box_area(xp.concatenate([low, high], axis=-1))


def iou(first: Any, second: Any) -> Any:
    """Returns intersection over union of each pair of boxes, ``[..., M, N]``.

    Example:
      >>> box = np.array([[0.0, 0.0, 1.0, 1.0]])
      >>> iou(box, box / 2)
      array([[0.25]])
    """
    xp = first.__array_namespace__()
    both = intersection(first, second)
    either = box_area(first)[..., :, None] + box_area(second)[..., None, :] - both
    return both / xp.where(either > 0, either, xp.ones_like(either))


def encode_boxes(boxes: Any, anchors: Any) -> Any:
    """Returns boxes as offsets from anchors (Liu et al. 2016, equation 2)."""
    xp = boxes.__array_namespace__()
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    shift = boxes[..., :2] + boxes[..., 2:] - anchors[..., :2] - anchors[..., 2:]
    center = shift / 2 / anchor_size / VARIANCES[0]
    size = xp.log((boxes[..., 2:] - boxes[..., :2]) / anchor_size) / VARIANCES[1]
    return xp.concatenate([center, size], axis=-1)


def decode_boxes(offsets: Any, anchors: Any) -> Any:
    """Returns the boxes of offsets from anchors; the inverse of `encode_boxes`.

    Example:
      >>> anchor = np.array([0.2, 0.2, 0.6, 0.4])
      >>> decode_boxes(np.array([1.0, 0.0, 0.0, 0.0]), anchor).round(2).tolist()
      [0.24, 0.2, 0.64, 0.4]
    """
    xp = offsets.__array_namespace__()
    anchor_size = anchors[..., 2:] - anchors[..., :2]
    anchor_center = (anchors[..., :2] + anchors[..., 2:]) / 2
    center = anchor_center + offsets[..., :2] * VARIANCES[0] * anchor_size
    half = anchor_size * xp.exp(offsets[..., 2:] * VARIANCES[1]) / 2
    return xp.concatenate([center - half, center + half], axis=-1)
