"""What echoing saves where reading is slow: Choi et al. 2019, figure 4, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_echo_factor.py --workdir runs/e

Decoded images are echoed 1 to 5 times, shuffled within a buffer of 10^5, until the
accuracy is 75 %. Every arm may take the same 110 thousand updates, and reading is made
as slow as the paper's was: a fresh batch takes the time of 6 steps (R = 6).

The paper, which tuned every arm, needed 78.9, 41.5, 28.9, 21.2 and 19.2 million fresh
examples, and 45.1, 25.0, 18.5, 14.7 and 13.8 hours. ``:tiny`` is the small network of
``configs/imagenet.py:tiny``.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, factor_arms, start_study

from echo_jax.config.study import set_arms

_FACTORS = (1, 2, 3, 4, 5)

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = start_study(
        "What echoing saves: ResNet-50 on ImageNet, R = 6",
        "imagenet.py:tiny" if variant else "imagenet.py",
        ratio=6.0,
    )
    study.base.stop_at_target = True
    set_arms(study, factor_arms(dict.fromkeys(_FACTORS, 0)))
    return study.lock()
