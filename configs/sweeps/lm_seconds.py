"""The seconds of s2_factor.py: by arithmetic from counts there, by a clock here.

    echo-jax study --config configs/sweeps/lm_seconds.py --workdir runs/seconds_4

Each factor trains once to the same loss, with one seed (another one by
``--config.base.seed=1``), from a simulated storage from which a fresh batch takes as
long as 4 steps; learning rate and momentum are those of s3_untuned.py. ``:2`` and
``:8`` are of other R; ``:tiny`` is a smoke test. Nothing else should run on the
machine.
"""

import s3_untuned
from ml_collections import ConfigDict
from sweep_parts import check_variant

from echo_jax.config.study import set_arms

VARIANTS = ("2", "4", "8", "tiny")


def get_config(variant: str = "4") -> ConfigDict:
    """Returns the study.

    Args:
      variant: R: ``"2"``, ``"4"`` or ``"8"``; or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    study = s3_untuned.get_config("tiny" if is_tiny else "")
    study = study.copy_and_resolve_references()
    factors = [name for name in study.order if not name.startswith("batch")]
    with study.unlocked():
        set_arms(study, {name: study.arms[name] for name in factors})
        study.storage_ratio = 4.0 if is_tiny else float(variant)
        study.name = f"Seconds of factors: byte LM, B = 32, R = {study.storage_ratio:g}"
        study.confirm.streams = 0
        study.falsifiers = ()
    return study.lock()
