"""Where to echo: Choi et al. 2019, figure 3, on CIFAR-10.

    echo-jax study --config configs/sweeps/cifar_placement.py --workdir runs/cifar_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 91 %; and decoded images spread, which the paper does not have. The updates
that every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 11.1 million fresh examples without an echo,
and 9.4, 7.3 and 6.4 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/cifar.py:tiny``, to 45 %.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 250_000}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    name = "Where to echo: ResNet-32 on CIFAR-10, factor 2"
    return placement_study(name, "cifar.py", variant, _UPDATES)
