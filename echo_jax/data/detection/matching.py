"""Matches default boxes with objects (Liu et al. 2016, section 2.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.data.detection.boxes import iou

__all__ = ["Match", "match_anchors"]

# Added to the overlap of an object with its best default box, so that this pair wins.
_FORCED = 2.0


class Match(NamedTuple):
    """The object of each default box of an image.

    Attributes:
      truth: The row of the object, int32[A]; meaningless without a match.
      is_matched: Whether there is an object, bool[A]; other boxes learn background.
    """

    truth: jax.Array
    is_matched: jax.Array


# An object gets the default box of largest overlap. Any other default box gets the
# object of largest overlap, if that is at least `threshold`. If two objects want one
# default box, the larger overlap wins, then the first. No overlap means no match.
def match_anchors(
    boxes: jax.Array,
    mask: jax.Array,
    anchors: jax.Array,
    *,
    threshold: float = 0.5,
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
