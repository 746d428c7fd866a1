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
from sweep_parts import check_variant, placement_arms, start_study

_UPDATES = {"batch": 50_000, "after": 37_500}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, ("tiny",))
    study = start_study(
        "Where to echo: SSD on COCO, factor 2", "coco.py:tiny" if variant else "coco.py"
    )
    study.base.stop_at_target = True
    study.arms = placement_arms("batch", "after", "before", "spread")
    if not variant:
        for name, updates in _UPDATES.items():
            study.arms[name].updates = updates
    return study.lock()
