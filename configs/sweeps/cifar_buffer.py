"""What a larger buffer is worth, on CIFAR-10; Choi et al. 2019, figure 7, is on LM1B.

    echo-jax study --config configs/sweeps/cifar_buffer.py --workdir runs/cifar_buffer

An echo factor of 2, of batches shuffled in a buffer of 1, 10 and 100 batches, and of
decoded images in one of 10^3, 10^4 and all 5 * 10^4, until the accuracy is 91 %. The
baseline's records are shuffled as a whole, which no buffer would improve on. ``:tiny``
is the small network of ``configs/cifar.py:tiny``, to 45 %, with smaller buffers.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_CIFAR = Path(__file__).parents[1] / "cifar.py"


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "What a larger buffer is worth: ResNet-32 on CIFAR-10"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_CIFAR}:tiny" if is_tiny else str(_CIFAR))
    study.base.stop_at_target = True
    if not is_tiny:
        study.base.updates = 250_000  # Enough for echoed batches in figure 3.
    study.arms = ConfigDict({"baseline": {"echo": {"factor": 1.0}}})
    for batches in (1, 10) if is_tiny else (1, 10, 100):
        order = "consecutive" if batches == 1 else "shuffle"
        echo = {"factor": 2.0, "after": "batch", "order": order, "buffer": batches}
        study.arms[f"batch_{batches:03}"] = {"echo": echo}
    for images in (128, 1024) if is_tiny else (1000, 10_000, 50_000):
        echo = {"factor": 2.0, "order": "shuffle", "buffer": images}
        study.arms[f"before_{images:05}"] = {"echo": echo}
    return study.lock()
