"""An echo in a trainer in which nothing else is changed.

    echo-jax study --config configs/sweeps/s3_untuned.py --workdir runs/s3

The study of ``s2_factor.py:32``, but every factor has the learning rate and the
momentum that the search found for the baseline. Beside the tuned factors it shows how
much of an echo's gain, or loss, is its learning rate. ``batch2`` and ``batch4`` are
batches back to back, the first of which ``s1_placement.py`` tunes. ``:tiny`` is a smoke
test.
"""

import s2_factor
from ml_collections import ConfigDict
from sweep_parts import check_variant, less_than

from echo_jax.config.study import set_arms

# The baseline's best point of the first search of s2_factor.py:32.
_POINT = {"lr": 0.0073142, "b1": 0.70341}

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    study = s2_factor.get_config(variant or "32").copy_and_resolve_references()
    with study.unlocked():
        study.name = "Nothing re-tuned: byte-level LM, B = 32"
        study.base.optim.update(_POINT)
        arms = {name: study.arms[name] for name in study.order}
        for factor in (2, 4):
            echo = {"factor": float(factor), "stage": "batch", "buffer": 1}
            arms[f"batch{factor}"] = {"echo": echo}
        set_arms(study, arms)
        study.search.space = ConfigDict()
        study.paper = ConfigDict()  # The paper tuned every factor.
        study.confirm.streams = 2 if variant else 16
        study.falsifiers = (
            less_than("baseline", "e4", "untuned, e = 4 saves no fresh examples"),
        )
    return study.lock()
