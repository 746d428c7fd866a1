"""Plain NumPy references of detection: loops, one box at a time."""

import numpy as np


def overlap(one, other):
    """IoU of two boxes."""
    height = min(one[2], other[2]) - max(one[0], other[0])
    width = min(one[3], other[3]) - max(one[1], other[1])
    both = max(height, 0) * max(width, 0)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    either = sum(areas) - both
    return both / either if either > 0 else 0.0


def match(boxes, mask, anchors, threshold):
    """The object of every anchor; -1 for background."""
    objects = [j for j in range(len(boxes)) if mask[j]]
    table = {
        (j, a): overlap(boxes[j], anchors[a])
        for j in objects
        for a in range(len(anchors))
    }
    truth = [-1] * len(anchors)
    for a in range(len(anchors)):
        best = max(objects, key=lambda j: table[j, a], default=None)
        if best is not None and table[best, a] >= threshold:
            truth[a] = best
    wishes = {}
    for j in objects:
        a = max(range(len(anchors)), key=lambda a: table[j, a])
        if table[j, a] > 0:
            wishes.setdefault(a, []).append(j)
    for a, wanting in wishes.items():
        truth[a] = max(wanting, key=lambda j: table[j, a])
    return truth


def suppress(boxes, valid, max_overlap):
    """Which boxes survive, the best first."""
    kept = []
    for i in range(len(boxes)):
        losers = [overlap(boxes[k], boxes[i]) > max_overlap for k in kept]
        if valid[i] and not any(losers):
            kept.append(i)
    return [i in kept for i in range(len(boxes))]


def detect(boxes, scores, *, min_score, max_overlap, candidates, max_detections):
    """Detections as (score, label, anchor), the highest score first."""
    found = []
    boxes = np.clip(boxes, 0, 1)
    for label in range(scores.shape[1]):
        order = np.argsort(-scores[:, label], kind="stable")[:candidates]
        valid = scores[order, label] >= min_score
        keep = suppress(boxes[order], valid, max_overlap)
        found += [
            (float(scores[a, label]), label, int(a))
            for a, kept in zip(order, keep, strict=True)
            if kept
        ]
    found.sort(key=lambda detection: -detection[0])
    return found[:max_detections]
