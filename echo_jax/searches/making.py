"""Trains the trials of a study: units, one after another, in a process.

Trials are ordinary runs in a folder that is thrown away, without checkpoints: one that
is killed is made again, and ends alike. Their learning rates and other searched numbers
are arguments of the compiled update, so that the trials of an arm share a compilation.
"""

import copy
import io
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from echo_jax.config import Config, default_config
from echo_jax.config.check import check_config
from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.json_files import read_json
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.searches.space import flat_fields
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
from echo_jax.studies.runs import read_run
from echo_jax.training.finite import NonFiniteLossError
from echo_jax.training.trainer import train_checked
from echo_jax.workloads import build

__all__ = ["make_trials", "num_missing", "refuse_other_falsifiers"]

# What a config that cannot be trained at a point raises; files that cannot be written
# are no result.
_FAILURES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
_DIGITS = 6
# What is kept of a run's environment: nothing that is measured.
_ENVIRONMENT = ("python", "versions", "backend", "devices", "commit", "workload")


def make_trials(
    protocol: Protocol,
    arms: Mapping[str, Config],
    workdir: RunPath,
    on_made: Callable[[Unit, Trial], None],
) -> None:
    """Makes the trials that nobody has made yet, and nobody else is making.

    Args:
      protocol: Of the study.
      arms: The training config of each.
      workdir: Of the study.
      on_made: Told of every trial.

    Raises:
      Interrupted: A signal stopped it; the trial under way is made anew next time.
      DataTimeoutError: The data did not come.
      ValueError: The folder holds trials of another study.
    """
    is_over = False
    while not is_over:
        # What others have ended meanwhile may be confirmed now.
        is_over = True
        for unit in protocol.units():
            arm = arms[unit.arm]
            if not num_missing(protocol, arm, workdir, unit):
                continue
            try:
                with FolderLock(workdir / "trials", name=f".{unit}.lock") as lock:
                    _make_unit(protocol, arm, workdir, unit, lock, on_made)
            except FolderInUseError:
                continue  # Whoever has it makes it.
            is_over = False


def num_missing(protocol: Protocol, arm: Config, workdir: RunPath, unit: Unit) -> int:
    """Returns how many trials of a unit are to be made; 0 as long as nobody can know.

    Args:
      protocol: Of the study.
      arm: The training config of the unit's arm.
      workdir: Of the study.
      unit: The unit.

    Raises:
      ValueError: The folder holds trials of another study.
    """
    points = _points(protocol, workdir, unit)
    return len(points) - len(_made(protocol, arm, workdir, unit, points))


def refuse_other_falsifiers(
    falsifiers: Sequence[Mapping[str, Any]], protocol: Protocol, workdir: RunPath
) -> None:
    """Refuses falsifiers that were not written down before the trials were made.

    What else a study says may not change either where it decides its trials
    (`num_missing`); more searches, points and streams may be asked for.

    Args:
      falsifiers: Of the study that is to be made.
      protocol: Of that study.
      workdir: Of the study; as long as it holds no trials, anything may be said.

    Raises:
      ValueError: They differ from those that stand in ``study.json``.
    """
    wanted = {"arms": list, "falsifiers?": list}
    kept = read_json(workdir / "study.json", wanted)
    if kept is None or kept.get("falsifiers", []) == [*map(dict, falsifiers)]:
        return
    has_trials = any(
        Unit(arm, kind, repeat).path(workdir).exists()
        for arm in kept["arms"]
        for kind in ("search", "confirm")
        for repeat in range(protocol.repeats)
    )
    if has_trials:
        raise ValueError(
            f"{workdir} holds trials, and config.falsifiers are not those that its "
            "study.json had before them; leave them as they were, or use another "
            "--workdir"
        )


def _made(
    protocol: Protocol,
    arm: Config,
    workdir: RunPath,
    unit: Unit,
    points: Sequence[Mapping[str, Any]],
) -> list[Trial]:
    """Returns the trials of a unit that need not be made."""
    made = read_unit(workdir, unit, _deciding(protocol, arm, unit))[: len(points)]
    # A search that was made longer may have found another point.
    is_of = all(t.point == p for t, p in zip(made, points, strict=False))
    return made if is_of else []


def _deciding(protocol: Protocol, arm: Config, unit: Unit) -> str:
    # A field that is added later, with a default that changes nothing, decides nothing.
    default = flat_fields(default_config().to_dict())
    fields = flat_fields(arm.to_dict())
    missing = object()
    own = {n: v for n, v in fields.items() if default.get(n, missing) != v}
    return made_of(own, protocol, unit)


def _points(
    protocol: Protocol, workdir: RunPath, unit: Unit
) -> list[Mapping[str, Any]]:
    if unit.kind == "search":
        return protocol.points_of(unit, [])
    found = read_unit(workdir, unit.search)
    return protocol.points_of(unit, found) if protocol.is_over(found) else []


def _make_unit(
    protocol: Protocol,
    arm: Config,
    workdir: RunPath,
    unit: Unit,
    lock: FolderLock,
    on_made: Callable[[Unit, Trial], None],
) -> None:
    deciding = _deciding(protocol, arm, unit)
    points = _points(protocol, workdir, unit)
    trials = _made(protocol, arm, workdir, unit, points)
    environments = read_environments(workdir, unit) if trials else []
    for number in range(len(trials), len(points)):
        config = copy.deepcopy(arm)
        config.seed = config.echo.seed = protocol.stream(unit, number)
        config.update_from_flattened_dict(dict(points[number]))
        # A schedule that ends with the run ends where it would without a cut.
        config.optim.decay_updates = config.optim.decay_updates or config.updates
        if unit.kind == "search" and config.local.schedule == "none":
            config.updates = protocol.limit(config.updates, config.eval_every, trials)
        found, environment = _trained(config, lock)
        trial = replace(found, number=number, point=dict(points[number]))
        if environment and environment not in environments:
            environments.append(environment)
        if trial.outcome == "short" and config.updates < arm.updates:
            trial = replace(trial, outcome="cut")
        trials.append(trial)
        lock.check()
        write_unit(workdir, unit, deciding, trials, environments)
        on_made(unit, trial)


def _trained(config: Config, lock: FolderLock) -> tuple[Trial, dict[str, Any]]:
    """Trains a trial; returns what became of it, without its place, and on what."""
    known = {"number": 0, "stream": config.seed, "point": {}, "limit": config.updates}
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        console = Console(file=io.StringIO())
        try:
            check_config(config)
            train_checked(
                config, build(config), run_folder(folder), lock, console=console
            )
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
