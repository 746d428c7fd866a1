"""Which echo factor for which batch size: every factor tuned, with intervals.

    echo-jax study --config configs/sweeps/s2_factor.py --workdir runs/s2_32

A byte-level Transformer on the Python standard library's source code, an example of
Choi et al. 2019, figure 5, in small: examples are used 1, 2, 4, 8 and 16 times,
shuffled within a buffer of 1,024. ``:8`` and ``:128`` are of other batch sizes, each a
study with a baseline of its own.

``:decay`` is the analysis under a learning rate that decays, tuned by itself: 400
updates along a cosine to 1 % of the rate, of fresh data or with an echo, and as short
ones of fresh data alone as the echoes read (``fresh_2``, a half, to ``fresh_8``). The
last loss is compared. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config.study import default_study

# Updates that a trial may take, and between evaluations: smaller batches need more.
_UPDATES = {8: (6000, 25), 32: (1600, 10), 128: (800, 5)}
# Choi et al. 2019, figure 5: a Transformer on LM1B, B = 1,024.
_PAPER = {"e2": 0.516, "e4": 0.312, "e8": 0.347, "e16": 0.392}

VARIANTS = ("8", "32", "128", "decay", "tiny")


def get_config(variant: str = "32") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``"8"``, ``"32"``, ``"128"``, ``"decay"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    if variant == "decay":
        return _under_decay()
    is_tiny = variant == "tiny"
    batch_size = 32 if is_tiny else int(variant)
    base = byte_lm(batch_size, tiny=is_tiny)
    base.echo.buffer = 64 if is_tiny else 1024
    if not is_tiny:
        base.updates, base.eval_every = _UPDATES[batch_size]
        base.optim.warmup_updates = base.updates // 80
    arms = {"baseline": {}, **_echoes(2, 4, 8, 16)}
    study = default_study(
        f"How large an echo factor may be: byte-level LM, B = {batch_size}", base, arms
    )
    study.paper = ConfigDict(_PAPER)
    search_space(study, tiny=is_tiny)
    study.falsifiers = (
        less_than("baseline", "e4", "the tuned baseline matches e = 4"),
    )
    return study.lock()


def _under_decay() -> ConfigDict:
    base = byte_lm(updates=400)
    base.optim.schedule = "cosine"
    arms = {"baseline": {}, **_echoes(2, 4, 8)}
    for part in (2, 4, 8):
        arms[f"fresh_{part}"] = {"updates": base.updates // part}
    study = default_study(
        "Factors under a rate that decays, 400 updates: byte-level LM, B = 32",
        base,
        arms,
    )
    search_space(study)
    study.falsifiers = (
        less_than("fresh_4", "e4", "a short training is better than e = 4", 0.0),
        less_than("e4", "baseline", "repeats are better than fresh data", 0.0),
    )
    return study.lock()


def _echoes(*factors: int) -> dict[str, Any]:
    return {
        f"e{factor}": {"echo": {"factor": float(factor), "order": "window_shuffle"}}
        for factor in factors
    }
