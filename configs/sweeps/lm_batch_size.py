r"""Echoing at several batch sizes: Choi et al. 2019, figure 6, on LM1B.

    for size in 64 256 1024 4096; do
      echo-jax study --config configs/sweeps/lm_batch_size.py:$size \
        --workdir runs/lm_batch_$size
    done

A study for each batch size, for an echo is compared with no echo at the same size: an
echo factor of 2, of batches and of examples, until the cross-entropy is 3.9.

The paper, which tuned every arm, needed fewer fresh examples than the baseline by a
factor of 1.02, 1.16, 1.46 and 1.65 with echoed batches, and of 1.77, 1.84, 1.94 and
1.77 with echoed examples. ``:tiny`` is a smoke test on bytes.

    echo-jax study --config configs/sweeps/lm_batch_size.py --workdir runs/lm_batch

is the study of size 1024.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, placement_arms, start_study

from echo_jax.config.study import set_arms

# With room above what the slowest of the paper's arms took: echoed batches.
_UPDATES = {"64": 250_000, "256": 80_000, "1024": 40_000, "4096": 20_000}
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
    else:
        study.base.batch_size = int(size)
        study.base.updates = _UPDATES[size]
    study.name = f"A Transformer on LM1B, in batches of {study.base.batch_size}"
    set_arms(study, placement_arms("batch", "example"))
    return study.lock()
