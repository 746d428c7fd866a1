r"""What echoing saves where reading is slow: Choi et al. 2019, figure 4, on ImageNet.

    echo-jax study --config configs/sweeps/imagenet_echo_factor.py --workdir runs/e

Decoded images are echoed 1 to 5 times, through a shuffle buffer of 10^5 uses, until the
accuracy is 75 %. Every variant may take the same 110 thousand updates. Each variant has
one search of 50 points over learning rate, momentum and the length of the decay. Its
best point is trained on five new seeds, and the fresh examples are compared.

``:seconds`` measures the seconds. Reading is made as slow as the paper's was: a fresh
batch takes the time of 6 steps (R = 6). Give every variant its point from the search,
as here ``e02``. Run the seeds 0 to 4, such as 1, then join them:

    echo-jax study --config configs/sweeps/imagenet_echo_factor.py:seconds \
      --workdir runs/seconds_1 --config.base.seed=1 \
      --config.arms.e02.optim.lr=0.4 --config.arms.e02.optim.momentum=0.9 \
      --config.arms.e02.optim.decay_updates=80000
    echo-jax report runs/seconds_0 runs/seconds_1 runs/seconds_2 runs/seconds_3 \
      runs/seconds_4 --workdir runs/seconds

The paper needed 78.9, 41.5, 28.9, 21.2 and 19.2 million fresh examples, and 45.1, 25.0,
18.5, 14.7 and 13.8 hours, means of five runs. ``:tiny`` and ``:tiny_seconds`` are smoke
tests with the small network of ``configs/imagenet.py:tiny``.
"""

from ml_collections import ConfigDict
from sweep_parts import check_variant, factor_arms, search_like_paper, start_study

from echo_jax.config.study import set_arms

_FACTORS = (1, 2, 3, 4, 5)
_DECAY_UPDATES = (50_000, 60_000, 70_000, 80_000, 90_000, 110_000)
_PAPER = {"e02": 0.526, "e03": 0.367, "e04": 0.269, "e05": 0.243}
_SEEDS = 5

VARIANTS = ("seconds", "tiny", "tiny_seconds")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"seconds"``, ``"tiny"`` or ``"tiny_seconds"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny, is_clocked = "tiny" in variant, "seconds" in variant
    study = start_study(
        "What echoing saves: ResNet-50 on ImageNet" + ", R = 6" * is_clocked,
        "imagenet.py:tiny" if is_tiny else "imagenet.py",
        ratio=6.0 * is_clocked,
    )
    study.base.stop_at_target = True
    arms = factor_arms(dict.fromkeys(_FACTORS, 0))
    if is_clocked:
        # A flag can set what a variant has.
        optim = study.base.optim
        for arm in arms.values():
            arm["optim"] = {
                "lr": optim.lr,
                "momentum": optim.momentum,
                "decay_updates": optim.decay_updates,
            }
    set_arms(study, arms)
    if not is_clocked:
        search_like_paper(
            study,
            50,
            repeats=1,
            streams=_SEEDS,
            decay_updates=_DECAY_UPDATES,
            tiny=is_tiny,
        )
    study.paper = ConfigDict(_PAPER)
    return study.lock()
