"""Detection: boxes, crops, matching, suppression and COCO's mAP."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "anchors": ["boxes_per_cell", "default_boxes"],
        "boxes": ["decode_boxes", "encode_boxes", "iou"],
        "coco_eval": [
            "METRICS",
            "CocoEvaluator",
            "ground_truth_of",
            "read_ground_truth",
        ],
        "crop": ["SsdCrop"],
        "host_augment": ["flip", "ssd_crop"],
        "matching": ["match_anchors"],
        "nms": ["NmsSettings", "detect", "suppress"],
        "records": ["DecodeBoxes", "DecodeForEvaluation"],
    },
)
