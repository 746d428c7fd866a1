"""The value of a repeat by its lag (reuse distance): the updates between two uses.

    echo-jax study --config configs/sweeps/s4_lag.py --workdir runs/s4_32

A byte-level Transformer on the Python standard library's source code, e = 2: batches
back to back (a lag of 1), and examples spread evenly over buffers in which their second
use comes 4, 16 or 64 updates after the first. They are compared with examples shuffled
within the memory of 16. Choi et al. 2019, figure 7, is of the same on LM1B.

``:8`` is of batches of 8. ``:long`` takes 3,000 updates of 8, so that a lag may be
1,000, and compares the last loss. ``:cifar`` is ResNet-8 on CIFAR-10, prepared as
``s1_placement.py`` says, with lags of 1, 16 and 62. ``:tiny`` is a smoke test.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space, small_resnet

from echo_jax.config.study import default_study

_LAGS = {"8": (4, 16, 64), "32": (4, 16, 64), "long": (16, 256, 1000), "tiny": (4,)}
# Choi et al. 2019, figures 7 and 3: echoed batches on LM1B and on CIFAR-10. The other
# variants of the paper have its shuffle buffer.
_PAPER_LM, _PAPER_CIFAR = {"lag_1": 0.684}, {"lag_1": 0.848}

VARIANTS = ("8", "32", "cifar", "long", "tiny")


def get_config(variant: str = "32") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``"8"``, ``"32"``, ``"cifar"``, ``"long"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    if variant == "cifar":
        return _on_cifar()
    is_tiny, is_long = variant == "tiny", variant == "long"
    batch_size = {"32": 32, "tiny": 32}.get(variant, 8)
    base = byte_lm(batch_size, updates=3000 if is_long else 0, tiny=is_tiny)
    if batch_size == 8:
        base.optim.warmup_updates = 75
    if variant == "8":
        base.updates, base.eval_every = 6000, 25
    lags = _LAGS[variant]
    # A use comes e / (e - 1) buffers after the one before.
    buffers = {f"lag_{lag}": lag * batch_size // 2 for lag in lags}
    memory = buffers["lag_4" if is_tiny else "lag_16"]
    study = default_study(
        f"What a repeat is worth by its lag, e = 2: byte-level LM, B = {batch_size}"
        + (", 3,000 updates" if is_long else ""),
        base,
        _arms(buffers, memory),
    )
    search_space(study, tiny=is_tiny)
    if is_long:
        study.search.points = 8
        study.falsifiers = (
            less_than("lag_1", "lag_16", "16 updates are worth no more than 1", 0.0),
            less_than("lag_16", "lag_256", "256 are worth no more than 16", 0.0),
            less_than("lag_256", "lag_1000", "1,000 are worth no more than 256", 0.0),
        )
    else:
        study.paper = ConfigDict(_PAPER_LM)
    if not is_long and not is_tiny:
        study.falsifiers = _falsifiers("lag_4", "lag_64")
    return study.lock()


def _on_cifar() -> ConfigDict:
    base = small_resnet()
    # Batches of 64: a buffer of 2,000 makes a lag of 62, as in s1_placement.py.
    study = default_study(
        "What a repeat is worth by its lag, e = 2: ResNet-8 on CIFAR-10, B = 64",
        base,
        _arms({"lag_16": 512, "lag_62": base.echo.buffer}, 512, stage="decode"),
    )
    search_space(study)
    study.search.points = 8
    study.paper = ConfigDict(_PAPER_CIFAR)
    study.falsifiers = _falsifiers("lag_16", "lag_62")
    return study.lock()


def _arms(buffers: Mapping[str, int], memory: int, **place: str) -> dict[str, Any]:
    """Returns no echo, batches back to back, and echoes of examples in some buffers."""
    arms = {
        "baseline": {},
        "lag_1": {"echo": {"factor": 2.0, "stage": "batch", "buffer": 1}},
    }
    for name, buffer in buffers.items():
        echo = {"factor": 2.0, "order": "spread", "buffer": buffer, **place}
        arms[name] = {"echo": echo}
    shuffled = {"factor": 2.0, "order": "window_shuffle", "buffer": memory, **place}
    return arms | {"shuffle": {"echo": shuffled}}


def _falsifiers(short: str, long: str) -> Sequence[dict[str, Any]]:
    return (
        less_than("lag_1", "lag_16", "a lag of 16 updates is worth no more than 1"),
        less_than(
            short,
            long,
            f"a lag of {long[4:]} updates is worth no more than {short[4:]}",
        ),
        less_than("shuffle", "lag_16", "spread is no better than shuffle"),
    )
