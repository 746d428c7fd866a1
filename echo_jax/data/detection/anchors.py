"""The default boxes of SSD, the objects that they match, and detections of them.

Liu et al. 2016, sections 2.2 and 3.4.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from echo_jax.data.detection.boxes import iou


@dataclass(frozen=True)
class NmsSettings:
    """Limits of the suppression; values of Liu et al. 2016, section 3.1."""

    min_score: float = 0.01
    max_overlap: float = 0.45  # With a better box of the same class.
    candidates: int = 400  # Boxes of each class, those with the highest scores.
    max_detections: int = 200  # In an image, over all classes.


class Detections(NamedTuple):
    """The detections of an image, the highest score first."""

    boxes: jax.Array  # float32[D, 4], as fractions of the image.
    scores: jax.Array  # float32[D]; 0 in empty rows.
    labels: jax.Array  # int32[D].


def detect(boxes: jax.Array, scores: jax.Array, settings: NmsSettings) -> Detections:
    """Returns the detections of A boxes with scores float32[A, K], in static shapes."""
    boxes = jnp.clip(boxes, 0, 1)
    candidates = min(settings.candidates, len(boxes))
    scores, index = jax.lax.top_k(scores.T, candidates)
    chosen = boxes[index]
    keep = jax.vmap(partial(suppress, max_overlap=settings.max_overlap))(
        chosen, scores >= settings.min_score
    )
    scores = jnp.where(keep, scores, 0)
    most = min(settings.max_detections, scores.size)
    top, flat = jax.lax.top_k(scores.reshape(-1), most)
    return Detections(
        boxes=chosen.reshape(-1, 4)[flat],
        scores=top,
        labels=(flat // candidates).astype(jnp.int32),
    )


def suppress(boxes: jax.Array, valid: jax.Array, *, max_overlap: float) -> jax.Array:
    """Returns the boxes that survive greedy suppression, bool[N]; best score first."""
    later = jnp.arange(len(boxes))

    def visit(i: jax.Array, keep: jax.Array) -> jax.Array:
        # Compute one row of overlaps at a time; all rows take 400 times the memory.
        overlap = iou(boxes[i][None], boxes)[0]
        is_loser = keep[i] & (overlap > max_overlap) & (later > i)
        return keep & ~is_loser

    return jax.lax.fori_loop(0, len(boxes), visit, valid)


# The paper's scales for COCO, as fractions of the image's side: 0.07 on the finest
# map, then from 0.15 in equal steps. The authors' code rounds the step of 0.1875, so
# the last scale but one is 0.87 and not 0.9.
_FINEST, _SECOND, _LAST = 0.07, 0.15, 0.87

_FEW, _MANY = (2.0,), (2.0, 3.0)
# Added to the overlap of an object with its best default box, so that this pair wins.
_FORCED = 2.0


# A cell has a square of the map's scale s, a larger one of sqrt(s s') with the next
# map's scale s', and boxes of the first area with ratios 2 and 1/2 (also 3 and 1/3 on
# the middle maps). Boxes may reach out of the image.
def default_boxes(map_sizes: Sequence[int]) -> np.ndarray:
    """Returns the default boxes, float32[A, 4]: map by map, row by row, cell by cell.

    Example:
      >>> default_boxes([38, 19, 10, 5, 3, 1]).shape
      (8732, 4)
    """
    all_ratios = _ratios(map_sizes)
    # The scale of each map, and one more for the last larger square.
    step = (_LAST - _SECOND) / (len(map_sizes) - 2)
    scales = [_FINEST, *(_SECOND + step * np.arange(len(map_sizes)))]
    boxes = []
    for number, (size, ratios) in enumerate(zip(map_sizes, all_ratios, strict=True)):
        shapes = _shapes(scales[number], scales[number + 1], ratios)
        middle = (np.arange(size) + 0.5) / size
        y, x = np.meshgrid(middle, middle, indexing="ij")
        center = np.stack([y, x], axis=-1).reshape(-1, 1, 2)
        corners = np.concatenate([center - shapes / 2, center + shapes / 2], axis=-1)
        boxes.append(corners.reshape(-1, 4))
    return np.concatenate(boxes).astype(np.float32)


def boxes_per_cell(map_sizes: Sequence[int]) -> tuple[int, ...]:
    """Returns the number of default boxes in a cell of each map.

    Example:
      >>> boxes_per_cell([38, 19, 10, 5, 3, 1])
      (4, 6, 6, 6, 4, 4)
    """
    return tuple(2 + 2 * len(ratios) for ratios in _ratios(map_sizes))


def _ratios(map_sizes: Sequence[int]) -> list[tuple[float, ...]]:
    if len(map_sizes) < 3:
        raise ValueError(
            f"default boxes need three maps or more, and there are {len(map_sizes)}; "
            "use larger images."
        )
    return [_FEW, *[_MANY] * (len(map_sizes) - 3), _FEW, _FEW]


def _shapes(scale: float, next_scale: float, ratios: Sequence[float]) -> np.ndarray:
    shapes = [[scale, scale], [np.sqrt(scale * next_scale)] * 2]
    for ratio in ratios:
        wide = [scale / np.sqrt(ratio), scale * np.sqrt(ratio)]
        shapes += [wide, wide[::-1]]
    return np.array(shapes)


class Match(NamedTuple):
    """The object of each default box of an image."""

    truth: jax.Array  # Its row, int32[A]; meaningless without a match.
    is_matched: jax.Array  # bool[A]; other boxes learn background.


# An object gets the default box of largest overlap. Any other default box gets the
# object of largest overlap, if that is at least `threshold`. If two objects want one
# default box, the larger overlap wins, then the first. No overlap means no match.
def match_anchors(
    boxes: jax.Array, mask: jax.Array, anchors: jax.Array, *, threshold: float = 0.5
) -> Match:
    """Matches the M objects of an image with its A default boxes."""
    overlap = jnp.where(mask[:, None], iou(boxes, anchors), 0)
    best = overlap.argmax(axis=1)
    is_best = best[:, None] == jnp.arange(len(anchors))[None]
    wanted = jnp.where(is_best & (overlap > 0), overlap + _FORCED, overlap)
    return Match(
        truth=wanted.argmax(axis=0).astype(jnp.int32),
        is_matched=wanted.max(axis=0) >= threshold,
    )
