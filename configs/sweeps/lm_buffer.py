"""What a larger buffer is worth: Choi et al. 2019, figure 7, on LM1B.

    echo-jax study --config configs/sweeps/lm_buffer.py --workdir runs/lm_buffer

An echo factor of 2, of batches shuffled in a buffer of 1, 10 and 100 batches, and of
examples in one of 10^5, 10^6 and 10^7, until the cross-entropy is 3.9. The baseline's
records are shuffled as a whole, which no buffer would improve on.

The paper, which tuned every arm, needed 10.7, 10.2 and 9.0 million fresh examples with
echoed batches, and 9.1, 8.0 and 7.6 million with echoed examples; 15.6 without an echo.
``:tiny`` is a smoke test on bytes.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_LM = Path(__file__).parents[1] / "lm.py"


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "What a larger buffer is worth: a Transformer on LM1B"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_LM}:tiny" if is_tiny else str(_LM))
    if not is_tiny:
        # With room above what the slowest of the paper's arms took: echoed batches.
        study.base.updates = 40_000
    study.arms = ConfigDict({"baseline": {"echo": {"factor": 1.0}}})
    for batches in (1, 10, 100):
        order = "consecutive" if batches == 1 else "shuffle"
        echo = {"factor": 2.0, "after": "batch", "order": order, "buffer": batches}
        study.arms[f"batch_{batches}"] = {"echo": echo}
    for examples in (128, 512, 2048) if is_tiny else (10**5, 10**6, 10**7):
        echo = {"factor": 2.0, "order": "shuffle", "buffer": examples}
        study.arms[f"example_{examples}"] = {"echo": echo}
    return study.lock()
