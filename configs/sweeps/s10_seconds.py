r"""The seconds of s10_heat.py: nothing simulated, a solver in a process of its own.

    echo-jax study --config configs/sweeps/s10_seconds.py --workdir runs/s10_seconds

Each variant trains once to the validation loss of s10_heat.py, with one seed (another
one by ``--config.base.seed=10``; 0 to 2 and 1000 to 1007 chose the points), at the best
point that the searches found for it:

    baseline, baseline_2, baseline_3    no echo, with 1, 2 and 3 solver processes
    e2, e4, e8, back_to_back, reservoir    the echoes of s10_heat.py
    adaptive, adaptive_8    what is fresh as it comes, no example more than 4 or 8 times

The adaptive ones, whose counts depend on the seconds, have the points of e4 and e8.
``metrics.jsonl`` of each variant has its loss at equal seconds, as far as to those of
the fastest one, after which the others train on.

Nothing else should run on the machine. With one core for everything, the solver takes
its time from the step: begin the command with ``taskset -c 0``.

``:fed`` has a network so wide that a step takes longer than a fresh batch. Nothing
waits, and an echo must bring nothing. It has three variants: no echo, e4 and adaptive.
Begin it with ``NPROC=1``, which leaves the solver a core of two: else the step uses
both. ``:tiny`` is a smoke test.
"""

import copy
from collections.abc import Mapping
from typing import Any

import s10_heat
from ml_collections import ConfigDict
from sweep_parts import check_variant

from echo_jax.config.study import set_arms

# Of the best points of the three searches of s10_heat.py, the one that took the fewest
# fresh examples with the 8 new seeds, on the mean.
_POINTS = {
    "baseline": {"lr": 0.00508852, "b1": 0.941674},
    "e2": {"lr": 0.00702847, "b1": 0.935326},
    "e4": {"lr": 0.0073142, "b1": 0.841995},
    "e8": {"lr": 0.0073142, "b1": 0.841995},
    "back_to_back": {"lr": 0.00748071, "b1": 0.701949},
    "reservoir": {"lr": 0.00702847, "b1": 0.935326},
}
# The wide network was not searched: all variants have the best of four rates of the
# baseline, 5e-4 to 4e-3, with one seed.
_WIDE, _WIDE_POINT = 2048, {"lr": 2e-3, "b1": 0.9}

VARIANTS = ("fed", "tiny")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"fed"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_fed = variant == "fed"
    study = s10_heat.get_config("tiny" if variant == "tiny" else "")
    study = study.copy_and_resolve_references()
    arms = {name: study.arms[name].to_dict() for name in study.order}
    for name, arm in arms.items():
        arm["optim"] = _WIDE_POINT if is_fed else _POINTS[name]
    arms = _with_clocked(arms, arms["e4"]["echo"]["buffer"])
    if is_fed:
        arms = {name: arms[name] for name in ("baseline", "e4", "adaptive")}
    with study.unlocked():
        set_arms(study, {name: copy.deepcopy(arm) for name, arm in arms.items()})
        study.name = "Seconds where a solver computes the data: the heat equation"
        study.base.data.workers = 1
        if is_fed:
            study.name += ", a step longer than a fresh batch"
            study.base.model.width = _WIDE
        study.search.space = ConfigDict()
        study.confirm.streams = 0
        study.falsifiers = ()
    return study.lock()


def _with_clocked(arms: Mapping[str, Any], buffer: int) -> dict[str, Any]:
    """Returns variants with those that only a clock tells apart, or that follow one."""
    found = {"baseline": arms["baseline"]}
    for number in (2, 3):
        solvers = {"data": {"workers": number}}
        found[f"baseline_{number}"] = {**arms["baseline"], **solvers}
    found |= arms
    for name, cap in (("adaptive", 4), ("adaptive_8", 8)):
        echo = {"mode": "adaptive", "max_uses": cap, "buffer": buffer}
        found[name] = {**arms[f"e{cap}"], "echo": echo}
    return found
