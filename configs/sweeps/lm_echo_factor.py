"""How large an echo factor may be: Choi et al. 2019, figure 5, on LM1B.

    echo-jax study --config configs/sweeps/lm_echo_factor.py --workdir runs/lm_factor

Examples are echoed 1, 2, 4, 8 and 16 times, shuffled within a buffer of 10^6, until the
cross-entropy is 3.9. The updates that every arm may take are those after which the
curves of the paper's appendix end.

The paper, which tuned every arm, needed 15.6, 8.0, 4.9, 5.4 and 6.1 million fresh
examples: at this batch size a factor above 4 only costs. ``:4096`` is the same with
batches of 4096, where it needed 38.1, 21.5, 11.1, 7.3 and 6.7 million. ``:tiny`` is a
smoke test on bytes.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, factor_arms, start_study

from echo_jax.config.study import set_arms

_UPDATES = {1: 20_000, 2: 20_000, 4: 30_000, 8: 80_000, 16: 160_000}

VARIANTS = ("4096", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"4096"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    study = start_study(
        "How large an echo factor may be: a Transformer on LM1B",
        "lm.py:tiny,example" if is_tiny else "lm.py:example",
    )
    if variant == "4096":
        study.base.batch_size = 4096
    if is_tiny:
        study.base.echo.buffer = 128
    set_arms(study, factor_arms(dict.fromkeys(_UPDATES, 0) if is_tiny else _UPDATES))
    return study.lock()
