"""Losses of a detector that classifies and moves default boxes."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from echo_jax.data.detection.boxes import encode_boxes
from echo_jax.data.detection.matching import match_anchors

__all__ = ["Loss", "Targets", "detection_loss", "make_targets"]

Loss = Literal["multibox", "focal"]

# Background boxes that are learned for each matched one (Liu et al. 2016, section 2.2).
_NEGATIVES = 3

# Lin et al. 2017, section 5.1.
_FOCAL_ALPHA, _FOCAL_GAMMA = 0.25, 2.0


class Targets(NamedTuple):
    """What the default boxes of an image are to predict.

    Attributes:
      offsets: ``float32[A, 4]``; 0 where nothing matched.
      labels: The class, from 0, ``int32[A]``; of no meaning where nothing matched.
      is_matched: Which default boxes have an object, ``bool[A]``.
    """

    offsets: jax.Array
    labels: jax.Array
    is_matched: jax.Array


def make_targets(
    boxes: jax.Array, labels: jax.Array, mask: jax.Array, anchors: jax.Array
) -> Targets:
    """Returns what the default boxes of an image are to predict.

    Args:
      boxes: Its objects, ``float32[M, 4]``.
      labels: Their classes, from 0, ``int32[M]``.
      mask: Which rows are objects, ``bool[M]``.
      anchors: The default boxes, ``float32[A, 4]``.
    """
    truth, is_matched = match_anchors(boxes, mask, anchors)
    # Rows of padding have no size, whose logarithm would be infinite.
    chosen = jnp.where(is_matched[:, None], boxes[truth], anchors)
    return Targets(encode_boxes(chosen, anchors), labels[truth], is_matched)


def detection_loss(
    offsets: jax.Array, scores: jax.Array, targets: Targets, *, kind: Loss
) -> jax.Array:
    """Returns the loss of an image.

    The sum of the loss of places, smooth L1 over the matched boxes, and of the loss of
    classes, divided by the number of matched boxes. ``"multibox"`` classifies by
    softmax with background as class 0, and learns of the background boxes only those
    that are worst, three for each match; an image without objects has no loss then.
    ``"focal"`` classifies by a sigmoid for each class, over all boxes.

    Args:
      offsets: Predicted, ``float32[A, 4]``.
      scores: Predicted logits: ``float32[A, K + 1]`` for ``"multibox"``,
        ``float32[A, K]`` for ``"focal"``.
      targets: From `make_targets`.
      kind: Which loss of classes.

    Returns:
      ``float32[]``.
    """
    num_matched = targets.is_matched.sum()
    place = optax.huber_loss(offsets, targets.offsets).sum(axis=-1)
    place = jnp.where(targets.is_matched, place, 0).sum()
    of_classes = {"multibox": _mined, "focal": _focal}[kind]
    return (place + of_classes(scores, targets)) / jnp.maximum(num_matched, 1)


def _mined(scores: jax.Array, targets: Targets) -> jax.Array:
    """Returns the cross-entropy of matched boxes and of the worst of the others."""
    labels = jnp.where(targets.is_matched, targets.labels + 1, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    of_matched = jnp.where(targets.is_matched, losses, 0).sum()
    num_negatives = _NEGATIVES * targets.is_matched.sum()
    # No loss is negative, so that matched boxes come last, and add nothing.
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
