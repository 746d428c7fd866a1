"""Losses of a detector that classifies and moves default boxes.

Both losses add the loss of places (smooth L1 over the matched boxes) to the loss of
classes, and divide by the number of matched boxes. ``"multibox"`` classifies by softmax
with background as class 0. It learns from only the three worst background boxes for
each match; an image without objects has no loss. ``"focal"`` classifies by a sigmoid
for each class, over all boxes.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from echo_jax.data.detection.boxes import encode_boxes
from echo_jax.data.detection.matching import match_anchors

__all__ = ["Loss", "Targets", "detection_loss", "make_targets"]

Loss = Literal["multibox", "focal"]

# Background boxes in the loss for each matched box (Liu et al. 2016, section 2.2).
_NEGATIVES = 3

# Lin et al. 2017, section 5.1.
_FOCAL_ALPHA, _FOCAL_GAMMA = 0.25, 2.0


# Where nothing matched, offsets are 0 and labels have no meaning.
class Targets(NamedTuple):
    """The targets of an image's default boxes: float32[A, 4], int32[A], bool[A]."""

    offsets: jax.Array
    labels: jax.Array
    is_matched: jax.Array


def make_targets(
    boxes: jax.Array, labels: jax.Array, mask: jax.Array, anchors: jax.Array
) -> Targets:
    """Returns the targets for M objects (padded, with `mask`) and A default boxes."""
    truth, is_matched = match_anchors(boxes, mask, anchors)
    # Rows of padding have size 0, whose logarithm is infinite.
    chosen = jnp.where(is_matched[:, None], boxes[truth], anchors)
    return Targets(encode_boxes(chosen, anchors), labels[truth], is_matched)


def detection_loss(
    offsets: jax.Array, scores: jax.Array, targets: Targets, *, kind: Loss
) -> jax.Array:
    """Returns the loss of an image, float32[]; see the module."""
    num_matched = targets.is_matched.sum()
    place = optax.huber_loss(offsets, targets.offsets).sum(axis=-1)
    place = jnp.where(targets.is_matched, place, 0).sum()
    of_classes = {"multibox": _mined, "focal": _focal}[kind]
    return (place + of_classes(scores, targets)) / jnp.maximum(num_matched, 1)


def _mined(scores: jax.Array, targets: Targets) -> jax.Array:
    """Returns the cross-entropy of matched boxes and of the worst other boxes."""
    labels = jnp.where(targets.is_matched, targets.labels + 1, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    of_matched = jnp.where(targets.is_matched, losses, 0).sum()
    num_negatives = _NEGATIVES * targets.is_matched.sum()
    # Losses are not negative, so matched boxes (0 here) come last and add nothing.
    worst = jnp.sort(jnp.where(targets.is_matched, 0, losses), descending=True)
    is_learned = jnp.arange(len(losses)) < num_negatives
    return of_matched + jnp.where(is_learned, worst, 0).sum()


def _focal(scores: jax.Array, targets: Targets) -> jax.Array:
    num_classes = scores.shape[-1]
    # A label out of range has a row of zeros: background.
    labels = jnp.where(targets.is_matched, targets.labels, num_classes)
    truth = jax.nn.one_hot(labels, num_classes)
    return optax.sigmoid_focal_loss(
        scores, truth, alpha=_FOCAL_ALPHA, gamma=_FOCAL_GAMMA
    ).sum()
