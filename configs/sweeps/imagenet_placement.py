"""Where to echo: Choi et al. 2019, figure 3, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_placement.py --workdir runs/where

An echo factor of 2 of batches, of augmented images and of decoded images, until the
accuracy is 75 %; and decoded images spread, which the paper does not have. The updates
that every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 82.5 million fresh examples without an echo,
and 86.6, 68.0 and 42.5 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/imagenet.py:tiny``.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_IMAGENET = Path(__file__).parents[1] / "imagenet.py"
_UPDATES = {"batch": 192_500, "after": 165_000}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "Where to echo: ResNet-50 on ImageNet, factor 2"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_IMAGENET}:tiny" if is_tiny else str(_IMAGENET))
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
