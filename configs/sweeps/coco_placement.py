"""Where to echo: Choi et al. 2019, figure 3, on COCO.

    echo-jax study --config configs/sweeps/coco_placement.py --workdir runs/coco_where

An echo factor of 2 of batches, of augmented images and of decoded images, until the mAP
is 0.24; and decoded images spread, which the paper does not have. The updates that
every arm may take are those after which the curves of the paper's appendix end.

The paper, which tuned every arm, needed 6.63 million fresh examples without an echo,
and 5.79, 4.40 and 3.56 million with echoed batches, augmented and decoded images.
``:tiny`` is the small network of ``configs/coco.py:tiny``, on 8 images.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import load_config

_COCO = Path(__file__).parents[1] / "coco.py"
_UPDATES = {"batch": 50_000, "after": 37_500}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    if variant not in ("", "tiny"):
        raise ValueError(f"variant {variant!r} is unknown; use tiny or none.")
    is_tiny = variant == "tiny"
    study = ConfigDict()
    study.name = "Where to echo: SSD on COCO, factor 2"
    study.storage_ratio = 0.0
    study.base = load_config(f"{_COCO}:tiny" if is_tiny else str(_COCO))
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
