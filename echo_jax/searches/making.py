"""Trains the trials of a study, one unit after another, in one process.

Trials are ordinary runs in a temporary folder, without checkpoints. A trial that is
killed is made again and ends with the same result. Its learning rate and its other
searched numbers are arguments of the compiled update, so that the trials of a variant
share one compilation.
"""

import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from etils import epath
from rich.console import Console

from echo_jax.config import default_config
from echo_jax.config.run import RunSpec
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import read_json
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.searches.trials import (
    Protocol,
    Trial,
    Unit,
    crossing,
    made_of,
    read_environments,
    read_unit,
    write_unit,
)
from echo_jax.studies.fields import flat_fields
from echo_jax.studies.runs import read_run
from echo_jax.training.loop import train_checked
from echo_jax.training.records.environment import is_same_data
from echo_jax.training.start import check_start
from echo_jax.training.window import NonFiniteLossError
from echo_jax.workloads import build

# Errors of a config that cannot be trained at a point. A file that cannot be written
# is not such a result.
_FAILURES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
_DIGITS = 6
# The fields of a run's environment that are kept: none that is measured.
_ENVIRONMENT = ("python", "versions", "backend", "devices", "commit", "workload")


def make_trials(
    protocol: Protocol,
    variants: Mapping[str, RunSpec],
    workdir: epath.Path,
    on_made: Callable[[Unit, Trial], None],
) -> None:
    """Makes the trials that are missing and that no other process makes."""
    is_over = False
    while not is_over:
        # Other workers may have ended searches that can be confirmed now.
        is_over = True
        for unit in protocol.units():
            variant = variants[unit.variant]
            if not num_missing(protocol, variant, workdir, unit):
                continue
            try:
                with FolderLock(workdir / "trials", name=f".{unit}.lock") as lock:
                    _make_unit(protocol, variant, workdir, unit, lock, on_made)
            except FolderInUseError:
                continue  # The owner of the lock makes it.
            is_over = False


def num_missing(
    protocol: Protocol, variant: RunSpec, workdir: epath.Path, unit: Unit
) -> int:
    """Returns the number of a unit's missing trials; 0 while its search is not over."""
    _, points, made = _state(protocol, variant, workdir, unit)
    return len(points) - len(made)


# `num_missing` refuses other changes that decide trials. A study may ask for more
# searches, points and seeds.
def refuse_other_predictions(
    predictions: Sequence[Mapping[str, Any]], workdir: epath.Path
) -> None:
    """Refuses predictions other than those in ``study.json``, once trials exist."""
    kept = read_json(workdir / "study.json", {"falsifiers?": list})
    if kept is None or kept.get("falsifiers", []) == [*map(dict, predictions)]:
        return
    if any((workdir / "trials").glob("*.json")):
        raise ValueError(
            f"{workdir} holds trials, and config.falsifiers (the predictions) are not "
            "those that its study.json had before the trials; restore them, or use "
            "another --workdir"
        )


def _state(
    protocol: Protocol, variant: RunSpec, workdir: epath.Path, unit: Unit
) -> tuple[str, list[Mapping[str, Any]], list[Trial]]:
    """Returns a unit's hash, its points, and the trials that need not be made again."""
    # A field that a later version added is ignored while it has its default.
    default = flat_fields(default_config().to_dict())
    fields = flat_fields(variant.to_dict())
    missing = object()
    own = {n: v for n, v in fields.items() if default.get(n, missing) != v}
    own.pop("data.source", None)  # The data may move.
    deciding = made_of(own, protocol, unit)
    points = protocol.points_of(unit, [])
    if unit.kind != "search":
        found = read_unit(workdir, unit.search)
        points = protocol.points_of(unit, found) if protocol.is_over(found) else []
    made = read_unit(workdir, unit, deciding)[: len(points)]
    # A longer search may have found another point.
    is_of = all(t.point == p for t, p in zip(made, points, strict=False))
    return deciding, points, made if is_of else []


def _make_unit(
    protocol: Protocol,
    variant: RunSpec,
    workdir: epath.Path,
    unit: Unit,
    lock: FolderLock,
    on_made: Callable[[Unit, Trial], None],
) -> None:
    deciding, points, trials = _state(protocol, variant, workdir, unit)
    environments = read_environments(workdir, unit) if trials else []
    for number in range(len(trials), len(points)):
        seed = protocol.seed_of(unit, number)
        fields = {"seed": seed, "echo.seed": seed, **points[number]}
        updates = fields.setdefault("updates", variant.updates)
        # A schedule that ends with the run must end where it would without a cut.
        decay = fields.get("optim.decay_updates", variant.optim.decay_updates)
        fields["optim.decay_updates"] = decay or updates
        if unit.kind == "search" and variant.local.sync_schedule == "none":
            updates = protocol.limit(updates, variant.eval_every, trials)
        fields["updates"] = updates
        found, environment = _trained(variant, fields, lock)
        trial = replace(found, number=number, point=dict(points[number]))
        if environment and not all(
            is_same_data(each.get("workload"), environment["workload"])
            for each in environments
        ):
            raise ValueError(
                f"{unit.path(workdir)} holds trials on other data than those that "
                f"config.data.source={variant.data.source!r} holds now; put the old "
                "data back, or use another --workdir"
            )
        if environment and environment not in environments:
            environments.append(environment)
        if trial.outcome == "short" and updates < variant.updates:
            trial = replace(trial, outcome="cut")
        trials.append(trial)
        lock.check()
        write_unit(workdir, unit, deciding, trials, environments)
        on_made(unit, trial)


def _trained(
    variant: RunSpec, fields: Mapping[str, Any], lock: FolderLock
) -> tuple[Trial, dict[str, Any]]:
    """Trains a trial; returns it without its place, and its environment."""
    known = {"number": 0, "stream": fields["seed"], "point": {}}
    known["limit"] = fields["updates"]
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        console = Console(file=io.StringIO())
        try:
            config = variant.changed(fields)
            accepted = check_start(config, build(config), run_folder(folder))
            train_checked(accepted, lock, console=console)
        except NonFiniteLossError as error:
            return Trial(**known, outcome="diverged", message=str(error)), {}
        except _FAILURES as error:
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            return Trial(**known, outcome="failed", message=message), {}
        run = read_run(folder)
    updates = [row["updates"] for row in run.evals]
    fresh = [row["fresh"] for row in run.evals]
    values = [_short(value) for value in run.values]
    met, final, mode = None, values[-1], run.summary["mode"]
    if run.target is None:
        outcome, score = "ended", final
        if final is not None and mode == "max":
            score = -final
    else:
        met = crossing(updates, fresh, values, run.target, mode)
        outcome, score = ("reached", met[1]) if met else ("short", None)
    environment = {name: run.environment[name] for name in _ENVIRONMENT}
    environment["metric"] = run.metric
    trial = Trial(
        **known,
        outcome=outcome,
        score=score,
        updates_to_target=met and met[0],
        fresh_to_target=met and met[1],
        best=_short(run.best),
        final=final,
        updates=updates,
        fresh=fresh,
        values=values,
    )
    return trial, environment


def _short(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
