"""Detection: boxes, crops, matching, suppression and COCO's mAP."""

from echo_jax.lazy import door

__getattr__ = door(
    __name__,
    {
        "anchors": ["boxes_per_cell", "default_boxes", "match_anchors"],
        "boxes": ["decode_boxes", "encode_boxes", "iou"],
        "coco_eval": [
            "METRICS",
            "CocoEvaluator",
            "ground_truth_of",
            "read_ground_truth",
        ],
        "crop": ["SsdCrop", "flip", "ssd_crop"],
        "nms": ["NmsSettings", "detect", "suppress"],
        "records": ["DecodeBoxes", "DecodeForEvaluation"],
    },
)
