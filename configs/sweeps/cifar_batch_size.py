r"""Echoing at several batch sizes, on CIFAR-10; figure 6 of the paper has others.

    for size in 32 128 512 2048; do
      echo-jax study --config configs/sweeps/cifar_batch_size.py:$size \
        --workdir runs/cifar_batch_$size
    done

Each batch size is a study, since an echo is compared with no echo at the same size. An
echo factor of 2 after each stage, until the accuracy is 91 %. All sizes see as many
images (Choi et al. 2019 do this on LM1B and ImageNet). Learning rate, momentum and the
length of the decay are searched for each variant: 5 searches of 100 points. The paper
has batches of 128 on CIFAR-10 (figure 3c). ``:tiny`` is a smoke test with the small
network of ``configs/cifar.py:tiny``, to 45 %.

    echo-jax study --config configs/sweeps/cifar_batch_size.py --workdir runs/batch

is the study of size 128.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, placement_arms, search_like_paper, start_study

from echo_jax.config.study import set_arms

# As many images as 250 thousand updates of 128, which the paper gives echoed batches.
_UPDATES = {"32": 1_000_000, "128": 250_000, "512": 62_500, "2048": 15_625}
# For batches of 128.
_DECAY_UPDATES = (32_000, 64_000, 96_000, 128_000, 160_000, 240_000)
_PAPER = {"batch": 0.848, "after": 0.657, "before": 0.576}  # batches of 128
VARIANTS = (*_UPDATES, "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: A batch size: ``"32"``, ``"128"`` (also ``""``), ``"512"`` or
        ``"2048"``; or ``"tiny"``.
    """
    size = variant or "128"
    is_tiny = size == "tiny"
    check_variant(variant, VARIANTS)
    study = start_study("", "cifar.py:tiny" if is_tiny else "cifar.py")
    study.base.stop_at_target = True
    if not is_tiny:
        # In proportion, after a warm-up of five epochs (Goyal et al. 2017).
        study.base.optim.lr *= int(size) / study.base.batch_size
        study.base.batch_size = int(size)
        study.base.updates = _UPDATES[size]
        study.base.optim.warmup_updates = 5 * 50_000 // int(size)
        study.base.optim.decay_updates = 64_000 * 128 // int(size)
        study.paper = ConfigDict(_PAPER if size == "128" else {})
    study.name = f"ResNet-32 on CIFAR-10, in batches of {study.base.batch_size}"
    set_arms(study, placement_arms("batch", "after", "before"))
    decay = () if is_tiny else [n * 128 // int(size) for n in _DECAY_UPDATES]
    search_like_paper(study, 100, decay_updates=decay, tiny=is_tiny)
    return study.lock()
