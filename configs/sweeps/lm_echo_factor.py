"""How large an echo factor may be: Choi et al. 2019, figure 5, on LM1B.

    echo-jax study --config configs/sweeps/lm_echo_factor.py --workdir runs/lm_factor

Examples are echoed 1, 2, 4, 8 and 16 times, through a shuffle buffer of 10^6 uses,
until the cross-entropy is 3.9. A variant may take as many updates as the curves in the
paper's appendix have. Learning rate and momentum are searched for each variant: 5
searches of 100 points.

The paper needed 15.6, 8.0, 4.9, 5.4 and 6.1 million fresh examples: at this batch size
a factor above 4 only costs. ``:4096`` is the same with batches of 4096, where it needed
38.1, 21.5, 11.1, 7.3 and 6.7 million. ``:tiny`` is a smoke test on bytes.
"""

from ml_collections import ConfigDict
from sweep_parts import (
    check_variant,
    factor_arms,
    search_like_paper,
    start_study,
    tiny_target,
)

from echo_jax.config.study import set_arms

_UPDATES = {1: 20_000, 2: 20_000, 4: 30_000, 8: 80_000, 16: 160_000}
# By batch size.
_PAPER = {
    1024: {"e02": 0.516, "e04": 0.312, "e08": 0.347, "e16": 0.392},
    4096: {"e02": 0.565, "e04": 0.29, "e08": 0.191, "e16": 0.175},
}

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
        tiny_target(study)
    set_arms(study, factor_arms(dict.fromkeys(_UPDATES, 0) if is_tiny else _UPDATES))
    search_like_paper(study, 100, tiny=is_tiny)
    study.paper = ConfigDict(_PAPER.get(study.base.batch_size, {}))
    return study.lock()
