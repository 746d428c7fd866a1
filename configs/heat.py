"""A network learns the heat equation from a solver that runs while it trains.

    echo-jax train --config configs/heat.py --workdir runs/heat

A square plate has one temperature, its edges are held at four others, and the network
predicts the field at some later time: an MLP of 3 layers, 6-384-384-1024. Every
example is computed when it is read (implicit Euler, sparse LU), in a process of its
own. Nothing is simulated about its speed: a fresh batch takes several times as long
as a step. `--config.data.workers` sets the number of solver processes.

The metric is the mean squared error of the field, in units of 115 K squared.

``configs/heat.py:spread`` and ``configs/heat.py:adaptive`` echo every example at most 4
times; ``configs/heat.py:tiny`` is a smoke test.
"""

from ml_collections import ConfigDict

from echo_jax.config import default_config

VARIANTS = ("spread", "adaptive", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, ``"spread"``, ``"adaptive"``, or ``"tiny"`` for a run of seconds.
    """
    if variant not in ("", *VARIANTS):
        known = ", ".join(VARIANTS)
        raise ValueError(f"variant {variant!r} is unknown; use {known}, or none.")
    config = default_config("heat")
    config.updates = 2000
    config.batch_size = 32
    config.eval_every = 100
    config.target = 0.003
    config.data.source = "solver"
    config.data.workers = 1
    config.data.eval_examples = 512
    config.echo.stage = "decode"
    config.optim.name = "adamw"
    config.optim.lr = 5e-3  # Near the best of every variant in sweeps/s10_heat.py.
    config.optim.warmup_updates = 20
    config.precision.compute = "float32"
    config.data.train_examples = 1_000_000  # None is computed twice.
    config.model.width = 384
    config.model.depth = 2
    if variant == "spread":
        config.echo.factor = 4.0
        config.echo.order = "spread"
        config.echo.buffer = 512
    if variant == "adaptive":
        config.echo.mode = "adaptive"
        config.echo.buffer = 512
    if variant == "tiny":
        config.updates = 40
        config.log_every = 10
        config.eval_every = 20
        config.checkpoint_every = 20
        config.data.workers = 0
        config.data.eval_examples = 64
        config.model.width = 16
    return config
