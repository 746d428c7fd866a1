"""Detection: boxes, crops, matching, suppression and COCO's mAP."""
