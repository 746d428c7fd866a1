"""Makes the plan of a search and reads and writes its trials.

A *trial* is one training of a variant, at a point of the space, with a seed (of data,
initial values and dropout). One process makes the trials of a *unit*:

- ``VARIANT.search-K``: the points of one search, one after another with one seed. Once
  a trial has reached the target, a later trial is cut at ``cut`` times its updates. The
  cut follows from the earlier trials, so it is the same on every machine.
- ``VARIANT.confirm-K``: the best point of that search, with seeds that no search has
  used.

All variants have the same points and seeds, so that they can be compared in pairs. A
unit is a file in the folder ``trials``. Its worker holds a lock on it and replaces it
after every trial. Processes and machines share nothing else.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from etils import epath

from echo_jax.config.group import made, named
from echo_jax.config.study import ConfirmSpec, SearchSpec, StopSpec, arm_names
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.searches.space import Space
from echo_jax.terminal.printable import printable

OUTCOMES = ("reached", "ended", "cut", "short", "diverged", "failed")
"""What became of a trial: it reached the target; ended, without one; was cut; did not
reach it in all updates; its loss was not finite; or it could not be trained, as its
message says."""

_NUMBER = int | float
_TRIAL: dict[str, Any] = {
    **dict.fromkeys(("number", "stream", "limit"), int),
    **dict.fromkeys(("outcome", "message"), str),
    **dict.fromkeys(("score", "best", "final"), int | float | None),
    **dict.fromkeys(("updates_to_target", "fresh_to_target"), int | float | None),
    **{"point": dict, "updates": list, "fresh": list, "values": list},
}
_UNIT: dict[str, Any] = {"made_of": str, "trials": list, "environments?": list}


@dataclass(frozen=True)
class Trial:
    """One training and its outcome (one of `OUTCOMES`).

    Attributes:
      stream: The seed of data, initial values and dropout, as its file calls it.
      point: The values of the searched fields, by dotted name.
      message: The reason why it could not be trained.
      limit: The maximum number of updates.
      score: Smaller is better: fresh examples to the target or, without a target, the
        last loss or the negative last accuracy. None if the trial did not get there.
      updates_to_target: Interpolated between two evaluations; None if missed.
      updates, fresh, values: Updates, fresh examples and metric at every evaluation.
    """

    number: int
    stream: int
    point: Mapping[str, Any]
    outcome: str
    message: str = ""
    limit: int = 0
    score: float | None = None
    updates_to_target: float | None = None
    fresh_to_target: float | None = None
    best: float | None = None
    final: float | None = None
    updates: Sequence[int] = ()
    fresh: Sequence[int] = ()
    values: Sequence[float | None] = ()


@dataclass(frozen=True)
class Unit:
    """Trials that one process makes; `kind` is ``search`` or ``confirm``."""

    variant: str
    kind: str
    repeat: int

    def __str__(self) -> str:
        return f"{self.variant}.{self.kind}-{self.repeat}"

    @property
    def search(self) -> "Unit":
        """The search that the unit is or confirms."""
        return Unit(self.variant, "search", self.repeat)

    def path(self, workdir: epath.Path) -> epath.Path:
        return workdir / "trials" / f"{self}.json"


@dataclass(frozen=True)
class Protocol:
    """How the variants of a study are searched and confirmed."""

    variants: tuple[str, ...]
    space: (
        Space  # Without axes nothing is searched and the variants keep their configs.
    )
    points: int  # Number of points of a search.
    repeats: int  # Searches of each variant, each with its own points and seed.
    num_seeds: int  # New seeds with which the best point of each search is trained.
    seed: int  # Of the first search.
    cut: float  # Factor on the best trial's updates (see the module); 0 cuts nothing.

    @classmethod
    def of(cls, variants: Iterable[str], study: Mapping[str, Any]) -> Self:
        """Returns the protocol of a study, from the fields of its ``study.json``."""
        search = study["search"]
        space = Space.parse(search["space"])
        return cls(
            variants=tuple(variants),
            space=space,
            points=search["points"],
            repeats=search["repeats"] if space.axes else 1,
            num_seeds=study["confirm"]["streams"],
            seed=search["seed"],
            cut=study["stop"]["cut"],
        )

    def units(self) -> list[Unit]:
        """Returns all units in the order in which they are made."""
        kinds = ("search", "confirm") if self.space.axes else ("confirm",)
        return [
            Unit(variant, kind, repeat)
            for repeat in range(self.repeats)
            for variant in self.variants
            for kind in kinds
        ]

    def size(self, unit: Unit) -> int:
        """Returns the number of trials of a unit whose search has found a point."""
        return self.points if unit.kind == "search" else self.num_seeds

    def is_over(self, found: Sequence[Trial]) -> bool:
        """Whether a search with these trials is complete."""
        return not self.space.axes or len(found) >= self.points

    def seed_of(self, unit: Unit, number: int) -> int:
        """Returns the seed of a trial: of data, initial values and dropout."""
        if unit.kind == "search":
            return self.seed + unit.repeat
        # Greater than the seeds of the searches, even if more searches are added later.
        return self.seed + 1000 + number

    def points_of(self, unit: Unit, found: Sequence[Trial]) -> list[Mapping[str, Any]]:
        """Returns the point of every trial; `found` is the trials of its search."""
        if unit.kind == "search":
            return [*self.space.points(self.points, self.seed + unit.repeat)]
        if not self.space.axes:
            return [{}] * self.num_seeds
        best = best_of(found)
        return [best.point] * self.num_seeds if best else []

    def limit(self, updates: int, eval_every: int, before: Sequence[Trial]) -> int:
        """Returns the maximum updates of the search's next trial, after `before`."""
        best = best_of(before)
        if best is None or best.updates_to_target is None or not self.cut:
            return updates
        # Round up to the first evaluation at which the trial is late.
        needed = self.cut * best.updates_to_target
        return min(updates, math.ceil(needed / eval_every) * eval_every)


