r"""Echoing at several batch sizes: Choi et al. 2019, figures 3a and 6.

    for size in 64 256 1024 4096; do
      echo-jax study --config configs/sweeps/lm_batch_size.py:$size \
        --workdir runs/lm_batch_$size
    done

Each batch size is a study, since an echo is compared with no echo at the same size. An
echo factor of 2, of batches and of examples of LM1B, until the cross-entropy is 3.9.
Learning rate and momentum are searched for each variant: 5 searches of 100 points.

The paper needed fewer fresh examples than the baseline by a factor of 1.02, 1.16, 1.46
and 1.65 with echoed batches. The factors were 1.77, 1.84, 1.94 and 1.77 with echoed
examples. ``:tiny`` is a smoke test on bytes.

    echo-jax study --config configs/sweeps/lm_batch_size.py --workdir runs/lm_batch

is the study of size 1024, and figure 3a.
"""

from ml_collections import ConfigDict
from sweep_parts import (
    check_variant,
    placement_arms,
    search_like_paper,
    start_study,
    tiny_target,
)

from echo_jax.config.study import set_arms

# With room above what the slowest of the paper's variants took: echoed batches.
_UPDATES = {"64": 250_000, "256": 80_000, "1024": 40_000, "4096": 20_000}
# By batch size: echoed batches, echoed examples.
_PAPER = {
    "64": (0.983, 0.564),
    "256": (0.863, 0.544),
    "1024": (0.684, 0.516),
    "4096": (0.608, 0.565),
}
_ARMS = ("batch", "example")
VARIANTS = (*_UPDATES, "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: A batch size: ``"64"``, ``"256"``, ``"1024"`` (also ``""``) or
        ``"4096"``; or ``"tiny"``.
    """
    size = variant or "1024"
    is_tiny = size == "tiny"
    check_variant(variant, VARIANTS)
    study = start_study("", "lm.py:tiny" if is_tiny else "lm.py")
    if is_tiny:
        study.base.echo.buffer = 128
        tiny_target(study)
    else:
        study.base.batch_size = int(size)
        study.base.updates = _UPDATES[size]
        study.paper = ConfigDict(dict(zip(_ARMS, _PAPER[size], strict=True)))
    study.name = f"A Transformer on LM1B, in batches of {study.base.batch_size}"
    set_arms(study, placement_arms(*_ARMS))
    search_like_paper(study, 100, tiny=is_tiny)
    return study.lock()
