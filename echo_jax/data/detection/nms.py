"""Turns the scores of all default boxes into detections, on the device."""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.data.detection.boxes import iou

__all__ = ["Detections", "NmsSettings", "detect", "suppress"]


@dataclass(frozen=True)
class NmsSettings:
    """Limits of the suppression; values of Liu et al. 2016, section 3.1.

    Attributes:
      max_overlap: A box that overlaps a better one of its class by more is dropped.
      candidates: Boxes of each class to consider, those with the highest scores.
      max_detections: Limit for an image over all classes.
    """

    min_score: float = 0.01
    max_overlap: float = 0.45
    candidates: int = 400
    max_detections: int = 200


class Detections(NamedTuple):
    """The detections of an image, the highest score first.

    Attributes:
      boxes: float32[D, 4], as fractions of the image.
      scores: float32[D]; 0 in empty rows.
      labels: int32[D].
    """

    boxes: jax.Array
    scores: jax.Array
    labels: jax.Array


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
