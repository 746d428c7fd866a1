"""Boxes, matching, suppression and crops against loops in NumPy; COCO's numbers."""

import gzip
import io
import json
import os
from pathlib import Path

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from echo_jax.data.detection import (
    METRICS,
    CocoEvaluator,
    DecodeBoxes,
    DecodeForEvaluation,
    NmsSettings,
    SsdCrop,
    boxes_per_cell,
    decode_boxes,
    default_boxes,
    detect,
    encode_boxes,
    flip,
    ground_truth_of,
    iou,
    match_anchors,
    read_ground_truth,
    ssd_crop,
)

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

SSD300 = [38, 19, 10, 5, 3, 1]
# Compiled once: traced anew, every example of a property would take a second.
match_anchors = jax.jit(match_anchors)
detect = jax.jit(detect, static_argnames="settings")


def random_boxes(rng, count, smallest=0.02):
    size = rng.uniform(smallest, 0.6, (count, 2))
    origin = rng.uniform(0, 1, (count, 2)) * (1 - size)
    return np.concatenate([origin, origin + size], axis=1).astype(np.float32)


def overlap(one, other):
    height = min(one[2], other[2]) - max(one[0], other[0])
    width = min(one[3], other[3]) - max(one[1], other[1])
    both = max(height, 0) * max(width, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    either = sum(areas) - both
    return both / either if either > 0 else 0.0


def test_overlap_and_code_by_hand():
    first = np.array([[0.0, 0.0, 0.4, 0.4], [0.5, 0.5, 0.5, 0.5]])
    second = np.array([[0.2, 0.2, 0.6, 0.6], [0.5, 0.5, 0.5, 0.5]])
    # A quarter of each is shared: 0.04 of 0.28; and two points share nothing.
    np.testing.assert_allclose(iou(first, second), [[1 / 7, 0], [0, 0]], atol=1e-12)
    anchor, box = np.array([0.2, 0.2, 0.6, 0.4]), np.array([0.3, 0.2, 0.7, 0.6])
    # Centre (0.5, 0.4) from (0.4, 0.3) in sizes of 0.4 and 0.2; the width doubles.
    wanted = np.array([0.25 / 0.1, 0.5 / 0.1, 0.0, np.log(2) / 0.2])
    np.testing.assert_allclose(encode_boxes(box, anchor), wanted, atol=1e-12)
    np.testing.assert_allclose(decode_boxes(wanted, anchor), box, atol=1e-12)


def centered(y, x, height, width):
    return [y - height / 2, x - width / 2, y + height / 2, x + width / 2]


def test_the_default_boxes_of_ssd300_by_hand():
    assert boxes_per_cell(SSD300) == (4, 6, 6, 6, 4, 4)
    boxes = default_boxes(SSD300)
    assert (boxes.shape, boxes.dtype) == ((8732, 4), np.float32)
    # The second cell of the first row of the finest map: of 38 cells, scale 0.07.
    y, x, flat = 0.5 / 38, 1.5 / 38, 0.07 / np.sqrt(2)
    larger, last = np.sqrt(0.07 * 0.15), np.sqrt(0.87 * 1.05)
    expected = [
        centered(y, x, 0.07, 0.07),
        centered(y, x, larger, larger),
        centered(y, x, flat, 2 * flat),
        centered(y, x, 2 * flat, flat),
        # The last map is one cell of scale 0.87; there would be 1.05 behind it.
        centered(0.5, 0.5, 0.87, 0.87),
        centered(0.5, 0.5, last, last),
    ]
    found = boxes[[4, 5, 6, 7, -4, -3]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    # The first box of each map in between: scales in equal steps.
    sides = boxes[:, 2:] - boxes[:, :2]
    starts = np.cumsum([5776, 2166, 600, 150])
    steps = np.repeat([[0.15], [0.33], [0.51], [0.69]], 2, axis=1)
    np.testing.assert_allclose(sides[starts], steps, atol=1e-6)
    # Middle maps have flat and tall boxes of one area.
    height, width = sides[5776 : 5776 + 6].T
    np.testing.assert_allclose(width / height, [1, 1, 2, 1 / 2, 3, 1 / 3], rtol=1e-5)
    area = np.delete(height * width, 1)
    np.testing.assert_allclose(area, np.full(5, 0.15**2), rtol=1e-5)
    with pytest.raises(ValueError, match="three maps or more, and there are 2"):
        default_boxes([2, 1])


def match(boxes, mask, anchors, threshold):
    """The object of every anchor; -1 for background."""
    table = np.array([[overlap(box, anchor) for anchor in anchors] for box in boxes])
    table[~mask] = -1
    best = table.argmax(axis=0)
    truth = np.where(table.max(axis=0) >= threshold, best, -1)
    wishes = {}
    for j in np.flatnonzero(mask & (table.max(axis=1) > 0)):
        wishes.setdefault(table[j].argmax(), []).append(j)
    for a, wanting in wishes.items():
        truth[a] = max(wanting, key=lambda j: table[j, a])
    return truth.tolist()


@pytest.mark.parametrize("seed", range(8))
def test_matching_is_that_of_loops(seed):
    rng, threshold = np.random.default_rng(seed), 0.3 + seed / 20
    # Few anchors, so that objects compete for them.
    boxes, anchors = random_boxes(rng, 8, 0.2), random_boxes(rng, 12, 0.2)
    mask = rng.uniform(size=8) < 0.7
    truth, is_matched = match_anchors(boxes, mask, anchors, threshold=threshold)
    found = np.where(is_matched, truth, -1).tolist()
    assert found == match(boxes, mask, anchors, threshold)


def detect_by_loops(boxes, scores, limits):
    """Detections as (score, label, anchor), the highest score first."""
    found = []
    for label in range(scores.shape[1]):
        order = np.argsort(-scores[:, label], kind="stable")[: limits.candidates]
        kept = []
        for a in order[scores[order, label] >= limits.min_score]:
            others = [overlap(boxes[k], boxes[a]) for k in kept]
            if max(others, default=0) <= limits.max_overlap:
                kept.append(a)
                found.append((float(scores[a, label]), label, int(a)))
    found.sort(key=lambda detection: -detection[0])
    return found[: limits.max_detections]


@pytest.mark.parametrize("limit", [5, 1000])
def test_detections_are_those_of_loops(limit):
    limits = NmsSettings(0.05, 0.45, candidates=30, max_detections=limit)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        boxes = random_boxes(rng, 60, 0.3) * 1.2 - 0.1  # some reach out of the image
        scores = rng.uniform(size=(60, 3)).astype(np.float32) ** 4
        found = detect(boxes, scores, settings=limits)
        boxes = np.clip(boxes, 0, 1)
        wanted = detect_by_loops(boxes, scores, limits)
        assert len(found.scores) == min(limit, 90)
        count = int((found.scores > 0).sum())
        assert count == len(wanted) > 4
        score, label, anchor = zip(*wanted, strict=True)
        np.testing.assert_array_equal(found.scores[:count], np.float32(score))
        assert found.labels[:count].tolist() == list(label)
        np.testing.assert_array_equal(found.boxes[:count], boxes[list(anchor)])
        assert not found.scores[count:].any()


SIZE, COUNT = 60, 280


@pytest.fixture(scope="module")
def batch():
    """Smooth images of many boxes; a few have none."""
    rng = np.random.default_rng(0)
    size = rng.uniform(0.05, 0.7, (COUNT, 4, 2))
    origin = rng.uniform(0, 1, (COUNT, 4, 2)) * (1 - size)
    boxes = np.concatenate([origin, origin + size], axis=-1).astype(np.float32)
    mask = rng.uniform(size=(COUNT, 4)) < 0.7
    mask[::20] = False
    images = rng.integers(0, 256, (COUNT, SIZE, 2 * SIZE, 3), np.uint8)
    return {
        "image": np.stack([cv2.blur(image, (9, 9)) for image in images]),
        "boxes": np.where(mask[..., None], boxes, 0),
        "box_mask": mask,
        "box_labels": np.arange(4 * COUNT, dtype=np.int32).reshape(COUNT, 4),
    }


@pytest.fixture(scope="module")
def keys():
    return jax.random.split(jax.random.key(0), COUNT)


@pytest.fixture(scope="module")
def windows(batch, keys):
    return np.asarray(jax.jit(SsdCrop().windows)(batch, keys))


def test_windows_overlap_an_object_by_one_of_six_amounts_or_are_the_image(
    batch, windows
):
    top, left, height, width = windows.T
    assert windows.dtype == np.int32 and min(top.min(), left.min()) == 0
    assert (top + height).max() == SIZE and (left + width).max() == 2 * SIZE
    # Sides in fractions of the image's, and within the rounding to pixels.
    tall, broad = height / SIZE, width / (2 * SIZE)
    ratio = broad / tall
    assert (np.sqrt(tall * broad) > 0.3 - 1 / SIZE).all()
    assert 0.45 < ratio.min() < 0.6 and 1.7 < ratio.max() < 2.2
    is_whole = (windows[:, 2:] == [SIZE, 2 * SIZE]).all(axis=1)
    # One draw in seven is the whole image; the others where nothing fits.
    assert is_whole[~batch["box_mask"].any(axis=1)].all()
    assert 0.14 < is_whole.mean() < 0.6
    best = []
    for k in np.flatnonzero(~is_whole):
        objects = batch["boxes"][k][batch["box_mask"][k]]
        top, left, height, width = windows[k] / np.array([SIZE, 2 * SIZE] * 2)
        window = np.array([top, left, top + height, left + width])
        center = (objects[:, :2] + objects[:, 2:]) / 2
        assert ((center > window[:2]) & (center < window[2:])).all(axis=1).any()
        best.append(max(overlap(window, box) for box in objects))
    # Without conditions, windows of this size hardly ever overlap by a half.
    assert np.mean(np.array(best) >= 0.5) > 0.2 and min(best) < 0.15


def test_images_and_boxes_follow_the_window(batch, keys, windows):
    first = {name: value[:32] for name, value in batch.items()}
    cropped = jax.jit(SsdCrop())(first, keys[:32])
    assert cropped["image"].dtype == jnp.uint8
    np.testing.assert_array_equal(cropped["box_labels"], first["box_labels"])
    for k, (top, left, height, width) in enumerate(windows[:32]):
        part = first["image"][k, top : top + height, left : left + width]
        wanted = cv2.resize(part, (2 * SIZE, SIZE), interpolation=cv2.INTER_LINEAR)
        assert np.abs(np.asarray(cropped["image"][k], int) - wanted).max() <= 1
        pixels = first["boxes"][k] * ([SIZE, 2 * SIZE] * 2)
        moved = (pixels - [top, left] * 2) / ([height, width] * 2)
        center = (moved[:, :2] + moved[:, 2:]) / 2
        stays = first["box_mask"][k] & ((center >= 0) & (center < 1)).all(axis=1)
        np.testing.assert_array_equal(cropped["box_mask"][k], stays)
        wanted = np.where(stays[:, None], np.clip(moved, 0, 1), 0)
        np.testing.assert_allclose(cropped["boxes"][k], wanted, atol=1e-5)


def item_of(batch, k):
    item = {name: np.array(value[k]) for name, value in batch.items()}
    for value in item.values():
        value.flags.writeable = False
    return item


def test_the_host_crops_as_the_device_does(batch, windows):
    """The same law for one item: a window of the image, and the boxes in it."""
    is_whole = []
    for k in range(COUNT):
        item = item_of(batch, k)
        cropped, again = (ssd_crop(item, seed=1000 + k) for _ in range(2))
        for name, value in cropped.items():
            assert (value.shape, value.dtype) == (item[name].shape, item[name].dtype)
            np.testing.assert_array_equal(value, again[name])
        stays = cropped["box_mask"]
        assert not (stays & ~item["box_mask"]).any()
        assert not cropped["boxes"][~stays].any()
        assert stays.any() == item["box_mask"].any()
        is_whole.append(np.array_equal(cropped["image"], item["image"]))
        if is_whole[-1]:
            np.testing.assert_array_equal(cropped["boxes"], item["boxes"])
    on_device = (windows[:, 2:] == [SIZE, 2 * SIZE]).all(axis=1)
    assert abs(np.mean(is_whole) - on_device.mean()) < 0.12


def test_the_host_flips_half_of_the_items(batch):
    item = item_of(batch, 1)
    assert flip(item, seed=2) is item
    flipped = flip(item, seed=3)
    np.testing.assert_array_equal(flipped["image"], item["image"][:, ::-1])
    top, left, bottom, right = item["boxes"].T
    wanted = np.stack([top, 1 - right, bottom, 1 - left], axis=-1)
    wanted[~item["box_mask"]] = 0
    np.testing.assert_allclose(flipped["boxes"], wanted, atol=1e-7)
    assert item["box_mask"].any()


SCENE = np.full((40, 80, 3), 90, np.uint8)
SCENE[:20] = 200


def record(boxes, *, crowd=None, labels=None, **fields):
    count = len(boxes)
    return {
        "image": cv2.imencode(".png", SCENE)[1].tobytes(),
        "image_id": 17,
        "height": 40,
        "width": 80,
        "boxes": np.array(boxes, "<f4").tobytes(),
        "labels": np.array(labels or range(count), "<i4").tobytes(),
        "crowd": np.array(crowd or [0] * count, np.uint8).tobytes(),
        "area": np.ones(count, "<f4").tobytes(),
        **fields,
    }


def test_records_become_items_of_fixed_shapes():
    decode = DecodeBoxes(dict, size=20, max_boxes=3)
    scene = record([[10, 20, 30, 60], [0, 0, 40, 80]], labels=[5, 2])
    item = decode(scene)
    assert item["image"].shape == (20, 20, 3) and item["image"].dtype == np.uint8
    assert (item["image"][:10] == 200).all() and (item["image"][10:] == 90).all()
    wanted = [[0.25, 0.25, 0.75, 0.75], [0, 0, 1, 1], [0, 0, 0, 0]]
    np.testing.assert_array_equal(item["boxes"], np.float32(wanted))
    assert item["box_mask"].tolist() == [True, True, False]
    assert item["box_labels"].tolist() == [5, 2, 0]
    assert item["box_labels"].dtype == np.int32
    nothing = decode(record([]))
    assert not nothing["box_mask"].any() and nothing["boxes"].shape == (3, 4)
    known = DecodeForEvaluation(decode)(scene)
    assert (known["image_id"], known["height"], known["width"]) == (17, 40, 80)
    assert known.keys() - item.keys() == {"image_id", "height", "width"}


def test_crowds_and_empty_boxes_are_left_out_and_the_largest_kept():
    boxes = [[0, 0, 5, 5], [0, 0, 40, 80], [0, 0, 9, 9], [3, 3, 3, 9], [0, 0, 20, 20]]
    for most, kept in ((2, [2, 4]), (9, [0, 2, 4])):
        item = DecodeBoxes(dict, 20, most)(record(boxes, crowd=[0, 1, 0, 0, 0]))
        assert item["box_labels"][item["box_mask"]].tolist() == kept


def test_boxes_beyond_the_limit_that_nobody_counted_are_said():
    boxes = [[0, 0, 5, 5], [0, 0, 40, 80], [0, 0, 9, 9]]
    decode = DecodeBoxes(dict, 20, 1, warns=True)
    decode(record(boxes, crowd=[1, 0, 1]))
    with pytest.warns(UserWarning, match="image 17 has 2 boxes, .* 1 are kept"):
        decode(record(boxes, crowd=[1, 0, 0]))


def test_boxes_lie_in_the_pixels_as_stored():
    """However the camera was held: COCO's boxes know nothing of EXIF."""
    exif = Image.Exif()
    exif[0x0112] = 6
    file = io.BytesIO()
    Image.fromarray(SCENE).save(file, "JPEG", quality=95, exif=exif)
    scene = record([[0, 0, 20, 80]], image=file.getvalue())
    item = DecodeBoxes(dict, 20, 1)(scene)
    assert abs(item["image"][:9].astype(int) - 200).max() < 5
    assert abs(item["image"][11:].astype(int) - 90).max() < 5
    np.testing.assert_array_equal(item["boxes"], [[0, 0, 0.5, 1]])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"boxes": bytes(64)}, r"17 has 4 boxes, 2 labels and 2 flags"),
        ({"height": 80, "width": 40}, r"image 17 has \(40, 80\) rows .*\(80, 40\)"),
        ({"image": b"no image"}, "image 17: "),
    ],
    ids=["boxes", "size", "image"],
)
def test_a_damaged_record_is_refused(fields, message):
    scene = record([[0, 0, 5, 5], [0, 0, 9, 9]]) | fields
    with pytest.raises(ValueError, match=message):
        DecodeBoxes(dict, 8, 4)(scene)


CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 10, "name": "dog"}]
# Two images with a small dog, and one with a crowd of them.
TRUTH = {
    "images": [{"id": k, "height": 40, "width": 80} for k in (5, 15, 25)],
    "annotations": [
        {"id": k, "image_id": 10 * k - 5, "category_id": 10, "iscrowd": int(k == 3)}
        | {"bbox": [8.0, 4.0, 20.0, 30.0], "area": 500.0}
        for k in (1, 2, 3)
    ],
    "categories": CATEGORIES,
}


def judge(source, results, batch_size, truth, image_ids=None):
    """The numbers of these results, given in padded batches."""
    evaluator = CocoEvaluator(source, image_ids)
    labels = {c["id"]: k for k, c in enumerate(truth["categories"])}
    by_image = {image["id"]: [] for image in truth["images"]}
    for result in results:
        by_image[result["image_id"]].append(result)
    shape = batch_size, max(map(len, by_image.values())) + 2
    for start in range(0, len(by_image), batch_size):
        images = truth["images"][start : start + batch_size]
        mask = (np.arange(batch_size) < len(images)).astype(np.float32)
        # Padding repeats an image with its detections: they must not count.
        images += [images[0]] * (batch_size - len(images))
        about = {"id": "image_id", "height": "height", "width": "width"}
        batch = {to: np.array([i[name] for i in images]) for name, to in about.items()}
        boxes, scores = np.zeros((*shape, 4)), np.zeros(shape)
        found = np.zeros(shape, np.int32)
        for row, image in enumerate(images):
            whole = np.array([image["height"], image["width"]] * 2)
            for k, result in enumerate(by_image[image["id"]]):
                x, y, w, h = result["bbox"]
                boxes[row, k] = np.array([y, x, y + h, x + w]) / whole
                scores[row, k] = result["score"]
                found[row, k] = labels[result["category_id"]]
        outputs = {"boxes": boxes, "scores": scores, "labels": found}
        evaluator.add({**batch, "mask": mask}, outputs)
    return evaluator.result()


