import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from detection_reference import detect as detect_by_loops
from detection_reference import match, overlap
from detection_reference import suppress as suppress_by_loops
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from echo_jax.data.detection.anchors import boxes_per_cell, default_boxes
from echo_jax.data.detection.boxes import decode_boxes, encode_boxes, iou
from echo_jax.data.detection.matching import match_anchors
from echo_jax.data.detection.nms import NmsSettings, detect, suppress

SSD300 = [38, 19, 10, 5, 3, 1]

# Compiled once: traced anew, every example of a property would take a second.
match_anchors = jax.jit(match_anchors)
suppress = jax.jit(functools.partial(suppress, max_overlap=0.45))
detect = jax.jit(detect, static_argnames="settings")


def random_boxes(rng, count, smallest=0.02):
    size = rng.uniform(smallest, 0.6, (count, 2))
    origin = rng.uniform(0, 1, (count, 2)) * (1 - size)
    return np.concatenate([origin, origin + size], axis=1).astype(np.float32)


def boxes_of(draw):
    origin, size = np.split(draw, 2, axis=1)
    return np.concatenate([origin, origin + 0.01 + size], axis=1)


floats = st.floats(0, 1, allow_subnormal=False)
some_boxes = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 6), st.just(4)), elements=floats
).map(boxes_of)


@given(some_boxes, some_boxes)
def test_overlap_is_that_of_the_reference(first, second):
    wanted = [[overlap(one, other) for other in second] for one in first]
    np.testing.assert_allclose(iou(first, second), wanted, atol=1e-12)


def test_overlap_by_hand():
    first = np.array([[0.0, 0.0, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5]])
    second = np.array([[0.2, 0.2, 0.6, 0.6], [0.5, 0.5, 0.5, 0.5]])
    # A quarter of each is shared: 0.04 of 0.28; and two points share nothing.
    np.testing.assert_allclose(iou(first, second), [[1 / 7, 0], [0, 0]], atol=1e-12)


def test_code_by_hand():
    anchor = np.array([0.2, 0.2, 0.6, 0.4])
    box = np.array([0.3, 0.2, 0.7, 0.6])
    # Centre (0.5, 0.4) from (0.4, 0.3) in sizes of 0.4 and 0.2; the width doubles.
    wanted = [0.25 / 0.1, 0.5 / 0.1, 0.0, np.log(2) / 0.2]
    np.testing.assert_allclose(encode_boxes(box, anchor), wanted, atol=1e-12)


@given(some_boxes, some_boxes)
def test_code_is_undone(boxes, anchors):
    again = decode_boxes(encode_boxes(boxes[:, None], anchors[None]), anchors[None])
    np.testing.assert_allclose(
        again, np.broadcast_to(boxes[:, None], again.shape), rtol=1e-12, atol=1e-12
    )


def test_numpy_and_jax_compute_the_same():
    rng = np.random.default_rng(0)
    boxes, anchors = random_boxes(rng, 30), random_boxes(rng, 30)
    for function in (iou, encode_boxes, decode_boxes):
        ours = jax.jit(function)(boxes, anchors)
        np.testing.assert_allclose(ours, function(boxes, anchors), rtol=1e-5, atol=1e-5)


def test_ssd300_has_8732_default_boxes():
    assert boxes_per_cell(SSD300) == (4, 6, 6, 6, 4, 4)
    assert default_boxes(SSD300).shape == (8732, 4)
    assert default_boxes(SSD300).dtype == np.float32
    counts = np.multiply(np.square(SSD300), boxes_per_cell(SSD300))
    assert counts.tolist() == [5776, 2166, 600, 150, 36, 4]


def centered(y, x, height, width):
    return [y - height / 2, x - width / 2, y + height / 2, x + width / 2]


