"""The value of a larger buffer: Choi et al. 2019, figure 7, on LM1B.

    echo-jax study --config configs/sweeps/lm_buffer.py --workdir runs/lm_buffer

An echo factor of 2, until the cross-entropy is 3.9. Batches go through a shuffle buffer
of 1, 10 and 100 batches, and examples through one of 10^5, 10^6 and 10^7 uses. The
baseline's records are shuffled as a whole, so a buffer would add nothing. Learning rate
and momentum are searched for each variant: 5 searches of 100 points.

The paper needed 10.7, 10.2 and 9.0 million fresh examples with echoed batches. With
echoed examples it needed 9.1, 8.0 and 7.6 million, and without an echo 15.6 million.
Its ratios for echoed examples are to baselines with a buffer of the same size.
``:tiny`` is a smoke test on bytes.
"""

from ml_collections import ConfigDict
from sweep_parts import (
    buffer_arms,
    check_variant,
    search_like_paper,
    start_study,
    tiny_target,
)

from echo_jax.config.study import set_arms

_BATCHES = (1, 10, 100)
_PAPER = {
    "batch_1": 0.684,
    "batch_10": 0.655,
    "batch_100": 0.576,
    "example_100000": 0.602,
    "example_1000000": 0.516,
    "example_10000000": 0.51,
}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = start_study(
        "What a larger buffer is worth: a Transformer on LM1B",
        "lm.py:tiny" if variant else "lm.py",
    )
    if variant:
        tiny_target(study)
        set_arms(study, buffer_arms("example", _BATCHES, (128, 512, 2048)))
    else:
        # With room above what the slowest of the paper's variants took: echoed batches.
        study.base.updates = 40_000
        set_arms(study, buffer_arms("example", _BATCHES, (10**5, 10**6, 10**7)))
        study.paper = ConfigDict(_PAPER)
    search_like_paper(study, 100, tiny=bool(variant))
    return study.lock()
