"""COCO's average precision and recall of detections, by faster-coco-eval."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

_SIZES = ("small", "medium", "large")
METRICS = (
    *("mAP", "AP50", "AP75", *(f"AP_{size}" for size in _SIZES)),
    *("AR1", "AR10", "AR100", *(f"AR_{size}" for size in _SIZES)),
)
"""COCO's 12 numbers, in its order; the first is over overlaps of 0.5 to 0.95."""

# The first bytes of a gzip file.
_GZIP = b"\x1f\x8b"


class CocoEvaluator:
    """Collects all detections of a split and computes COCO's numbers."""

    def __init__(
        self, ground_truth: COCO, image_ids: Iterable[int] | None = None
    ) -> None:
        """Evaluates `image_ids`, or all images; categories are in label order."""
        self._truth = ground_truth
        known = ground_truth.imgs
        self._image_ids = list(known if image_ids is None else image_ids)
        for image_id in self._image_ids:
            if image_id not in known:
                raise ValueError(
                    f"image {image_id} is not in the ground truth of {len(known)} "
                    "images; use the annotations of the same split"
                )
        categories = ground_truth.dataset["categories"]
        self._category_ids = np.array([category["id"] for category in categories])
        self._rows: list[np.ndarray] = []

    def add(self, batch: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        """Adds the detections of a batch; boxes are float[B, D, 4], as fractions."""
        # A score of 0 means no detection, and a mask of 0 means padding.
        is_found = (np.asarray(outputs["scores"]) > 0) & (batch["mask"][:, None] > 0)
        image, _ = np.nonzero(is_found)
        boxes = np.asarray(outputs["boxes"], np.float64)[is_found]
        size = np.stack([batch["height"], batch["width"]], axis=-1)[image]
        low, high = boxes[:, :2] * size, boxes[:, 2:] * size
        labels = np.asarray(outputs["labels"])[is_found]
        columns = [
            batch["image_id"][image],
            low[:, 1],
            low[:, 0],
            high[:, 1] - low[:, 1],
            high[:, 0] - low[:, 0],
            np.asarray(outputs["scores"])[is_found],
            self._category_ids[labels],
        ]
        self._rows.append(np.stack(columns, axis=1).astype(np.float64))

    def result(self) -> dict[str, float]:
        """Returns COCO's numbers by name; -1 if no object could count."""
        rows = np.concatenate([np.empty((0, 7)), *self._rows])
        judge = COCOeval_faster(self._truth, self._truth.loadRes(rows), iouType="bbox")
        judge.params.imgIds = self._image_ids
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
        numbers = [float(number) for number in judge.stats[: len(METRICS)]]
        return dict(zip(METRICS, numbers, strict=True))


def read_ground_truth(
    data: bytes, categories: Sequence[Mapping[str, Any]], *, name: str
) -> COCO:
    """Reads an ``instances_*.json``, plain or gzip; `name` is for errors."""
    try:
        is_packed = data.startswith(_GZIP)
        truth = json.loads(gzip.decompress(data) if is_packed else data)
        return COCO({**truth, "categories": list(categories)})
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{name!r} holds no COCO annotations: {error!r}. Prepare the data "
            "again, with `echo-jax prepare coco`."
        ) from error


def ground_truth_of(
    records: Iterable[Mapping[str, Any]], categories: Sequence[Mapping[str, Any]]
) -> COCO:
    """Builds the ground truth from records of kind coco."""
    images, annotations = [], []
    for record in records:
        image = {name: int(record[name]) for name in ("height", "width")}
        images.append({"id": int(record["image_id"]), **image})
        boxes = np.frombuffer(record["boxes"], "<f4").reshape(-1, 4).astype(float)
        labels = np.frombuffer(record["labels"], "<i4").tolist()
        crowd = np.frombuffer(record["crowd"], np.uint8).tolist()
        areas = np.frombuffer(record["area"], "<f4").tolist()
        for (top, left, bottom, right), label, is_crowd, area in zip(
            boxes.tolist(), labels, crowd, areas, strict=True
        ):
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": images[-1]["id"],
                    "category_id": categories[label]["id"],
                    "bbox": [left, top, right - left, bottom - top],
                    "iscrowd": is_crowd,
                    "area": area,
                }
            )
    return COCO(
        {"images": images, "annotations": annotations, "categories": list(categories)}
    )
