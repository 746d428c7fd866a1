"""The value of a larger buffer, on CIFAR-10; Choi et al. 2019, figure 7, is on LM1B.

    echo-jax study --config configs/sweeps/cifar_buffer.py --workdir runs/cifar_buffer

An echo factor of 2, until the accuracy is 91 %. Batches go through a shuffle buffer of
1, 10 and 100 batches, and decoded images through one of 10^3, 10^4 and 5 * 10^4 uses.
The baseline's records are shuffled as a whole, so a buffer would add nothing.
Learning rate, momentum and the length of the decay are searched for each variant: 5
searches of 100 points. The paper has two of these variants on CIFAR-10 (figure 3c).
``:tiny`` is a smoke test with the small network of ``configs/cifar.py:tiny``, to 45 %,
and smaller buffers.
"""

from ml_collections import ConfigDict
from sweep_parts import buffer_arms, check_variant, search_like_paper, start_study

from echo_jax.config.study import set_arms

_DECAY_UPDATES = (32_000, 64_000, 96_000, 128_000, 160_000, 240_000)

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
        study.paper = ConfigDict({"batch_1": 0.848, "before_10000": 0.576})
    search_like_paper(study, 100, decay_updates=_DECAY_UPDATES, tiny=bool(variant))
    return study.lock()
