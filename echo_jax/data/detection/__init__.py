"""What a detector needs beside its network: boxes, crops, matching and COCO's mAP."""
