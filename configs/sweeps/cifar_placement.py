"""Where to echo: Choi et al. 2019, figure 3c, on CIFAR-10.

    echo-jax study --config configs/sweeps/cifar_placement.py --workdir runs/cifar_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 91 %. The variant ``spread`` is not in the paper. A variant may take as many
updates as the curves in the paper's appendix have. Learning rate, momentum and the
length of the decay are searched for each variant: 5 searches of 100 points.

The paper needed 11.1 million fresh examples without an echo. It needed 9.4, 7.3 and 6.4
million with echoed batches, augmented images and decoded images. ``:tiny`` is a smoke
test with the small network of ``configs/cifar.py:tiny``, to 45 %.
"""

from ml_collections import ConfigDict
from sweep_parts import placement_study

_UPDATES = {"batch": 250_000}
_DECAY_UPDATES = (32_000, 64_000, 96_000, 128_000, 160_000, 240_000)
_PAPER = {"batch": 0.848, "after": 0.657, "before": 0.576}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    return placement_study(
        "Where to echo: ResNet-32 on CIFAR-10, factor 2",
        "cifar.py",
        variant,
        points=100,
        paper=_PAPER,
        updates=_UPDATES,
        decay_updates=_DECAY_UPDATES,
    )
