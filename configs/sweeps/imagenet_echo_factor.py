"""What echoing saves where reading is slow: Choi et al. 2019, figure 4, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_echo_factor.py --workdir runs/e

Decoded images are echoed 1 to 5 times, through a shuffle buffer of 10^5, until the
accuracy is 75 %. Every arm may take the same 110 thousand updates, and reading is made
as slow as the paper's was: a fresh batch takes the time of 6 steps (R = 6).

The paper, which tuned every arm, needed 78.9, 41.5, 28.9, 21.2 and 19.2 million fresh
examples, and 45.1, 25.0, 18.5, 14.7 and 13.8 hours. ``:tiny`` is the small network of
``configs/imagenet.py:tiny``.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_IMAGENET = Path(__file__).parents[1] / "imagenet.py"
_FACTORS = (1, 2, 3, 4, 5)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "What echoing saves: ResNet-50 on ImageNet, R = 6"
    study.storage_ratio = 6.0
    study.base = load_config(f"{_IMAGENET}:tiny" if is_tiny else str(_IMAGENET))
    study.base.stop_at_target = True
    study.arms = ConfigDict()
    for factor in _FACTORS:
        name = "baseline" if factor == 1 else f"e{factor:02}"
        # Without an echo the order is that of the records, which are shuffled already.
        order = "consecutive" if factor == 1 else "shuffle"
        study.arms[name] = {"echo": {"factor": float(factor), "order": order}}
    return study.lock()
