"""How large an echo factor may be, on CIFAR-10; Choi et al. 2019, figure 5, is on LM1B.

    echo-jax study --config configs/sweeps/cifar_echo_factor.py --workdir runs/cifar_e

Decoded images are echoed 1, 2, 4, 8 and 16 times, through a shuffle buffer of 10^4,
until the accuracy is 91 %. ``:tiny`` is the small network of ``configs/cifar.py:tiny``,
to 45 %.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_CIFAR = Path(__file__).parents[1] / "cifar.py"
_FACTORS = (1, 2, 4, 8, 16)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "How large an echo factor may be: ResNet-32 on CIFAR-10"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_CIFAR}:tiny" if is_tiny else str(_CIFAR))
    study.base.stop_at_target = True
    study.arms = ConfigDict()
    for factor in _FACTORS:
        name = "baseline" if factor == 1 else f"e{factor:02}"
        # Without an echo the order is that of the records, which are shuffled already.
        order = "consecutive" if factor == 1 else "shuffle"
        study.arms[name] = {"echo": {"factor": float(factor), "order": order}}
    return study.lock()
