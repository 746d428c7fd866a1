"""The quickstart: what data echoing is worth to a trainer that waits for its input.

    echo-jax study --config configs/quickstart.py --workdir runs/quickstart

A small byte-level Transformer learns the Python standard library's source code,
read through a storage that is as slow as it has to be for R = 4: a fresh batch
takes four times as long as a training step. The step time is measured on the
machine before the arms run, and the storage is simulated (it sleeps); reads are
sequential, as over one connection. Every arm trains to one target loss:

    baseline     every example once, with prefetching
    batch_echo   every batch 4 times in a row
    shuffle      every example 4 times, shuffled within the delay of a buffer
    spread       every example 4 times, its uses evenly far apart

It ends within 4 minutes on two CPU cores. With the library of Python 3.11 the
arms needed 9,920, 5,440, 2,871 and 2,809 fresh examples, in 310, 680, 340 and 320
updates.

All arms have the same learning rate, and none is tuned: the study shows what
happens to a trainer in which echoing is switched on. Choi et al. tuned every arm
by itself, which shows what can be attained.

``configs/quickstart.py:fed`` is the same with R = 0.5: the accelerator never
waits, so echoing has nothing to give. ``configs/quickstart.py:tiny`` is a smoke
test that ends within a minute.

``configs/quickstart.py:which`` compares placements, orders, factors, buffers and
modes, and ``configs/quickstart.py:bursty`` some of them where one read in ten takes
16 times as long as the others. Each ends within 5 minutes; docs/which-echo.md shows
both.
"""

from ml_collections import ConfigDict

from echo_jax.config import default_config
from echo_jax.config.study import default_study, set_arms

_RATIOS = {"": 4.0, "fed": 0.5, "tiny": 4.0, "which": 4.0, "bursty": 4.0}
_NAMES = {
    "": "A byte-level language model that waits for its input",
    "fed": "A byte-level language model that does not wait for its input",
    "tiny": "A smoke test of the quickstart",
    "which": "Which echo? One small language model, R = 4",
    "bursty": "Which echo, where storage is bursty? One small language model, R = 4",
}
VARIANTS = tuple(filter(None, _NAMES))

_DEVICE = {"where": "device", "after": "decode", "buffer": 512}
_ON_DEVICE = {
    "device": {"factor": 4.0, "order": "spread", **_DEVICE},
    "adaptive": {"mode": "adaptive", "max_uses": 4, **_DEVICE},
    "adaptive_cap_6": {"mode": "adaptive", "max_uses": 6, **_DEVICE},
}
_WHICH = {
    "baseline": {"factor": 1.0},
    "batch_echo": {"factor": 4.0, "after": "batch"},
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

# Every command and every file of the study, but no result.
_TINY = {
    "updates": 60,
    "target": 3.6,
    "data": {"eval_examples": 64},
    "model": {"seq_len": 32, "d_model": 32, "d_ff": 64},
}


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` for R = 4, ``"fed"`` for R = 0.5, ``"tiny"``, ``"which"`` or
        ``"bursty"``.
    """
    if variant not in _NAMES:
        known = ", ".join(VARIANTS)
        raise ValueError(f"variant {variant!r} is unknown; use {known}, or none.")
    ratio = _RATIOS[variant]
    study = default_study(_NAMES[variant], _base(), {}, storage_ratio=ratio)
    buffer = 512  # Examples: 16 batches.
    if variant == "tiny":
        study.base.update(_TINY)
        buffer = 64
    if variant == "bursty":
        study.base.data.storage.distribution = "bursty"
    arms = {"which": _WHICH, "bursty": _BURSTY}.get(variant)
    if arms:
        set_arms(study, {name: {"echo": echo} for name, echo in arms.items()})
        return study.lock()
    set_arms(
        study,
        {
            "baseline": {"echo": {"factor": 1.0}},
            "batch_echo": {"echo": {"factor": 4.0, "after": "batch"}},
            "shuffle": {
                "echo": {"factor": 4.0, "order": "window_shuffle", "buffer": buffer}
            },
            "spread": {"echo": {"factor": 4.0, "order": "spread", "buffer": buffer}},
        },
    )
    return study.lock()


def _base() -> ConfigDict:
    config = default_config()
    config.workload = "lm"
    config.batch_size = 32
    config.updates = 1500  # Enough for every arm: they stop at the target.
    config.target = 2.3
    config.stop_at_target = True
    config.log_every = 50
    config.eval_every = 10  # How exactly the target is met: within ten updates.
    config.data.source = "stdlib"
    config.data.eval_examples = 256
    config.echo.after = "augment"
    config.optim.name = "adamw"
    config.optim.lr = 3e-3
    config.optim.warmup_updates = 20
    config.optim.clip_norm = 1.0
    config.precision.compute = "float32"
    with config.unlocked():
        config.model.seq_len = 48
        config.model.d_model = 64
        config.model.num_layers = 2
        config.model.num_heads = 2
        config.model.d_ff = 256
        config.model.dropout = 0.0
    return config
