"""The quickstart: what data echoing is worth to a trainer that waits for its input.

    echo-jax study --config configs/quickstart.py --workdir runs/quickstart

A network learns the heat equation from a solver that runs while it trains, in a
process of its own (see `configs/heat.py`). Nothing sleeps: a fresh batch takes as long
as the solver takes, several times as long as a step. Every variant trains to one loss:

    baseline     every example once, with prefetching
    batch_echo   every batch 4 times in a row
    spread       every example 4 times, its uses evenly far apart
    adaptive     fresh examples as they come, none more than 4 times

It ends within two minutes on two CPU cores. With one core the solver takes its time
from the step, so nothing waits, and an echo saves only the solver's work.

All variants have one learning rate, near the best one of each in `sweeps/s10_heat.py`,
which tunes every variant by itself. Batches in a row would need a smaller momentum.

``configs/quickstart.py:tiny`` is a smoke test that ends within a minute.

The other studies of this file, such as ``configs/quickstart.py:storage``, train a small
byte-level Transformer on the Python standard library's source code. Their storage is
simulated (it sleeps). The step is measured first, and sets the storage's speed:

    storage      a fresh batch takes four steps' time, R = 4
    fed          R = 0.5: the accelerator never waits for data
    which        placements, orders, factors, buffers and modes, R = 4
    bursty       some of them where one read in ten takes 16 times as long

Each ends within 5 minutes; docs/choose-an-echo.md shows the last two.
"""

from pathlib import Path

from ml_collections import ConfigDict

from echo_jax.config import default_config, load_config
from echo_jax.config.study import default_study, set_arms

_RATIOS = {"storage": 4.0, "fed": 0.5, "which": 4.0, "bursty": 4.0}
_NAMES = {
    "": "A network that learns the heat equation while a solver computes its data",
    "tiny": "A smoke test of the quickstart",
    "storage": "A byte-level language model that waits for its input",
    "fed": "A byte-level language model that does not wait for its input",
    "which": "Which echo? One small language model, R = 4",
    "bursty": "Which echo, where storage is bursty? One small language model, R = 4",
}
VARIANTS = tuple(filter(None, _NAMES))

_DEVICE = {"buffer_on": "device", "stage": "decode", "buffer": 512}
_ON_DEVICE = {
    "device": {"factor": 4.0, "order": "spread", **_DEVICE},
    "adaptive": {"mode": "adaptive", "max_uses": 4, **_DEVICE},
    "adaptive_cap_6": {"mode": "adaptive", "max_uses": 6, **_DEVICE},
}
_WHICH = {
    "baseline": {"factor": 1.0},
    "batch_echo": {"factor": 4.0, "stage": "batch"},
    "shuffle": {"factor": 4.0, "order": "window_shuffle", "buffer": 512},
    "spread_buffer_96": {"factor": 4.0, "order": "spread", "buffer": 96},
    "spread": {"factor": 4.0, "order": "spread", "buffer": 512},
    "spread_buffer_2048": {"factor": 4.0, "order": "spread", "buffer": 2048},
    "spread_e2": {"factor": 2.0, "order": "spread", "buffer": 512},
    "spread_e8": {"factor": 8.0, "order": "spread", "buffer": 512},
    **_ON_DEVICE,
    "stochastic": {
        "mode": "stochastic",
        "fetch": {"start": 0.25, "end": 0.25},
        **_DEVICE,
    },
}
_BURSTY = {name: _WHICH[name] for name in ("baseline", "spread", *_ON_DEVICE)}

_SPREAD = {"factor": 4.0, "order": "spread"}
_HEAT = {
    "baseline": {"factor": 1.0},
    "batch_echo": {"factor": 4.0, "stage": "batch"},
    "spread": {**_SPREAD, "buffer": 512},
    "adaptive": {"mode": "adaptive", "max_uses": 4, "buffer": 512},
}
_STORAGE = {
    "baseline": {"factor": 1.0},
    "batch_echo": {"factor": 4.0, "stage": "batch"},
    "shuffle": {"factor": 4.0, "order": "window_shuffle", "buffer": 512},
    "spread": {**_SPREAD, "buffer": 512},
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"tiny"``, ``"storage"``, ``"fed"``, ``"which"`` or
        ``"bursty"``.
    """
    if variant not in _NAMES:
        known = ", ".join(VARIANTS)
        raise ValueError(f"variant {variant!r} is unknown; use {known}, or none.")
    is_heat = variant not in _RATIOS
    base = _heat(is_tiny=variant == "tiny") if is_heat else _base()
    ratio = _RATIOS.get(variant, 0.0)
    study = default_study(_NAMES[variant], base, {}, storage_ratio=ratio)
    if variant == "bursty":
        study.base.data.storage.distribution = "bursty"
    default = _HEAT if is_heat else _STORAGE
    arms = {"which": _WHICH, "bursty": _BURSTY}.get(variant, default)
    set_arms(study, {name: {"echo": echo} for name, echo in arms.items()})
    return study.lock()


def _heat(*, is_tiny: bool) -> ConfigDict:
    heat = Path(__file__).with_name("heat.py")
    config = load_config(f"{heat}:tiny" if is_tiny else str(heat))
    config.updates = 200 if is_tiny else 4000  # Every variant stops at the target.
    config.target = 0.4 if is_tiny else 0.003
    config.stop_at_target = True
    config.log_every = 100
    config.eval_every = 20  # How exactly the target is met.
    return config


def _base() -> ConfigDict:
    config = default_config("lm")
    config.batch_size = 32
    config.updates = 1500  # Enough for every variant: they stop at the target.
    config.target = 2.3
    config.stop_at_target = True
    config.log_every = 50
    config.eval_every = 10  # How exactly the target is met: within ten updates.
    config.data.source = "stdlib"
    config.data.eval_examples = 256
    config.echo.stage = "augment"
    config.optim.name = "adamw"
    config.optim.lr = 3e-3
    config.optim.warmup_updates = 20
    config.optim.clip_norm = 1.0
    config.precision.compute = "float32"
    config.model.seq_len = 48
    config.model.d_model = 64
    config.model.num_layers = 2
    config.model.num_heads = 2
    config.model.d_ff = 256
    config.model.dropout = 0.0
    return config
