"""How large an echo factor may be: Choi et al. 2019, figure 5, on LM1B.

    echo-jax study --config configs/sweeps/lm_echo_factor.py --workdir runs/lm_factor

Examples are echoed 1, 2, 4, 8 and 16 times, through a shuffle buffer of 10^6, until the
cross-entropy is 3.9. The updates that every arm may take are those after which the
curves of the paper's appendix end.

The paper, which tuned every arm, needed 15.6, 8.0, 4.9, 5.4 and 6.1 million fresh
examples: at this batch size a factor above 4 only costs. ``:4096`` is the same with
batches of 4096, where it needed 38.1, 21.5, 11.1, 7.3 and 6.7 million. ``:tiny`` is a
smoke test on bytes.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_LM = Path(__file__).parents[1] / "lm.py"
_UPDATES = {1: 20_000, 2: 20_000, 4: 30_000, 8: 80_000, 16: 160_000}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"4096"`` or ``"tiny"``.
    """
    if variant not in ("", "4096", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use 4096, tiny, or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "How large an echo factor may be: a Transformer on LM1B"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_LM}:tiny,example" if is_tiny else f"{_LM}:example")
    if variant == "4096":
        study.base.batch_size = 4096
    if is_tiny:
        study.base.echo.buffer = 128
    study.arms = ConfigDict()
    for factor, updates in _UPDATES.items():
        name = "baseline" if factor == 1 else f"e{factor:02}"
        # Without an echo the order is that of the records, which are shuffled already.
        order = "consecutive" if factor == 1 else "shuffle"
        study.arms[name] = {"echo": {"factor": float(factor), "order": order}}
        if not is_tiny:
            study.arms[name].updates = updates
    return study.lock()
