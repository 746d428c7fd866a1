"""Where to echo: Choi et al. 2019, figure 3, on COCO.

    echo-jax study --config configs/sweeps/coco_placement.py --workdir runs/coco_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the mAP
is 0.24; and decoded images spread, which the paper does not have. The updates that
every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 6.63 million fresh examples without an echo,
and 5.79, 4.40 and 3.56 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/coco.py:tiny``, on 8 images.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 50_000, "after": 37_500}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    name = "Where to echo: SSD on COCO, factor 2"
    return placement_study(name, "coco.py", variant, _UPDATES)