def written(truth):
    packed = gzip.compress(json.dumps(truth).encode())
    return read_ground_truth(packed, truth["categories"], name="")


@pytest.mark.skipif("ECHO_JAX_DATA" not in os.environ, reason="ECHO_JAX_DATA is unset")
def test_the_twelve_numbers_of_cocos_own_example():
    name = f"{os.environ['ECHO_JAX_DATA']}/coco_eval/instances_val2014_"
    file = Path(f"{name}100.json.gz").read_bytes()
    results = Path(f"{name}fakebbox100_results.json.gz").read_bytes()
    truth = json.loads(gzip.decompress(file))
    source = read_ground_truth(file, truth["categories"], name="")
    # As float64: one of these boxes syncs a threshold to the last digit, so that
    # float32 fractions of the image, rounded, miss it (0.50442 instead of 0.50458).
    found = judge(source, json.loads(gzip.decompress(results)), 16, truth)
    # pycocotools on the same files, in its order.
    published = """
    0.50458070 0.69697272 0.57298167 0.58562572 0.51939969 0.50139790
    0.38681278 0.59367958 0.59535298 0.63981096 0.56642060 0.56429060
    """
    wanted = np.array(published.split(), float)
    np.testing.assert_allclose([*found.values()], wanted, rtol=0, atol=1e-6)


