import jax
import numpy as np
import pytest

from echo_jax.data.detection.boxes import encode_boxes
from echo_jax.workloads.detection_loss import Targets, detection_loss, make_targets

# Compiled as wholes: operation by operation they take ten times as long.
detection_loss = jax.jit(detection_loss, static_argnames="kind")
make_targets = jax.jit(make_targets)

ANCHORS = np.array(
    [
        [0.0, 0.0, 0.5, 0.5],
        [0.0, 0.5, 0.5, 1.0],
        [0.5, 0.0, 1.0, 0.5],
        [0.5, 0.5, 1.0, 1.0],
    ],
    np.float32,
)


def targets_of(labels, num_anchors=8):
    """Targets whose first boxes are matched with these labels, at offset 0."""
    is_matched = np.arange(num_anchors) < len(labels)
    padded = np.zeros(num_anchors, np.int32)
    padded[: len(labels)] = labels
    return Targets(np.zeros((num_anchors, 4), np.float32), padded, is_matched)


def test_targets_are_the_code_of_the_matched_objects():
    boxes = np.array([[0.5, 0.6, 0.9, 1.0], [0.1, 0.0, 0.6, 0.5], [0.0] * 4])
    mask = np.array([True, True, False])
    targets = make_targets(np.float32(boxes), np.array([4, 7, 0]), mask, ANCHORS)
    assert targets.is_matched.tolist() == [True, False, False, True]
    assert np.asarray(targets.labels)[[0, 3]].tolist() == [7, 4]
    for anchor, row in ((0, 1), (3, 0)):
        wanted = encode_boxes(boxes[row], ANCHORS[anchor])
        np.testing.assert_allclose(targets.offsets[anchor], wanted, atol=1e-5)
    # Padding has no size, whose logarithm is infinite: it must not get in.
    assert not np.asarray(targets.offsets)[1:3].any()


def test_multibox_loss_by_hand():
    # One match, of class 0; so three background boxes are learned: the worst.
    targets = targets_of([0])
    offsets = np.zeros((8, 4), np.float32)
    offsets[0] = [0.5, -2.0, 0.0, 0.0]
    offsets[5] = 100.0  # not matched: moves nothing
    scores = np.zeros((8, 3), np.float32)
    scores[4:, 0] = [5.0, 4.0, 3.0, 2.0]
    loss = detection_loss(offsets, scores, targets, kind="multibox")
    smooth_l1 = 0.5 * 0.5**2 + (2.0 - 0.5)
    # The match and the three other boxes without an opinion: log 3 each.
    np.testing.assert_allclose(loss, smooth_l1 + 4 * np.log(3), rtol=1e-6)


def test_losses_are_means_over_the_matches():
    rng = np.random.default_rng(0)
    offsets = np.tile(rng.normal(size=4), (8, 1)).astype(np.float32)
    scores = np.tile(rng.normal(size=3), (8, 1)).astype(np.float32)
    one, two = (
        detection_loss(offsets, scores, targets_of(labels), kind="multibox")
        for labels in ([1], [1, 1])
    )
    # Of equal boxes, twice as many matches and mined boxes are the same mean.
    np.testing.assert_allclose(one, two, rtol=1e-6)


def test_hard_negatives_are_three_for_each_match_and_the_worst():
    rng = np.random.default_rng(1)
    scores = rng.normal(size=(40, 5)).astype(np.float32)
    targets = targets_of([3, 0, 2, 2], num_anchors=40)
    gradient = jax.jit(jax.grad(detection_loss, argnums=1), static_argnames="kind")(
        np.zeros((40, 4), np.float32), scores, targets, kind="multibox"
    )
    learned = np.flatnonzero(np.abs(gradient).sum(axis=1))
    background = np.log(np.exp(scores).sum(axis=1)) - scores[:, 0]
    worst = 4 + np.argsort(-background[4:])[:12]
    assert set(learned) == {0, 1, 2, 3, *worst}


@pytest.mark.parametrize("kind", ["multibox", "focal"])
def test_an_image_without_objects_is_finite(kind):
    outputs = {"multibox": 4, "focal": 3}[kind]
    boxes = np.zeros((3, 4), np.float32)
    none = make_targets(boxes, np.zeros(3, int), np.zeros(3, bool), ANCHORS)
    both = jax.value_and_grad(detection_loss, argnums=(0, 1))
    loss, gradients = jax.jit(both, static_argnames="kind")(
        np.ones((4, 4), np.float32), np.ones((4, outputs), np.float32), none, kind=kind
    )
    assert all(np.isfinite(g).all() for g in gradients)
    assert not gradients[0].any()
    # Nothing is learned for lack of a match, but a focal loss learns background.
    assert loss == 0 if kind == "multibox" else loss > 0


def test_focal_loss_by_hand():
    scores = np.zeros((8, 2), np.float32)
    scores[0, 1] = np.log(3)  # probability 3/4
    loss = detection_loss(
        np.zeros((8, 4), np.float32), scores, targets_of([1]), kind="focal"
    )
    right = -0.25 * (1 / 4) ** 2 * np.log(3 / 4)
    wrong = -0.75 * (1 / 2) ** 2 * np.log(1 / 2)
    np.testing.assert_allclose(loss, right + 15 * wrong, rtol=1e-5)
