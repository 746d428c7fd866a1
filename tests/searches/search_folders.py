"""A study that searched, made by hand: with numbers that a reader can check."""

from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import write_json
from echo_jax.searches.trials import Trial, Unit, write_unit

BASE = {
    "workload": "lm",
    "target": 2.0,
    "batch_size": 32,
    "model": {"d_model": 8},
    "data": {"source": "stdlib"},
    "optim": {"name": "adamw", "schedule": "constant", "warmup_updates": 5},
}
# Updates to the target, by arm: of two searches' best points, on three streams.
COSTS = {
    "baseline": [[100, 110, 120], [90, 105, 100]],
    "spread": [[105, 120, 118], [95, 100, 104]],
}
FACTORS = {"baseline": 1, "spread": 4}


def trial(number, updates, factor, point, *, stream=0, reached=True):
    fresh = updates * 32 / factor
    return Trial(
        number=number,
        stream=stream,
        point=point,
        outcome="reached" if reached else "cut",
        limit=1000,
        score=fresh if reached else None,
        updates_to_target=updates if reached else None,
        fresh_to_target=fresh if reached else None,
        best=1.9,
        final=1.95,
        updates=[0, 60, 130],
        fresh=[0, 60 * 32 // factor, 130 * 32 // factor],
        values=[5.0, 3.0, 1.95],
    )


def make_study(path, costs=COSTS, *, target=2.0, falsifiers=()):
    metadata = {
        "name": "A study",
        "arms": list(costs),
        "base_config": {**BASE, "target": target},
        "search": {
            "space": {"optim": {"lr": "log:1e-4:1e-2"}},
            "points": 2,
            "repeats": 2,
            "seed": 0,
        },
        "confirm": {"streams": 3},
        "stop": {"cut": 2.0},
        "falsifiers": list(falsifiers),
        "paper": {"spread": 0.312},
    }
    folder = run_folder(path)
    (folder / "trials").mkdir()
    write_json(folder / "study.json", metadata)
    for arm, searches in costs.items():
        factor = FACTORS[arm]
        for repeat, streams in enumerate(searches):
            tried = [
                trial(0, 300, factor, {"optim.lr": 9.9e-3}, reached=False),
                trial(1, 101, factor, {"optim.lr": 1e-3 * (repeat + 1)}),
            ]
            write_unit(folder, Unit(arm, "search", repeat), "", tried)
            point = tried[1].point
            found = [
                trial(k, updates or 500, factor, point, stream=k, reached=bool(updates))
                for k, updates in enumerate(streams)
            ]
            write_unit(folder, Unit(arm, "confirm", repeat), "", found)
    return folder
