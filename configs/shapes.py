"""A small ResNet on synthetic images of eight shapes, stored as JPEG.

    echo-jax train --config configs/shapes.py --workdir runs/shapes

A ResNet-8 of 75 thousand parameters tells circles from hexagons. It needs no
download: 18 thousand images are drawn at the start. Results on it say how an echo
behaves, not how good a model is.

The metric is the validation accuracy: 0.125 by chance, and 0.939 after its 1000
updates, without an echo. That run took 3 minutes on 2 CPU cores that other jobs
used at the same time (seed 0, one run).

``configs/shapes.py:tiny`` is a smoke test of a few seconds of training.
"""

from ml_collections import ConfigDict

from echo_jax.config import default_config

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the config.

    Args:
      variant: ``""``, or ``"tiny"`` for a run of a minute on two CPU cores.
    """
    if variant not in ("", *VARIANTS):
        raise ValueError(f"variant {variant!r} is unknown; use tiny, or none.")
    config = default_config("shapes")
    config.updates = 1000
    config.batch_size = 64
    config.eval_every = 100
    config.data.source = "synthetic"
    config.data.eval_examples = 1024
    config.echo.stage = "decode"
    config.optim.name = "sgd"
    config.optim.lr = 0.1
    config.optim.schedule = "cosine"
    config.optim.warmup_updates = 50
    config.optim.weight_decay = 5e-4
    config.precision.compute = "float32"
    config.data.train_examples = 16_384
    config.model.depth = 8
    config.model.width = 16
    config.model.norm = "batch"
    if variant == "tiny":
        config.updates = 40
        config.batch_size = 32
        config.log_every = 10
        config.eval_every = 20
        config.checkpoint_every = 20
        config.data.train_examples = 1024
        config.data.eval_examples = 128
        config.optim.warmup_updates = 10
        config.model.width = 8
    return config
