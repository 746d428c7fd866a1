r"""What an echo is worth where a solver computes the data, every variant tuned.

    echo-jax study --config configs/sweeps/s10_heat.py --workdir runs/s10

A network learns the heat equation (`configs/heat.py`) to a validation loss of 0.003:

    baseline        every example once
    e2, e4, e8      examples 2, 4 and 8 times, evenly far apart, buffer of 2,048
    back_to_back    every batch 4 times in a row
    reservoir       a coin fetches a batch with probability 1/4; the others are uniform
                    draws from the last 2,048 examples

Learning rate and b1 of AdamW are searched, after a warm-up of 20 updates at a constant
rate. Fresh examples and updates are counted, so the solver runs in the trial's own
process. ``s10_seconds.py`` has the seconds, with echoes that depend on them.

``reservoir`` is what comes nearest to the reservoir of Melissa (Meyer et al. 2023,
arXiv 2309.16743). There each example of a batch is a uniform draw from a buffer of seen
and unseen ones, a new example overwrites one that was seen, and the training waits only
while the buffer has too few. Here a batch is fresh or repeats as a whole, each fresh
example is used at once, the oldest gives way, and a coin takes the place of the
solver's speed, so that the trials are the same on every machine.

Narrower than the protocol of the studies: 3 searches in place of 5, and 8 new seeds
in place of 16, as the others have. A trial ends at 1.5 times the updates of the best
one before it in place of 2, which changes no best point. In a pilot of 23 trials (no
echo, e = 2) the best momenta lay at the upper edge of the space of the other sweeps,
which is moved. ``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import check_variant, less_than, search_space, start_study

from echo_jax.config.study import set_arms

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny = variant == "tiny"
    study = start_study(
        "Data from a solver: the heat equation, B = 32",
        "heat.py:tiny" if is_tiny else "heat.py",
    )
    base = study.base
    base.target, base.stop_at_target = 0.003, True
    base.eval_every = base.log_every = 20
    base.data.workers = 0
    base.optim.warmup_updates = 20
    if is_tiny:
        base.updates, base.target = 200, 0.4
    set_arms(study, _arms(64 if is_tiny else 2048))
    if not is_tiny:
        study.arms.back_to_back.updates = 3000
    search_space(study, tiny=is_tiny)
    study.search.space.optim.b1 = "log1m:0.02:0.5"
    study.stop.cut = 1.5
    study.falsifiers = (
        less_than("baseline", "e4", "e = 4 reads over 0.6 of the baseline's", 1 / 0.6),
        less_than("back_to_back", "e4", "batches back to back read less than e = 4"),
        less_than(
            "back_to_back", "baseline", "batches back to back halve the reads", 0.5
        ),
        less_than("e4", "e8", "e = 8 reads no less than e = 4"),
        less_than("reservoir", "e4", "a reservoir reads less than spread repeats"),
    )
    return study.lock()


def _arms(buffer: int) -> dict[str, Any]:
    """Returns no echo, and echoes of examples and of batches."""
    quarter = {"start": 0.25, "end": 0.25}
    echoes: dict[str, dict[str, Any]] = {"baseline": {"factor": 1.0}}
    for factor in (2, 4, 8):
        spread = {"factor": float(factor), "order": "spread", "buffer": buffer}
        echoes[f"e{factor}"] = spread
    echoes["back_to_back"] = {"factor": 4.0, "stage": "batch"}
    echoes["reservoir"] = {"mode": "stochastic", "fetch": quarter, "buffer": buffer}
    return {name: {"echo": echo} for name, echo in echoes.items()}
