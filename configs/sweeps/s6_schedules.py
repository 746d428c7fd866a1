"""When to fetch: schedules of a stochastic echo, with as many fetches on average.

    echo-jax study --config configs/sweeps/s6_schedules.py --workdir runs/s6

A byte-level Transformer on the Python standard library's source code takes 400 updates
of 32. Before each of them a coin says whether a fresh batch is loaded, with probability
1/4 on average, and the last loss is compared:

    baseline    with 1/4 at every update
    linear      from 0.4 to 0.1; cosine along half a cosine; multistep in two halvings
    reversed    from 0.1 to 0.4; reversed_cosine along half a cosine
    fixed       every example 4 times, evenly far apart: no coin
    adaptive_4  an adaptive echo whose data is ready before every fourth update, and
                that may use it 4 times; adaptive_8 may use it 8 times

Every variant is searched. A manuscript under review claims that the cosine is best.

``:decay`` has a learning rate that falls to 1 % along a cosine. ``:cifar`` is ResNet-8
on CIFAR-10, prepared as ``s1_placement.py`` says; its last accuracy is compared.
``:tiny`` is a smoke test.
"""

from typing import Any

from ml_collections import ConfigDict
from sweep_parts import byte_lm, check_variant, less_than, search_space, small_resnet

from echo_jax.config.study import default_study

VARIANTS = ("cifar", "decay", "tiny")

# Other variants ask the same questions with fewer arms.
_FEWER = ("baseline", "cosine", "reversed_cosine", "fixed")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the study.

    Args:
      variant: ``""``, ``"cifar"``, ``"decay"`` or ``"tiny"``.
    """
    check_variant(variant, VARIANTS)
    is_tiny, is_cifar = variant == "tiny", variant == "cifar"
    if is_cifar:
        base = small_resnet()
        base.updates, base.eval_every = 400, 50
        base.target, base.stop_at_target = 0.0, False
    else:
        base = byte_lm(updates=32 if is_tiny else 400, tiny=is_tiny)
    if variant == "decay":
        base.optim.schedule = "cosine"
    arms = _arms(base.updates, buffer=64 if is_tiny else 16 * base.batch_size)
    if variant == "decay":
        arms = {name: arms[name] for name in _FEWER}
    if is_cifar:
        arms = {name: arms[name] for name in (*_FEWER, "adaptive_8")}
    study = default_study(
        "When to fetch, a quarter of the updates: "
        + ("ResNet-8 on CIFAR-10, B = 64" if is_cifar else "byte-level LM, B = 32")
        + (", a rate that decays" if variant == "decay" else ""),
        base,
        arms,
    )
    search_space(study, tiny=is_tiny)
    if is_cifar:
        study.search.points = 8
    study.falsifiers = tuple(
        # Of losses the lower one is better, of accuracies the higher one.
        less_than(*((other, arm) if is_cifar else (arm, other)), says, 0.0)
        for arm, other, says in (
            ("baseline", "cosine", "a constant rate is better than a cosine"),
            ("reversed_cosine", "cosine", "the reversed cosine is better"),
            ("fixed", "cosine", "no coin is better than a cosine"),
        )
    )
    return study.lock()


def _arms(updates: int, *, buffer: int) -> dict[str, Any]:
    place = {"buffer_on": "device", "stage": "decode", "buffer": buffer}

    def coin(schedule: str, start: float, end: float) -> dict[str, Any]:
        fetch = {"schedule": schedule, "start": start, "end": end, "updates": updates}
        return {"echo": {"mode": "stochastic", "fetch": fetch, **place}}

    def adaptive(cap: int) -> dict[str, Any]:
        replay = {"replay": "pattern:1000", "max_uses": cap}
        return {"echo": {"mode": "adaptive", **replay, **place}}

    # Half of the time at the start's value, a quarter at half of that, a quarter at a
    # quarter: 0.6875 of the start on average, but for what rounds to it.
    steep = 0.25 / (0.5 + 0.25 * 0.5 + 0.25 * 0.25)
    return {
        "baseline": coin("constant", 0.25, 0.25),
        "linear": coin("linear", 0.4, 0.1),
        "cosine": coin("cosine", 0.4, 0.1),
        "multistep": coin("multistep", steep, steep / 4),
        "reversed": coin("linear", 0.1, 0.4),
        "reversed_cosine": coin("cosine", 0.1, 0.4),
        "fixed": {"echo": {"factor": 4.0, "order": "spread", **place}},
        "adaptive_4": adaptive(4),
        "adaptive_8": adaptive(8),
    }
