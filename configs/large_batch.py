r"""What large batches take, and what helps: eight times the batch, at equal examples.

    echo-jax study --config configs/large_batch.py --workdir runs/large_batch

A small ResNet learns CIFAR-10 (``data/cifar10``, as ``configs/cifar.py`` has it) from
51,200 images in every variant:

    baseline       the batch B = 64, 800 updates
    untuned        8 B and 100 updates, with the baseline's learning rate
    linear         its rate times 8, after a warm-up from that of B (Goyal et al. 2017)
    lars           a rate for each layer (You, Gitman, Ginsburg 2017)
    lamb           the same of Adam (You et al. 2020)
    growing        B, then 4 B, then 8 B, with a rate that stays (Smith et al. 2018)
    onecycle       8 B, up to the rate of `linear` and down (Smith and Topin 2019)

Nothing is tuned, and the rates of LARS and LAMB are guesses;
``sweeps/s8_large_batch.py`` searches them, with a smaller model. ``:echo`` uses every
image 4 times (after decoding, spread over a buffer of 4,096), at equal updates and so a
quarter of the reads. ``:tiny`` is a smoke test on synthetic shapes, which ends within
two minutes.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from echo_jax.config import load_config
from echo_jax.config.study import default_study, set_arms

VARIANTS = ("echo", "tiny")

_CONFIGS = Path(__file__).parent
_TIMES = 8
_ECHO = {"stage": "decode", "order": "spread", "factor": 4.0, "buffer": 4096}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"echo"`` or ``"tiny"``.
    """
    if variant not in ("", *VARIANTS):
        raise ValueError(f"variant {variant!r} is unknown; use echo, tiny, or none.")
    is_tiny = variant == "tiny"
    file = "shapes.py:tiny" if is_tiny else "cifar.py:tiny"
    base = load_config(str(_CONFIGS / file))
    study = default_study("Eight times the batch, at equal examples", base, {})
    if is_tiny:
        study.base.update({"batch_size": 8, "updates": 64, "checkpoint_every": 0})
        study.name += ": a smoke test"
    if variant == "echo":
        study.base.echo.update(_ECHO)
        study.name += ", each used four times"
    study.base.eval_every = study.base.updates // 4
    study.base.optim.update(
        {"schedule": "cosine", "warmup_updates": study.base.updates // 16}
    )
    set_arms(study, _arms(study.base.batch_size, study.base.updates))
    return study.lock()


def _arms(batch_size: int, updates: int) -> dict[str, Any]:
    """Returns the variants next to a baseline that makes ``updates`` updates."""
    large = {
        "batch_size": _TIMES * batch_size,
        "updates": updates // _TIMES,
        "log_every": max(1, updates // 64),
        "eval_every": updates // 32,
        "optim": {"warmup_updates": updates // 40},
    }
    linear = {"scale": "linear", "reference_batch": batch_size}
    warm = {**linear, "warmup_updates": updates // 40, "start_fraction": 1 / _TIMES}
    # Half of the examples in batches of B, a quarter in those of 4 B, and of 8 B.
    ends = (updates // 2, updates // 2 + updates // 16)
    growing = {
        "batch_size": _TIMES * batch_size,
        "updates": ends[1] + updates // 32,
        "batch": {"boundaries": ends, "factors": (4, 2)},
        "optim": {"schedule": "constant"},
    }
    return {
        "baseline": {},
        "untuned": large,
        "linear": {**large, "optim": warm},
        "lars": {**large, "optim": {**large["optim"], "name": "lars", "lr": 10.0}},
        "lamb": {**large, "optim": {**large["optim"], "name": "lamb", "lr": 0.02}},
        "growing": growing,
        "onecycle": {
            **large,
            "optim": {
                **linear,
                "schedule": "onecycle",
                "warmup_updates": 0,
                "start_fraction": 0.04,
            },
        },
    }
