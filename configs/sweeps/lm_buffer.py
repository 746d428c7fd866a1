"""The worth of a larger buffer: Choi et al. 2019, figure 7, on LM1B.

    echo-jax study --config configs/sweeps/lm_buffer.py --workdir runs/lm_buffer

An echo factor of 2, of batches shuffled in a buffer of 1, 10 and 100 batches, and of
examples in one of 10^5, 10^6 and 10^7, until the cross-entropy is 3.9. The baseline's
records are shuffled as a whole, which no buffer would improve on.

The paper, which tuned every arm, needed 10.7, 10.2 and 9.0 million fresh examples with
echoed batches, and 9.1, 8.0 and 7.6 million with echoed examples; 15.6 without an echo.
``:tiny`` is a smoke test on bytes.
"""

from ml_collections import ConfigDict
from sweep_parts import buffer_arms, check_variant, start_study

from echo_jax.config.study import set_arms

_BATCHES = (1, 10, 100)

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
        set_arms(study, buffer_arms("example", _BATCHES, (128, 512, 2048)))
    else:
        # With room above what the slowest of the paper's arms took: echoed batches.
        study.base.updates = 40_000
        set_arms(study, buffer_arms("example", _BATCHES, (10**5, 10**6, 10**7)))
    return study.lock()
