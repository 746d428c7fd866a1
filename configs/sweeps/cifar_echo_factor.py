"""How large an echo factor may be, on CIFAR-10; Choi et al. 2019, figure 5, is on LM1B.

    echo-jax study --config configs/sweeps/cifar_echo_factor.py --workdir runs/cifar_e

Decoded images are echoed 1, 2, 4, 8 and 16 times, through a shuffle buffer of 10^4
uses, until the accuracy is 91 %. Learning rate, momentum and the length of the decay
are searched for each variant: 5 searches of 100 points. The paper has only a factor of
2 on CIFAR-10 (figure 3c). ``:tiny`` is a smoke test with the small network of
``configs/cifar.py:tiny``, to 45 %.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, factor_arms, search_like_paper, start_study

from echo_jax.config.study import set_arms

_FACTORS = (1, 2, 4, 8, 16)
_DECAY_UPDATES = (32_000, 64_000, 96_000, 128_000, 160_000, 240_000)

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = start_study(
        "How large an echo factor may be: ResNet-32 on CIFAR-10",
        "cifar.py:tiny" if variant else "cifar.py",
    )
    study.base.stop_at_target = True
    set_arms(study, factor_arms(dict.fromkeys(_FACTORS, 0)))
    search_like_paper(study, 100, decay_updates=_DECAY_UPDATES, tiny=bool(variant))
    study.paper = ConfigDict({"e02": 0.576})
    return study.lock()
