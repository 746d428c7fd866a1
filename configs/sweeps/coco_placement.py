"""Where to echo: Choi et al. 2019, figure 3e, on COCO.

    echo-jax study --config configs/sweeps/coco_placement.py --workdir runs/coco_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the mAP
is 0.24. The variant ``spread`` is not in the paper. A variant may take as many updates
as the curves in the paper's appendix have. Learning rate and momentum are searched for
each variant: 5 searches of 50 points. The paper also tuned the two drops of the
learning rate; here they are after two thirds and five sixths of a variant's updates.

The paper needed 6.63 million fresh examples without an echo. It needed 5.79, 4.40 and
3.56 million with echoed batches, augmented images and decoded images. ``:tiny`` is a
smoke test with the small network of ``configs/coco.py:tiny``, on 8 images.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 50_000, "after": 37_500}
_PAPER = {"batch": 0.873, "after": 0.664, "before": 0.537}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    return placement_study(
        "Where to echo: SSD on COCO, factor 2",
        "coco.py",
        variant,
        points=50,
        paper=_PAPER,
        updates=_UPDATES,
    )
