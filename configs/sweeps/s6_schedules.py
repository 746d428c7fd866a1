"""When to load: schedules of a stochastic echo, with the same loads on average.

    echo-jax study --config configs/sweeps/s6_schedules.py --workdir runs/s6

A byte-level Transformer on the Python standard library's source code takes 400 updates
of 32. Before each of them a coin says whether a fresh batch is loaded, with probability
1/4 on average, and the last loss is compared:

    baseline    with 1/4 at every update
    linear      from 0.4 to 0.1; cosine along half a cosine; multistep in two halvings
    reversed    from 0.1 to 0.4; reversed_cosine along half a cosine
    fixed       every example 4 times, evenly far apart: no coin

Every arm is searched. A manuscript under review claims that the cosine is best.
``:tiny`` is a smoke test.
"""

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space

from echo_jax.config_study import default_study

VARIANTS = ("tiny",)


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    base = byte_lm(updates=32 if variant else 400, tiny=bool(variant))
    place = {"where": "device", "after": "decode", "buffer": 64 if variant else 512}

    def coin(schedule: str, start: float, end: float) -> dict:
        load = {"schedule": schedule, "start": start, "end": end}
        load["updates"] = base.updates
        return {"echo": {"mode": "stochastic", "load": load, **place}}

    # Half of the time at the start's value, a quarter at half of that, a quarter at a
    # quarter: 0.6875 of the start on average, but for what rounds to it.
    steep = 0.25 / (0.5 + 0.25 * 0.5 + 0.25 * 0.25)
    arms = {
        "baseline": coin("constant", 0.25, 0.25),
        "linear": coin("linear", 0.4, 0.1),
        "cosine": coin("cosine", 0.4, 0.1),
        "multistep": coin("multistep", steep, steep / 4),
        "reversed": coin("linear", 0.1, 0.4),
        "reversed_cosine": coin("cosine", 0.1, 0.4),
        "fixed": {"echo": {"factor": 4.0, "order": "spread", **place}},
    }
    study = default_study(
        "When to load, a quarter of the updates: byte-level LM, B = 32", base, arms
    )
    search_space(study, tiny=bool(variant))
    study.falsifiers = (
        less_than("baseline", "cosine", "a constant rate is better than a cosine", 0.0),
        less_than("reversed_cosine", "cosine", "the reversed cosine is better", 0.0),
        less_than("fixed", "cosine", "no coin is better than a cosine", 0.0),
    )
    return study.lock()
