"""Which default box learns which object (Liu et al. 2016, section 2.2)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from echo_jax.data.detection.boxes import iou

__all__ = ["Match", "match_anchors"]

# Added to the overlap of a box with the object that it is the best for, so that
# nothing else can win.
_FORCED = 2.0


class Match(NamedTuple):
    """What each default box of an image learns.

    Attributes:
      truth: The row of its object, ``int32[A]``; of no meaning where nothing matched.
      is_matched: Whether it has an object, ``bool[A]``; the others learn background.
    """

    truth: jax.Array
    is_matched: jax.Array


def match_anchors(
    boxes: jax.Array,
    mask: jax.Array,
    anchors: jax.Array,
    *,
    threshold: float = 0.5,
) -> Match:
    """Matches the objects of an image with default boxes.

    Every object gets the default box that overlaps it most, and every other default
    box the object that it overlaps most, if by `threshold` at least. Where two
    objects want the same default box, it goes to the one that overlaps it more, and
    of equal ones to the first. An object that overlaps nothing is matched with nothing.

    Args:
      boxes: The objects, ``float32[M, 4]``.
      mask: Which rows are objects, ``bool[M]``; there may be none.
      anchors: The default boxes, ``float32[A, 4]``.
      threshold: Smallest overlap (IoU) of a match that is not forced.

    Returns:
      The match of every default box.
    """
    overlap = jnp.where(mask[:, None], iou(boxes, anchors), 0)
    best = overlap.argmax(axis=1)
    is_best = best[:, None] == jnp.arange(len(anchors))[None]
    wanted = jnp.where(is_best & (overlap > 0), overlap + _FORCED, overlap)
    return Match(
        truth=wanted.argmax(axis=0).astype(jnp.int32),
        is_matched=wanted.max(axis=0) >= threshold,
    )