def test_numbers_by_hand_do_not_depend_on_batches():
    def precision(*results, of=None):
        found = [judge(written(TRUTH), results, n, TRUTH, of) for n in (1, 2, 5)]
        assert found[0] == found[1] == found[2]
        assert list(found[0]) == list(METRICS)
        assert found[0]["mAP"] == found[0]["AP50"] == found[0]["AP_small"]
        return found[0]["mAP"], found[0]["AR100"]

    right, missed, crowd = TRUTH["annotations"]
    right, crowd = {**right, "score": 0.8}, {**crowd, "score": 0.9}
    # The precision is 1 up to a recall of a half: at 51 of 101 places.
    assert precision(right) == pytest.approx((51 / 101, 0.5))
    assert precision(right, crowd) == pytest.approx((51 / 101, 0.5))
    # A detection of padding would stand between the two.
    assert precision(right, {**missed, "score": 0.7}) == pytest.approx((1, 1))
    wrong = {**missed, "bbox": [50.0, 4.0, 20.0, 30.0], "score": 0.9}
    assert precision(right, wrong) == pytest.approx((0.5 * 51 / 101, 0.5))
    assert precision(right, wrong, of=[5]) == pytest.approx((1, 1))
    assert precision({**right, "category_id": 3}) == precision() == (0, 0)
    with pytest.raises(ValueError, match="image 6 is not in the ground truth of 3"):
        CocoEvaluator(written(TRUTH), [6])


def test_records_are_the_same_ground_truth():
    records = []
    for image, known in zip(TRUTH["images"], TRUTH["annotations"], strict=True):
        about = {**image, "area": np.array([500], "<f4").tobytes()}
        about["image_id"] = image["id"]
        crowd = [known["iscrowd"]]
        records.append(record([[4, 8, 34, 28]], crowd=crowd, labels=[1], **about))
    assert ground_truth_of(records, CATEGORIES).dataset == TRUTH


@pytest.mark.parametrize("content", [b"no gzip", b"[1]"])
def test_other_files_are_no_annotations(content):
    with pytest.raises(ValueError, match=r"annotations\.json\.gz' holds no COCO"):
        read_ground_truth(content, CATEGORIES, name="annotations.json.gz")
