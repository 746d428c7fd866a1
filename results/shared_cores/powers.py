"""Which smooth maximum of two times is nearest to trainings beside real decoding?

``python results/shared_cores/powers.py`` fits the contention to each probe of
`sessions.json`, and predicts the trainings after it: fixed echoes of e = 1 to 4, three
adaptive ones, and no echo again, each as the uses of an example and milliseconds.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

SESSIONS = json.loads(Path(__file__).with_name("sessions.json").read_text())


def of_power(power: Callable[[float], float]) -> Callable[..., float]:
    """Returns a smooth maximum whose power follows from the contention."""

    def update_ms(fresh: float, step: float, uses: float, part: float) -> float:
        fresh /= uses
        less, more = sorted((fresh, step + part * fresh))
        if not part or (p := power(part)) == math.inf:
            return more
        return more * (1 + (less / more) ** p) ** (1 / p)

    return update_ms


MODELS = {
    "the maximum": of_power(lambda part: math.inf),
    "the second time alone": lambda fresh, step, uses, c: step + c * fresh / uses,
    "power 6": of_power(lambda part: 6),
    "power 3 / c": of_power(lambda part: 3 / part),
    "power max(6, 3 / c), which was taken": of_power(lambda part: max(6, 3 / part)),
}


def errors(update_ms: Callable[..., float], each: dict, part: float, pairs: list):
    """Returns the relative errors of predictions with a contention."""
    times = each["fresh_ms"], each["step_ms"]
    return [update_ms(*times, uses, part) / ms - 1 for uses, ms in pairs]


def judge(name: str, update_ms: Callable[..., float], sessions: list[dict]) -> str:
    """Returns a line on the errors in probes and trainings."""
    probed, trained = [], []
    for each in sessions:
        pairs = [(float(e), ms) for e, ms in each["together_ms"].items()]
        tried = [errors(update_ms, each, k / 100, pairs) for k in range(201)]
        found = min(tried, key=lambda of: sum(x * x for x in of))
        part = tried.index(found) / 100
        probed += found
        trained += errors(update_ms, each, part, each["trainings"])
    rms = [math.sqrt(sum(x * x for x in of) / len(of)) for of in (probed, trained)]
    beyond = sum(abs(error) > 0.1 for error in trained)
    return (
        f"{name:38}{rms[0]:6.1%} in probes,{rms[1]:6.1%} in trainings, "
        f"{beyond} of {len(trained)} over 10 %"
    )


for title, codes in {"chosen by": ["before"], "judged by": ["44979fb"]}.items():
    part = [each for each in SESSIONS if each["code"] in codes]
    print(f"{title} {len(part)} sessions")
    for name, model in MODELS.items():
        print(f"  {judge(name, model, part)}")
