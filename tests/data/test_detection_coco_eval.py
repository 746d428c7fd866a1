import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO as OracleCOCO
from pycocotools.cocoeval import COCOeval as OracleEval

from echo_jax.data.detection.coco_eval import (
    METRICS,
    CocoEvaluator,
    ground_truth_of,
    read_ground_truth,
)

needs_data = pytest.mark.skipif(
    "ECHO_JAX_DATA" not in os.environ,
    reason="ECHO_JAX_DATA names no folder with the real data",
)
# pycocotools on the same files, to full precision, in its order.
PUBLISHED = [
    0.5045806987249628,
    0.6969727247299577,
    0.5729816669904824,
    0.5856257209410443,
    0.5193996948036719,
    0.5013978986347466,
    0.38681277964578054,
    0.5936795762842003,
    0.595352982877607,
    0.6398109626113442,
    0.5664205978994309,
    0.5642905982905982,
]
CATEGORIES = [{"id": 7 * k + 3, "name": f"class {k}"} for k in range(4)]


def random_truth(rng, num_images):
    """COCO's JSON: objects and crowds of all sizes, in images of several sizes."""
    images, annotations = [], []
    for image_id in 10 * np.arange(num_images) + 5:
        height, width = rng.integers(100, 600, 2).tolist()
        images.append({"id": int(image_id), "height": height, "width": width})
        for _ in range(rng.integers(0, 6)):
            size = rng.uniform(0.02, 0.8, 2) * (width, height)
            origin = rng.uniform(0, 1, 2) * ((width, height) - size)
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": int(image_id),
                    "category_id": CATEGORIES[rng.integers(4)]["id"],
                    "bbox": [*origin.tolist(), *size.tolist()],
                    "area": float(size.prod() * rng.uniform(0.5, 1)),
                    "iscrowd": int(rng.uniform() < 0.1),
                }
            )
    return {"images": images, "annotations": annotations, "categories": CATEGORIES}


def random_results(rng, truth):
    """Objects moved a little, once as what they are and once as the first class."""
    sizes = {
        image["id"]: (image["width"], image["height"]) for image in truth["images"]
    }
    results = []
    for made, label in ((truth["annotations"], None), (truth["annotations"], 0)):
        for annotation in made:
            width, height = sizes[annotation["image_id"]]
            x, y, w, h = annotation["bbox"] + rng.normal(size=4) * 6
            category = annotation["category_id"] if label is None else 3
            results.append(
                {
                    "image_id": annotation["image_id"],
                    "category_id": category,
                    "bbox": [x, y, min(max(w, 2), width), min(max(h, 2), height)],
                    "score": round(rng.uniform(0.01, 1), 3),
                }
            )
    return results


def as_batches(truth, results, batch_size):
    """What the evaluator receives of these results: padded batches."""
    labels = {c["id"]: k for k, c in enumerate(truth["categories"])}
    by_image = {image["id"]: [] for image in truth["images"]}
    for result in results:
        by_image[result["image_id"]].append(result)
    most = max(map(len, by_image.values())) + 2
    images = truth["images"]
    for start in range(0, len(images), batch_size):
        part = images[start : start + batch_size]
        # Padding repeats an image with its detections: they must not count.
        part += [part[0]] * (batch_size - len(part))
        batch = {
            "image_id": np.array([image["id"] for image in part]),
            "height": np.array([image["height"] for image in part]),
            "width": np.array([image["width"] for image in part]),
            "mask": (start + np.arange(batch_size) < len(images)).astype(np.float32),
        }
        boxes = np.zeros((batch_size, most, 4))
        scores = np.zeros((batch_size, most))
        found = np.zeros((batch_size, most), np.int32)
        for row, image in enumerate(part):
            whole = np.array([image["height"], image["width"]] * 2)
            for k, result in enumerate(by_image[image["id"]]):
                x, y, w, h = result["bbox"]
                boxes[row, k] = np.array([y, x, y + h, x + w]) / whole
                scores[row, k] = result["score"]
                found[row, k] = labels[result["category_id"]]
        yield batch, {"boxes": boxes, "scores": scores, "labels": found}


def judge(source, results, batch_size, truth, image_ids=None):
    """The numbers of these results, given in batches."""
    evaluator = CocoEvaluator(source, image_ids)
    for batch, outputs in as_batches(truth, results, batch_size):
        evaluator.add(batch, outputs)
    return evaluator.result()


def oracle(truth, results, image_ids=None):
    with open(os.devnull, "w") as nowhere, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", nowhere)
        coco = OracleCOCO()
        coco.dataset = {**truth, "info": {}}
        coco.createIndex()
        judge = OracleEval(coco, coco.loadRes(results), "bbox")
        if image_ids is not None:
            judge.params.imgIds = image_ids
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats.tolist()


