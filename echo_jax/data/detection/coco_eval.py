"""COCO's average precision and recall of detections, by faster-coco-eval."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from faster_coco_eval import COCO, COCOeval_faster

__all__ = ["METRICS", "CocoEvaluator", "ground_truth_of", "read_ground_truth"]

METRICS = (
    "mAP",
    "AP50",
    "AP75",
    "AP_small",
    "AP_medium",
    "AP_large",
    "AR1",
    "AR10",
    "AR100",
    "AR_small",
    "AR_medium",
    "AR_large",
)
"""COCO's 12 numbers, in its order; the first is over overlaps of 0.5 to 0.95."""

# What a file of gzip begins with.
_GZIP = b"\x1f\x8b"


class CocoEvaluator:
    """Collects the detections of a split, and judges them.

    Every image of the ground truth counts, or every one of those that are asked for,
    also those without a detection. Crowds, areas and the limit of 100 detections for
    each image are COCO's. It is exact for any size of batch: it keeps all detections.

    Example:
      >>> truth = ground_truth_of([record], [{"id": 18, "name": "dog"}])
      >>> evaluator = CocoEvaluator(truth)
      >>> evaluator.add(batch, detections)
      >>> evaluator.result()["mAP"]
      1.0
    """

    def __init__(
        self, ground_truth: COCO, image_ids: Iterable[int] | None = None
    ) -> None:
        """Starts without detections.

        Args:
          ground_truth: From `read_ground_truth` or `ground_truth_of`; its categories
            are in the order of the labels.
          image_ids: The images to judge; None for all.

        Raises:
          ValueError: If the ground truth has not one of the images.
        """
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
        """Takes the detections of a batch.

        Args:
          batch: ``"image_id"``, ``"height"`` and ``"width"`` of the images in pixels,
            ``int[B]``, and ``"mask"``, ``float32[B]``: 0 for padding, which is left
            out.
          outputs: ``"boxes"``, ``float[B, D, 4]`` as fractions of the image;
            ``"scores"``, ``float[B, D]``, 0 where there is no detection; and
            ``"labels"``, ``int[B, D]``.
        """
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
        """Returns COCO's numbers by name; -1 where no object could have counted."""
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
    """Reads the annotations of a split, as COCO publishes them.

    Args:
      data: The content of an ``instances_*.json``, or gzip of it.
      categories: ``{"id", "name"}`` of every label, in order.
      name: What the file is called in an error.

    Returns:
      The ground truth, whose categories are these.

    Raises:
      ValueError: If the file is no such JSON.
    """
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
    """Builds the ground truth of records, where there is no file of annotations.

    Args:
      records: Dicts of kind coco, see `echo_jax.data.sources.source`.
      categories: ``{"id", "name"}`` of every label, in order.
    """
    images, annotations = [], []
    for record in records:
        image = {name: int(record[name]) for name in ("height", "width")}
        images.append({"id": int(record["image_id"]), **image})
        boxes = np.frombuffer(record["boxes"], "<f4").reshape(-1, 4).astype(float)
        labels = np.frombuffer(record["labels"], "<i4").tolist()
        crowd = np.frombuffer(record["crowd"], np.uint8).tolist()
        areas = np.frombuffer(record["area"], "<f4").tolist()
        for box, label, is_crowd, area in zip(
            boxes.tolist(), labels, crowd, areas, strict=True
        ):
            top, left, bottom, right = box
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
        {
            "images": images,
            "annotations": annotations,
            "categories": list(categories),
        }
    )
