"""Echo, epochs or a cache: the same updates, and an eighth of the reads.

    echo-jax study --config configs/sweeps/s5_epochs.py --workdir runs/s5

A byte-level Transformer on the Python standard library's source code takes 512 updates
of 32, and its last loss is compared. Every variant is searched over learning rate,
momentum and weight decay:

    baseline    16,384 fresh examples: what no echo can beat
    epochs      8 epochs of 2,048 examples, read again in each of them
    epochs_4    4 epochs of 4,096 examples
    cache       the same examples, each used 8 times, as many of them in memory
    echo_512    the same with 512 in memory; echo_64 and batch with less

All other variants but ``epochs_4`` know the same 2,048 examples. ``epochs`` reads
16,384 times, ``batch`` 2,048 times, and the others as often and what they have begun to
use at the end: ``cache`` 2,993 times. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config.study import default_study

_FACTOR = 8

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    base = byte_lm(updates=64 if variant else 512, tiny=bool(variant))
    distinct = base.updates * base.batch_size // _FACTOR
    with base.unlocked():
        base.data.train_examples = 0

    def few(examples: int = distinct, **echo: Any) -> dict[str, Any]:
        return {"data": {"train_examples": examples}, "echo": echo}

    often, apart = {"factor": float(_FACTOR)}, {"order": "spread"}
    arms = {
        "baseline": {},
        "epochs": few(),
        "cache": few(**often, **apart, buffer=distinct),
        "echo_512": few(**often, **apart, buffer=distinct // 4),
        "echo_64": few(**often, **apart, buffer=64),
        "batch": few(**often, stage="batch", buffer=1),
        "epochs_4": few(2 * distinct),
    }
    study = default_study(
        "Echo, epochs or a cache, at equal updates: byte-level LM, B = 32", base, arms
    )
    search_space(study, tiny=bool(variant))
    study.search.space.optim.weight_decay = "log:1e-3:1"
    study.falsifiers = (
        less_than("epochs", "cache", "epochs are better than a cache", 0.0),
        less_than("epochs", "echo_512", "epochs are better than an echo", 0.0),
        less_than("echo_512", "baseline", "repeats are better than fresh data", 0.0),
    )
    return study.lock()
