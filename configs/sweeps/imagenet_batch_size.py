r"""Echoing at several batch sizes: Choi et al. 2019, figure 6, on ImageNet.

    for size in 256 1024 4096 16384; do
      echo-jax study --config configs/sweeps/imagenet_batch_size.py:$size \
        --workdir runs/imagenet_batch_$size
    done

Each batch size is a study, since an echo is compared with no echo at the same size. An
echo factor of 2 after each stage, until the accuracy is 75 %. Learning rate, momentum
and the length of the decay are searched for each variant: 5 searches of 50 points.

The paper needed fewer fresh examples than the baseline by a factor of 0.95, 0.95, 1.04
and 1.18 with echoed batches. The factors were 1.17, 1.21, 1.20 and 1.29 with augmented
images, and 1.83, 1.94, 1.88 and 1.59 with decoded images. ``:tiny`` is a smoke test
with the small network of ``configs/imagenet.py:tiny``.

    echo-jax study --config configs/sweeps/imagenet_batch_size.py --workdir runs/batch

is the study of size 1024.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, placement_arms, search_like_paper, start_study

from echo_jax.config.study import set_arms

# As many images as 192.5 thousand updates of 1024, the paper's for echoed batches.
_UPDATES = {"256": 770_000, "1024": 192_500, "4096": 48_125, "16384": 12_032}
# For batches of 1024.
_DECAY_UPDATES = (50_000, 75_000, 100_000, 125_000, 150_000, 190_000)
# By batch size: echoed batches, augmented images, decoded images.
_PAPER = {
    "256": (1.053, 0.855, 0.546),
    "1024": (1.05, 0.824, 0.515),
    "4096": (0.965, 0.834, 0.533),
    "16384": (0.849, 0.774, 0.63),
}
_ARMS = ("batch", "after", "before")
VARIANTS = (*_UPDATES, "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: A batch size: ``"256"``, ``"1024"`` (also ``""``), ``"4096"`` or
        ``"16384"``; or ``"tiny"``.
    """
    size = variant or "1024"
    is_tiny = size == "tiny"
    check_variant(variant, VARIANTS)
    study = start_study("", "imagenet.py:tiny" if is_tiny else "imagenet.py")
    study.base.stop_at_target = True
    if not is_tiny:
        # In proportion, after a warm-up of five epochs (Goyal et al. 2017).
        study.base.optim.lr *= int(size) / study.base.batch_size
        study.base.batch_size = int(size)
        study.base.optim.warmup_updates = 5 * 1_281_167 // int(size)
        study.base.updates = _UPDATES[size]
        study.paper = ConfigDict(dict(zip(_ARMS, _PAPER[size], strict=True)))
    study.name = f"ResNet-50 on ImageNet, in batches of {study.base.batch_size}"
    set_arms(study, placement_arms(*_ARMS))
    decay = () if is_tiny else [n * 1024 // int(size) for n in _DECAY_UPDATES]
    search_like_paper(study, 50, decay_updates=decay, tiny=is_tiny)
    return study.lock()