def test_default_boxes_by_hand():
    boxes = default_boxes(SSD300)
    # The second cell of the first row of the finest map: of 38 cells, scale 0.07.
    y, x, flat = 0.5 / 38, 1.5 / 38, 0.07 / np.sqrt(2)
    larger = np.sqrt(0.07 * 0.15)
    np.testing.assert_allclose(
        boxes[4:8],
        [
            centered(y, x, 0.07, 0.07),
            centered(y, x, larger, larger),
            centered(y, x, flat, 2 * flat),
            centered(y, x, 2 * flat, flat),
        ],
        atol=1e-6,
    )
    # The last map is one cell of scale 0.87; there would be 1.05 behind it.
    larger = np.sqrt(0.87 * 1.05)
    np.testing.assert_allclose(boxes[-4], centered(0.5, 0.5, 0.87, 0.87), atol=1e-6)
    np.testing.assert_allclose(boxes[-3], centered(0.5, 0.5, larger, larger), atol=1e-6)
    # The first box of each map in between: scales in equal steps.
    starts = np.cumsum([5776, 2166, 600, 150])
    sides = (boxes[starts, 2:] - boxes[starts, :2]).tolist()
    np.testing.assert_allclose(
        sides, np.repeat([[0.15], [0.33], [0.51], [0.69]], 2, axis=1), atol=1e-6
    )


def test_middle_maps_have_flat_and_tall_boxes():
    boxes = default_boxes(SSD300)[5776 : 5776 + 6]
    height, width = (boxes[:, 2:] - boxes[:, :2]).T
    np.testing.assert_allclose(width / height, [1, 1, 2, 1 / 2, 3, 1 / 3], rtol=1e-5)
    area = height * width
    np.testing.assert_allclose(area[[0, 2, 3, 4, 5]], 0.15**2, rtol=1e-5)


def test_two_maps_are_too_few():
    with pytest.raises(ValueError, match="three maps or more, and there are 2"):
        default_boxes([2, 1])


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.floats(0.3, 0.7))
def test_matching_is_that_of_the_reference(seed, threshold):
    rng = np.random.default_rng(seed)
    # Few anchors, so that objects compete for them.
    boxes, anchors = random_boxes(rng, 8, 0.2), random_boxes(rng, 12, 0.2)
    mask = rng.uniform(size=8) < 0.7
    truth, is_matched = match_anchors(boxes, mask, anchors, threshold=threshold)
    found = np.where(is_matched, truth, -1).tolist()
    assert found == match(boxes, mask, anchors, threshold)


def test_every_object_gets_its_best_anchor_but_one_that_another_fits_better():
    anchors = jnp.array([[0.0, 0.0, 0.5, 0.5], [0.5, 0.5, 1.0, 1.0]])
    boxes = jnp.array(
        [[0.0, 0.0, 0.1, 0.1], [0.0, 0.0, 0.2, 0.2], [0.6, 0.6, 0.7, 0.7]]
    )
    truth, is_matched = match_anchors(boxes, jnp.ones(3, bool), anchors)
    # None overlaps by half; the second object fits the first anchor better.
    assert is_matched.all() and truth.tolist() == [1, 2]
    _, is_matched = match_anchors(boxes, jnp.zeros(3, bool), anchors)
    assert not is_matched.any()


@settings(max_examples=40)
@given(st.integers(0, 2**32))
def test_suppression_is_that_of_the_reference(seed):
    rng = np.random.default_rng(seed)
    boxes = random_boxes(rng, 24, 0.3)
    valid = rng.uniform(size=24) < 0.8
    keep = suppress(boxes, valid)
    assert keep.tolist() == suppress_by_loops(boxes, valid, 0.45)


@pytest.mark.parametrize("limit", [5, 1000])
def test_detections_are_those_of_the_reference(limit):
    rng = np.random.default_rng(3)
    boxes = random_boxes(rng, 60, 0.3) * 1.2 - 0.1  # some reach out of the image
    scores = rng.uniform(size=(60, 3)).astype(np.float32) ** 4
    kept = {
        "min_score": 0.05,
        "max_overlap": 0.45,
        "candidates": 30,
        "max_detections": limit,
    }
    found = detect(boxes, scores, settings=NmsSettings(**kept))
    wanted = detect_by_loops(boxes, scores, **kept)
    assert len(found.scores) == min(limit, 90)
    count = int((found.scores > 0).sum())
    assert count == len(wanted) > 4
    score, label, anchor = zip(*wanted, strict=True)
    np.testing.assert_array_equal(found.scores[:count], np.float32(score))
    assert found.labels[:count].tolist() == list(label)
    np.testing.assert_array_equal(
        found.boxes[:count], np.clip(boxes, 0, 1)[list(anchor)]
    )
    assert not found.scores[count:].any()
