"""Which echo factor for which batch size: every factor tuned, with intervals.

    echo-jax study --config configs/sweeps/s2_factor.py --workdir runs/s2_32

A byte-level Transformer on the Python standard library's source code, an example of
Choi et al. 2019, figure 5, in small: examples are used 1, 2, 4, 8 and 16 times,
shuffled within a buffer of 1,024. ``:8`` and ``:128`` are of other batch sizes, each a
study with a baseline of its own; ``:tiny`` is a smoke test.
"""

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config_study import default_study

# Updates that a trial may take, and between evaluations: smaller batches need more.
_UPDATES = {8: (6000, 25), 32: (1600, 10), 128: (800, 5)}

VARIANTS = ("8", "32", "128", "tiny")


def get_config(variant: str = "32") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``"8"``, ``"32"``, ``"128"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    batch_size = 32 if is_tiny else int(variant)
    base = byte_lm(batch_size, tiny=is_tiny)
    base.echo.buffer = 64 if is_tiny else 1024
    if not is_tiny:
        base.updates, base.eval_every = _UPDATES[batch_size]
        base.optim.warmup_updates = base.updates // 80
    arms = {"baseline": {}}
    for factor in (2, 4, 8, 16):
        arms[f"e{factor}"] = {"echo": {"factor": float(factor), "order": "shuffle"}}
    study = default_study(
        f"How large an echo factor may be: byte-level LM, B = {batch_size}", base, arms
    )
    search_space(study, tiny=is_tiny)
    study.falsifiers = (
        less_than("baseline", "e4", "the tuned baseline matches e = 4"),
    )
    return study.lock()
