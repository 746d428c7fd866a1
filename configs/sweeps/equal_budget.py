r"""The quality at an equal fresh budget: Choi et al. 2019, figure 8.

    for data in lm imagenet; do
      echo-jax study --config configs/sweeps/equal_budget.py:$data \
        --workdir runs/budget_$data
    done

Every variant reads as many fresh examples, an echo uses each of them 4 times, and the
last value is compared. ``:lm`` reads 20.5 million examples of LM1B, and ``:imagenet``
205 million images. Learning rate and momentum are searched for each variant: one
search, of 500 points on LM1B and of 100 on ImageNet. The best point is trained on five
new seeds. On ImageNet the learning rate decays until the end of each variant.

The paper reports the best value of the best trial. On LM1B the cross-entropy was 3.800
without an echo, and 3.708 and 3.638 with echoed batches and examples. On ImageNet the
accuracy was 0.7666 without an echo. It was 0.7656, 0.7690 and 0.7736 with echoed
batches, augmented images and decoded images.

    echo-jax study --config configs/sweeps/equal_budget.py --workdir runs/budget

is the study on LM1B; ``:tiny`` is a smoke test of it on bytes.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import check_variant, placement_arms, search_like_paper, start_study

from echo_jax.config.study import set_arms

_FACTOR = 4
# Differences of the last value, not ratios of fresh examples.
_PAPER_LM = {"batch": -0.092, "example": -0.162}
_PAPER_IMAGENET = {"batch": -0.001, "after": 0.0024, "before": 0.007}

VARIANTS = ("lm", "imagenet", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``"lm"`` (also ``""``), ``"imagenet"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny, is_imagenet = variant == "tiny", variant == "imagenet"
    configs = {"imagenet": "imagenet.py", "tiny": "lm.py:tiny"}
    study = start_study("", configs.get(variant, "lm.py"))
    base = study.base
    base.target, base.stop_at_target = 0.0, False
    if is_tiny:
        base.echo.buffer = 128
    else:
        base.updates = 200_000 if is_imagenet else 20_000
        base.eval_every = base.updates // 80
    names = ("batch", "after", "before") if is_imagenet else ("batch", "example")
    arms = placement_arms(*names)
    for name in names:
        _use_the_budget(arms[name], base)
    set_arms(study, arms)
    study.name = "At an equal fresh budget, factor 4: " + (
        "ResNet-50 on ImageNet" if is_imagenet else "a Transformer on LM1B"
    )
    points = 100 if is_imagenet else 500
    search_like_paper(study, points, repeats=1, streams=5, tiny=is_tiny)
    study.paper = ConfigDict(_PAPER_IMAGENET if is_imagenet else _PAPER_LM)
    return study.lock()


def _use_the_budget(arm: dict[str, Any], base: ConfigDict) -> None:
    """Sets the factor of a variant, and the updates in which it reads the budget."""
    is_batch = arm["echo"].get("stage") == "batch"
    # Uses that the buffer holds at the end have been read, too.
    left = 0 if is_batch else base.echo.buffer
    arm["echo"] = {**arm["echo"], "factor": float(_FACTOR)}
    arm["updates"] = (
        base.updates * base.batch_size * _FACTOR - left
    ) // base.batch_size
