"""Where to echo: Choi et al. 2019, figure 3d, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_placement.py --workdir runs/where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 75 %. The variant ``spread`` is not in the paper. A variant may take as many
updates as the curves in the paper's appendix have. Learning rate, momentum and the
length of the decay are searched for each variant: 5 searches of 50 points.

The paper needed 82.5 million fresh examples without an echo. It needed 86.6, 68.0 and
42.5 million with echoed batches, augmented images and decoded images. ``:tiny`` is a
smoke test with the small network of ``configs/imagenet.py:tiny``.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 192_500, "after": 165_000}
_DECAY_UPDATES = (50_000, 75_000, 100_000, 125_000, 150_000, 190_000)
_PAPER = {"batch": 1.05, "after": 0.824, "before": 0.515}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    return placement_study(
        "Where to echo: ResNet-50 on ImageNet, factor 2",
        "imagenet.py",
        variant,
        points=50,
        paper=_PAPER,
        updates=_UPDATES,
        decay_updates=_DECAY_UPDATES,
    )
