"""Where to echo: Choi et al. 2019, figure 3, on CIFAR-10.

    echo-jax study --config configs/sweeps/cifar_placement.py --workdir runs/cifar_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 91 %; and decoded images spread, which the paper does not have. The updates
that every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 11.1 million fresh examples without an echo,
and 9.4, 7.3 and 6.4 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/cifar.py:tiny``, to 45 %.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_CIFAR = Path(__file__).parents[1] / "cifar.py"
_UPDATES = {"batch": 250_000}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "Where to echo: ResNet-32 on CIFAR-10, factor 2"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_CIFAR}:tiny" if is_tiny else str(_CIFAR))
    study.base.stop_at_target = True
    study.arms = ConfigDict(
        {
            "baseline": {"echo": {"factor": 1.0}},
            "batch": {"echo": {"factor": 2.0, "after": "batch", "buffer": 1}},
            "after": {"echo": {"factor": 2.0, "after": "augment", "order": "shuffle"}},
            "before": {"echo": {"factor": 2.0, "order": "shuffle"}},
            "spread": {"echo": {"factor": 2.0, "order": "spread"}},
        }
    )
    if not is_tiny:
        for name, updates in _UPDATES.items():
            study.arms[name].updates = updates
    return study.lock()
