"""Augmentation on the accelerator: pure functions of (batch, keys).

With an echo on the accelerator, every use of an example is augmented again, in the same
program as the update. An augmentation is a value such as
``Augment((RandomResizedCrop(size=224), Flip()))``. It is frozen and hashable, so it can
be a static argument of a jitted function. Call it as ``augment(batch, keys)``.

A batch is a dict of arrays:

- ``"image"``: ``uint8[B, H, W, C]``. Each stage that computes rounds its result to the
  nearest byte. After `ToFloat` images are float32, from 0 to 255.
- ``"label"`` (optional): ``int32[B]``; `Mixup` makes it ``float32[B, classes]``.
- ``"boxes"`` (optional): ``float32[B, N, 4]``, (ymin, xmin, ymax, xmax) as fractions of
  height and width. N is the same for all images.
- ``"box_mask"`` (with boxes): ``bool[B, N]``, False for padding. A box that a crop
  loses is masked out and keeps its row, so ``"box_labels"`` and other arrays stay
  aligned. Crops and flips write zeros into masked rows.
- Other entries pass through.

`keys`, ``key[B]``, holds one random key for each use of an example, derived from (seed,
fresh index, repeat). Stages use no other randomness. So the result for an example does
not depend on its place in the batch or on other examples (except in `Mixup`).
"""

from echo_jax.data.augment.colour import ColourDistortion, ColourFactors
from echo_jax.data.augment.geometry import (
    Flip,
    PadCrop,
    RandomResizedCrop,
    crop_boxes,
    flip_boxes,
)
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
