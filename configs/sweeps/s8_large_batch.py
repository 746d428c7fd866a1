r"""The cost of a batch eight times as large at equal examples, every variant tuned.

    echo-jax study --config configs/sweeps/s8_large_batch.py --workdir runs/s8

A byte-level Transformer on the Python standard library's source code learns from 16,384
examples, and its last loss is compared:

    baseline      512 updates of 32, AdamW
    adamw         64 updates of 256, its rate searched anew
    onecycle      the same, up to the searched rate and down to nothing
    lamb          the same by LAMB (You et al. 2020)
    lars          the same by LARS (You, Gitman, Ginsburg 2017)
    growing       batches of 32, then of 128, then of 256, with a rate that stays (Smith
                  et al. 2018): half of the examples, a quarter, and a quarter

The learning rate of every variant is searched in one space. With LAMB,
and with LARS at a trust coefficient of 1, the rate is the length of a step relative to
the length of the weights. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than

from echo_jax.config.study import default_study

_TIMES = 8

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    base = byte_lm(8 if is_tiny else 32, updates=64 if is_tiny else 512, tiny=is_tiny)
    updates = base.updates // _TIMES

    def large(**optim: Any) -> dict[str, Any]:
        return {
            "batch_size": _TIMES * base.batch_size,
            "updates": updates,
            "eval_every": updates // 8,
            "log_every": updates // 8,
            "optim": {"warmup_updates": updates // 8, **optim},
        }

    # After half of the examples in batches of B, and a quarter in those of 4 B.
    ends = base.updates // 2, base.updates // 2 + base.updates // 16
    grown = ends[1] + base.updates // 32
    arms = {
        "baseline": {},
        "adamw": large(),
        "onecycle": large(schedule="onecycle", warmup_updates=0, start_fraction=0.04),
        "lamb": large(name="lamb", clip_norm=0.0),
        "lars": large(name="lars", clip_norm=0.0, trust_coefficient=1.0),
        "growing": {
            "batch_size": _TIMES * base.batch_size,
            "updates": grown,
            "eval_every": grown // 8,
            "batch": {"boundaries": ends, "factors": (4, 2)},
        },
    }
    study = default_study(
        "Eight times the batch, at equal examples: byte-level LM", base, arms
    )
    study.search.space = ConfigDict({"optim": {"lr": "log:5e-4:6e-2"}})
    study.search.points, study.search.repeats = (2, 2) if is_tiny else (8, 3)
    study.confirm.streams = 2 if is_tiny else 8
    study.falsifiers = (
        less_than("adamw", "baseline", "large batches learn more of each example", 0.0),
        less_than("adamw", "lamb", "LAMB is not better at 8 B", 0.0),
        less_than("adamw", "growing", "a batch that grows is not better", 0.0),
    )
    return study.lock()