def protocol_of(study: Any) -> Protocol | None:
    """Returns the search of a study; None if each variant is one run.

    Raises:
      ValueError: A field has an impossible value.
    """
    if "search" not in study:
        return None
    has_axes = Space.parse(study.search.space.to_dict()).axes
    if not has_axes and not study.confirm.streams:
        return None
    if study.storage_ratio:
        raise ValueError(
            f"config.storage_ratio={study.storage_ratio:g} is for seconds, and a "
            "search compares counts; set --config.storage_ratio=0"
        )
    for group, kind, values in (
        ("search.", SearchSpec, study.search),
        ("confirm.", ConfirmSpec, study.confirm),
        ("stop.", StopSpec, study.stop),
    ):
        with named("config."), named(group):
            made(kind, values)
    return Protocol.of(arm_names(study), study.to_dict())


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the first trial with the smallest score, or None."""
    scored = [(trial.score, k) for k, trial in enumerate(trials)]
    known = [each for each in scored if each[0] is not None]
    return trials[min(known)[1]] if known else None


# Evaluations every 10 of 310 updates are 3 % apart, as much as variants may differ.
# Therefore the function interpolates linearly between two evaluations.
def crossing(
    updates: Sequence[int],
    fresh: Sequence[int],
    values: Sequence[float | None],
    target: float,
    mode: str,
) -> tuple[float, float] | None:
    """Returns updates and fresh examples at which a metric reached its target."""
    sign = -1 if mode == "max" else 1
    losses = [math.nan if x is None else sign * x for x in values]
    goal = sign * target
    at = next((k for k, loss in enumerate(losses) if loss <= goal), None)
    if at is None:
        return None
    part = 1.0
    if at and math.isfinite(losses[at - 1]):
        part = (losses[at - 1] - goal) / (losses[at - 1] - losses[at])
    last = max(at - 1, 0)
    between = [row[last] + part * (row[at] - row[last]) for row in (updates, fresh)]
    return float(between[0]), float(between[1])


def made_of(config: Mapping[str, Any], protocol: Protocol, unit: Unit) -> str:
    """Returns a hash of everything that decides a unit's trials except their number."""
    space = {name: asdict(axis) for name, axis in protocol.space.axes.items()}
    deciding = [config, space, protocol.seed, protocol.cut, unit.repeat]
    text = json.dumps(deciding, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_unit(workdir: epath.Path, unit: Unit, wanted: str = "") -> list[Trial]:
    """Returns the existing trials of a unit; refuses those of another hash."""
    path = unit.path(workdir)
    content = read_json(path, _UNIT)
    if content is None:
        return []
    if wanted and content["made_of"] != wanted:
        raise ValueError(
            f"{path} holds trials of another config or search; use another --workdir"
        )
    return [*_trials(path, content["trials"])]


def _trials(path: epath.Path, rows: Sequence[Any]) -> Iterator[Trial]:
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or set(row) != set(_TRIAL):
            raise DamagedFileError(path, f"trial {number} has other fields")
        wrong = [n for n, kind in _TRIAL.items() if not isinstance(row[n], kind)]
        columns = row["updates"], row["fresh"], row["values"]
        numbers = [x for column in columns for x in column if x is not None]
        if (
            wrong
            or row["outcome"] not in OUTCOMES
            or row["number"] != number
            or len({*map(len, columns)}) > 1
            or not all(isinstance(x, _NUMBER) for x in numbers)
        ):
            raise DamagedFileError(path, f"trial {number} has wrong values ({wrong})")
        yield Trial(**{**row, "message": printable(row["message"])})


def read_environments(workdir: epath.Path, unit: Unit) -> list[Mapping[str, Any]]:
    """Returns the different environments in which a unit's trials were made."""
    path = unit.path(workdir)
    found = (read_json(path, _UNIT) or {}).get("environments", [])
    if not all(isinstance(each, dict) for each in found):
        raise DamagedFileError(path, "an environment is not an object")
    return list(found)


def write_unit(
    workdir: epath.Path,
    unit: Unit,
    made_of: str,
    trials: Sequence[Trial],
    environments: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Replaces the file of a unit; the caller holds its lock."""
    content = {
        "made_of": made_of,
        "environments": [*environments],
        "trials": [asdict(trial) for trial in trials],
    }
    write_json(unit.path(workdir), content, indent=None)
