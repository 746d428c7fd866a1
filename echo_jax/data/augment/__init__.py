"""Augmentation where the model runs: pure functions of (batch, keys).

Behind an echo on the accelerator, every use of an example is augmented anew, in the
same program as the update. An augmentation is a value such as
``Augment((RandomResizedCrop(size=224), Flip()))``: frozen and hashable, so that it can
be a static argument of a jitted function, and called as ``augment(batch, keys)``.

A batch is a dict of arrays:

- ``"image"``: ``uint8[B, H, W, C]``. Bytes stay bytes, rounded to the nearest after
  every stage that computes; after `ToFloat` images are float32, from 0 to 255.
- ``"label"``, if there is one: ``int32[B]``; `Mixup` makes it ``float32[B, classes]``.
- ``"boxes"``, if there are any: ``float32[B, N, 4]``, (ymin, xmin, ymax, xmax) as
  fractions of height and width. N is the same for all images: ``"box_mask"``,
  ``bool[B, N]``, tells boxes from padding. A box that a crop loses is masked out, and
  so keeps its row, in which ``"box_labels"`` or anything else may stand. Crops and
  flips leave zeros in rows that are masked out.
- Anything else passes through.

`keys`, ``key[B]``, holds one key for each use of an example, derived from (seed, fresh
index, repeat), and nothing else is random: what becomes of an example depends neither
on its place in the batch nor on the other examples (but see `Mixup`).
"""

from echo_jax.data.augment.boxes import crop_boxes, flip_boxes
from echo_jax.data.augment.colour import ColourDistortion, ColourFactors
from echo_jax.data.augment.geometry import Flip, PadCrop, RandomResizedCrop
from echo_jax.data.augment.mix import Cutout, Mixup
from echo_jax.data.augment.stage import Augment, Batch, Stage, ToFloat

__all__ = [
    "Augment",
    "Batch",
    "ColourDistortion",
    "ColourFactors",
    "Cutout",
    "Flip",
    "Mixup",
    "PadCrop",
    "RandomResizedCrop",
    "Stage",
    "ToFloat",
    "crop_boxes",
    "flip_boxes",
]
