"""The worth of a larger buffer, on CIFAR-10; Choi et al. 2019, figure 7, is on LM1B.

    echo-jax study --config configs/sweeps/cifar_buffer.py --workdir runs/cifar_buffer

An echo factor of 2, of batches shuffled in a buffer of 1, 10 and 100 batches, and of
decoded images in one of 10^3, 10^4 and all 5 * 10^4, until the accuracy is 91 %. The
baseline's records are shuffled as a whole, which no buffer would improve on. ``:tiny``
is the small network of ``configs/cifar.py:tiny``, to 45 %, with smaller buffers.
"""

from ml_collections import ConfigDict
from sweep_parts import buffer_arms, check_variant, start_study

from echo_jax.config.study import set_arms

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = start_study(
        "What a larger buffer is worth: ResNet-32 on CIFAR-10",
        "cifar.py:tiny" if variant else "cifar.py",
    )
    study.base.stop_at_target = True
    if variant:
        set_arms(study, buffer_arms("before", (1, 10), (128, 1024)))
    else:
        study.base.updates = 250_000  # Enough for echoed batches in figure 3.
        set_arms(study, buffer_arms("before", (1, 10, 100), (1000, 10_000, 50_000)))
    return study.lock()
