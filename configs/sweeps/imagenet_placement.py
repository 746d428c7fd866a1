"""Where to echo: Choi et al. 2019, figure 3, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_placement.py --workdir runs/where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 75 %; and decoded images spread, which the paper does not have. The updates
that every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 82.5 million fresh examples without an echo,
and 86.6, 68.0 and 42.5 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/imagenet.py:tiny``.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 192_500, "after": 165_000}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    name = "Where to echo: ResNet-50 on ImageNet, factor 2"
    return placement_study(name, "imagenet.py", variant, _UPDATES)
