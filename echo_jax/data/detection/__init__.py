"""Detection: boxes, crops, matching, suppression and COCO's mAP."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "anchors": [
            "NmsSettings",
            "boxes_per_cell",
            "default_boxes",
            "detect",
            "match_anchors",
            "suppress",
        ],
        "boxes": ["decode_boxes", "encode_boxes", "iou"],
        "coco_eval": [
            "METRICS",
            "CocoEvaluator",
            "ground_truth_of",
            "read_ground_truth",
        ],
        "crop": ["SsdCrop", "flip", "ssd_crop"],
        "records": ["DecodeBoxes", "DecodeForEvaluation"],
    },
)
