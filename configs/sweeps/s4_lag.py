"""What a repeat is worth by its lag, the updates between two uses of an example.

    echo-jax study --config configs/sweeps/s4_lag.py --workdir runs/s4_32

A byte-level Transformer on the Python standard library's source code, e = 2: batches
back to back (a lag of 1), and examples spread evenly over buffers in which their second
use comes 4, 16 or 64 updates after the first; beside them, shuffled within the memory
of 16. Choi et al. 2019, figure 7, is of the same on LM1B. ``:8`` is of batches
of 8, ``:tiny`` a smoke test.
"""

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config_study import default_study

_LAGS = (4, 16, 64)

VARIANTS = ("8", "32", "tiny")


def get_config(variant: str = "32") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``"8"``, ``"32"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    batch_size = 32 if is_tiny else int(variant)
    base = byte_lm(batch_size, tiny=is_tiny)
    if batch_size == 8:
        base.updates, base.eval_every, base.optim.warmup_updates = 6000, 25, 75

    def buffer(lag: int) -> int:
        # A use comes e / (e - 1) buffers after the one before.
        return lag * batch_size // 2

    arms = {"baseline": {}, "lag_1": {"echo": {"factor": 2.0, "buffer": 1}}}
    arms["lag_1"]["echo"]["after"] = "batch"
    for lag in _LAGS[:1] if is_tiny else _LAGS:
        echo = {"factor": 2.0, "order": "spread", "buffer": buffer(lag)}
        arms[f"lag_{lag}"] = {"echo": echo}
    memory = buffer(4 if is_tiny else 16)
    shuffled = {"factor": 2.0, "order": "shuffle", "buffer": memory}
    arms["shuffle"] = {"echo": shuffled}
    study = default_study(
        f"What a repeat is worth by its lag, e = 2: byte-level LM, B = {batch_size}",
        base,
        arms,
    )
    search_space(study, tiny=is_tiny)
    if not is_tiny:
        study.falsifiers = (
            less_than("lag_1", "lag_16", "a lag of 16 updates is worth no more than 1"),
            less_than("lag_4", "lag_64", "a lag of 64 updates is worth no more than 4"),
            less_than("shuffle", "lag_16", "spread is no better than shuffle"),
        )
    return study.lock()
