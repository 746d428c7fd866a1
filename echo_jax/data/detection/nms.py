"""From scores of all default boxes to the detections of an image, on the device."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.data.detection.boxes import iou

__all__ = ["Detections", "NmsSettings", "detect", "suppress"]


@dataclass(frozen=True)
class NmsSettings:
    """What is kept of the scores; the values of Liu et al. 2016, section 3.1.

    Attributes:
      min_score: A box with a lower score is no detection of a class.
      max_overlap: Of two boxes of a class that overlap (IoU) by more, the one with
        the higher score stays.
      candidates: Boxes of each class that are looked at: those with the highest
        scores, as in the authors' code.
      max_detections: Of an image over all classes.
    """

    min_score: float = 0.01
    max_overlap: float = 0.45
    candidates: int = 400
    max_detections: int = 200


class Detections(NamedTuple):
    """What was found in an image, the highest score first.

    Attributes:
      boxes: ``float32[D, 4]``, as fractions of the image.
      scores: ``float32[D]``; 0 in the rows that hold no detection.
      labels: ``int32[D]``.
    """

    boxes: jax.Array
    scores: jax.Array
    labels: jax.Array


def detect(boxes: jax.Array, scores: jax.Array, settings: NmsSettings) -> Detections:
    """Returns the detections of an image; shapes are static, so it can be compiled.

    Args:
      boxes: One for each default box, ``float32[A, 4]``; they are cut at the image's
        edges.
      scores: How likely each shows each class, ``float32[A, K]``.
      settings: What is kept.

    Returns:
      D detections, the smaller of ``max_detections`` and all candidates.
    """
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
    """Returns which boxes survive greedy non-maximum suppression.

    Args:
      boxes: Of one class, the highest score first, ``float32[N, 4]``.
      valid: Which of them take part, ``bool[N]``.
      max_overlap: See `NmsSettings`.

    Returns:
      ``bool[N]``: a valid box stays unless it overlaps a better one that stays.
    """
    later = jnp.arange(len(boxes))

    def visit(i: jax.Array, keep: jax.Array) -> jax.Array:
        # One row of overlaps at a time: all of them would take 400 times the memory.
        overlap = iou(boxes[i][None], boxes)[0]
        is_loser = keep[i] & (overlap > max_overlap) & (later > i)
        return keep & ~is_loser

    return jax.lax.fori_loop(0, len(boxes), visit, valid)
