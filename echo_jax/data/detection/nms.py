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
