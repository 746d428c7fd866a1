r"""The bytes that devices send each other, and the cost of sending fewer.

    NPROC=8 JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=4 \
      echo-jax study --config configs/communication.py --workdir runs/communication

A small byte-level Transformer learns the Python standard library's source code on
4 devices. Every variant uses 65,536 examples. Another number of devices is another
study:

    baseline          one model, gradients summed at each of 2,048 updates of 32
    accumulate_4      a quarter of the updates, of 4 parts each; _16 a sixteenth
    every_4           replicas that synchronise after every 4th update; _16 every 16th
    bernoulli_4       after each with probability 1/4; _16 with 1/16
    post_local        at each of the first half, then every 16th (Lin et al. 2020)
    diloco            every 16th, with an outer step (Douillard et al. 2023)
    stale_4           one model, gradients 4 updates late: simulated asynchronous SGD

``bytes_sent`` stands in every run's ``summary.json`` and rows. With ``:echo`` every
example is used 4 times, by the device that has it, at a quarter of the reads: equal
updates and equal bytes. Nothing is tuned; where a batch is larger, the rate is
multiplied by the square root of how many times (Malladi et al. 2022). ``:tiny`` is a
smoke test, which ends within two minutes.
"""

import math
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from echo_jax.config import load_config
from echo_jax.config.study import default_study, set_arms

VARIANTS = ("echo", "tiny")

_CONFIGS = Path(__file__).parent
_ECHO = {
    "buffer_on": "device",
    "stage": "decode",
    "order": "spread",
    "factor": 4.0,
    "buffer": 1024,
}
_TINY = {
    "updates": 64,
    "target": 3.3,
    "data": {"eval_examples": 64},
    "model": {"seq_len": 32, "d_model": 32, "d_ff": 64},
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"echo"`` or ``"tiny"``.
    """
    if variant not in ("", *VARIANTS):
        raise ValueError(f"variant {variant!r} is unknown; use echo, tiny, or none.")
    base = load_config(str(_CONFIGS / "quickstart.py:storage")).base
    study = default_study("What devices say to each other", base, {})
    study.base.updates = 2048
    study.base.stop_at_target = False
    study.base.checkpoint_every = 0
    if variant == "tiny":
        study.name += ": a smoke test"
        study.base.update(_TINY)
    if variant == "echo":
        study.name += ", each example used four times"
        study.base.echo.update(_ECHO)
    updates = study.base.updates
    study.base.eval_every = study.base.log_every = updates // 16
    study.base.optim.warmup_updates = updates // 64
    every, by_chance = {"sync_schedule": "every"}, {"sync_schedule": "bernoulli"}
    post_local = {**every, "sync_every": 16, "start_after": updates // 2}
    set_arms(
        study,
        {
            "baseline": {},
            "accumulate_4": _accumulated(study.base, 4),
            "accumulate_16": _accumulated(study.base, 16),
            "every_4": {"local": {**every, "sync_every": 4}},
            "every_16": {"local": {**every, "sync_every": 16}},
            "bernoulli_4": {"local": {**by_chance, "sync_p": 1 / 4}},
            "bernoulli_16": {"local": {**by_chance, "sync_p": 1 / 16}},
            "post_local": {"local": post_local},
            "diloco": {"local": {**every, "sync_every": 16, "outer": "nesterov"}},
            "stale_4": {"local": {"staleness": 4}},
        },
    )
    return study.lock()


def _accumulated(base: ConfigDict, parts: int) -> dict[str, Any]:
    """Returns a variant of as many examples, in batches that are computed in parts."""
    return {
        "batch_size": parts * base.batch_size,
        "batch": {"accumulation_steps": parts},
        "updates": base.updates // parts,
        "eval_every": base.updates // parts // 4,
        "log_every": base.updates // parts // 4,
        "optim": {
            "lr": math.sqrt(parts) * base.optim.lr,
            "warmup_updates": max(1, base.optim.warmup_updates // parts),
        },
    }