def written(truth):
    packed = gzip.compress(json.dumps(truth).encode())
    return read_ground_truth(packed, truth["categories"], name="")


@needs_data
def test_the_twelve_numbers_of_cocos_own_example():
    folder = Path(os.environ["ECHO_JAX_DATA"]) / "coco_eval"
    file = folder / "instances_val2014_100.json.gz"
    truth = json.loads(gzip.decompress(file.read_bytes()))
    results = folder / "instances_val2014_fakebbox100_results.json.gz"
    results = json.loads(gzip.decompress(results.read_bytes()))
    source = read_ground_truth(file.read_bytes(), truth["categories"], name="")
    # As float64: one of these boxes meets a threshold to the last digit, so that
    # float32 fractions of the image, rounded, miss it (0.50442 instead of 0.50458).
    found = judge(source, results, 16, truth)
    assert list(found) == list(METRICS)
    np.testing.assert_allclose(list(found.values()), PUBLISHED, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_pycocotools(seed):
    rng = np.random.default_rng(seed)
    truth = random_truth(rng, 12)
    results = random_results(rng, truth)
    found = judge(written(truth), results, 5, truth)
    wanted = oracle(truth, results)
    assert 0.05 < wanted[0] < 0.9
    np.testing.assert_allclose(list(found.values()), wanted, rtol=0, atol=1e-12)


def test_batches_do_not_matter_and_padding_never_counts():
    rng = np.random.default_rng(4)
    truth = random_truth(rng, 9)
    results = random_results(rng, truth)
    found = [judge(written(truth), results, size, truth) for size in (1, 4, 9, 16)]
    assert all(numbers == found[0] for numbers in found)


def test_only_the_images_that_are_asked_for_count():
    rng = np.random.default_rng(5)
    truth = random_truth(rng, 10)
    results = random_results(rng, truth)
    ids = [image["id"] for image in truth["images"]][::2]
    found = judge(written(truth), results, 4, truth, ids)
    wanted = oracle(truth, results, ids)
    np.testing.assert_allclose(list(found.values()), wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="image 6 is not in the ground truth of 10"):
        CocoEvaluator(written(truth), [6])


def test_images_without_detections_count():
    rng = np.random.default_rng(6)
    truth = random_truth(rng, 8)
    # All of them right, but in the first images only.
    first = truth["annotations"][:6]
    results = [{**annotation, "score": 0.9} for annotation in first]
    found = judge(written(truth), results, 3, truth)
    assert 0 < found["mAP"] < 1 and found["AR100"] < 1
    nothing = judge(written(truth), [], 3, truth)
    assert nothing["mAP"] == 0 and nothing["AR100"] == 0


def test_records_are_the_same_ground_truth():
    rng = np.random.default_rng(7)
    truth = random_truth(rng, 8)
    # Values that float32 holds exactly, as records do.
    for annotation in truth["annotations"]:
        annotation["bbox"] = np.round(annotation["bbox"]).tolist()
        annotation["area"] = float(np.round(annotation["area"]))
    labels = {category["id"]: k for k, category in enumerate(CATEGORIES)}
    records = []
    for image in truth["images"]:
        mine = [a for a in truth["annotations"] if a["image_id"] == image["id"]]
        boxes = [[y, x, y + h, x + w] for x, y, w, h in (a["bbox"] for a in mine)]
        columns = {
            "boxes": np.array(boxes, "<f4"),
            "labels": np.array([labels[a["category_id"]] for a in mine], "<i4"),
            "crowd": np.array([a["iscrowd"] for a in mine], np.uint8),
            "area": np.array([a["area"] for a in mine], "<f4"),
        }
        columns = {name: column.tobytes() for name, column in columns.items()}
        about = {name: image[name] for name in ("height", "width")}
        records.append({"image_id": image["id"], **about, **columns})
    results = random_results(rng, truth)
    numbers = [
        judge(source, results, 4, truth)
        for source in (ground_truth_of(records, CATEGORIES), written(truth))
    ]
    assert numbers[0] == numbers[1] and numbers[0]["mAP"] > 0


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"[1]"), b""],
    # Not the bytes, which hold the time: every test process must name tests alike.
    ids=["no gzip", "no annotations", "empty"],
)
def test_other_files_are_no_annotations(content):
    with pytest.raises(ValueError, match=r"annotations\.json\.gz' holds no COCO"):
        read_ground_truth(content, CATEGORIES, name="annotations.json.gz")
