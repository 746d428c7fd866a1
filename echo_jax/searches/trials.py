"""The trials of a study that searches, and the files that keep them.

A *trial* is one training: of an arm, at a point of the space, on a stream (the seed of
data, initialisation and dropout). Trials come in *units*, which one process makes:

- ``ARM.search-K``: the points of one search, one after another on one stream. As soon
  as one has met the target, later ones are cut when they need ``cut`` times its
  updates: they have lost. What is cut follows from the trials before, whoever makes
  them.
- ``ARM.confirm-K``: the best point of that search, on streams that no search has seen.

All arms have the same points and streams, so that they can be compared in pairs. A unit
is a file in the folder ``trials``, replaced after every trial, and locked by who makes
it. Nothing else is shared, so that processes and machines need not know each other.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from echo_jax.files.folders import RunPath
from echo_jax.files.json_files import DamagedFileError, read_json, write_json
from echo_jax.searches.space import Space
from echo_jax.terminal.printable import printable

__all__ = [
    "OUTCOMES",
    "Protocol",
    "Trial",
    "Unit",
    "best_of",
    "crossing",
    "made_of",
    "read_environments",
    "read_unit",
    "write_unit",
]

OUTCOMES = ("reached", "ended", "cut", "short", "diverged", "failed")
"""What became of a trial: it met the target; ended, where there is none; was cut; did
not meet it in all updates; its loss was no number; or it could not be trained, as its
message says."""

_NUMBER = int | float
_TRIAL: dict[str, Any] = {
    "number": int,
    "stream": int,
    "point": dict,
    "outcome": str,
    "message": str,
    "limit": int,
    "score": int | float | None,
    "updates_to_target": int | float | None,
    "fresh_to_target": int | float | None,
    "best": int | float | None,
    "final": int | float | None,
    "updates": list,
    "fresh": list,
    "values": list,
}
_UNIT: dict[str, Any] = {"made_of": str, "trials": list, "environments?": list}


@dataclass(frozen=True)
class Trial:
    """One training, and what became of it.

    Attributes:
      number: Of its unit, from 0.
      stream: The seed of data, initialisation and dropout.
      point: The searched fields' values, by dotted name.
      outcome: One of `OUTCOMES`.
      message: Why it could not be trained.
      limit: The updates that it might take.
      score: By which a search judges it, the less the better: fresh examples to the
        target, or without one the last loss, or less the last accuracy. None if it
        did not get there.
      updates_to_target: Until the metric met the target, between two evaluations on
        the straight line that joins them; None if it did not.
      fresh_to_target: Fresh examples read until then.
      best: The best value of the metric; None if none was a number.
      final: The last one.
      updates: At every evaluation.
      fresh: Fresh examples read until then.
      values: The metric; None where it was no number.
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
    """Trials that one process makes, one after another.

    Attributes:
      arm: Of the study.
      kind: ``search`` or ``confirm``.
      repeat: Which search, from 0.
    """

    arm: str
    kind: str
    repeat: int

    def __str__(self) -> str:
        return f"{self.arm}.{self.kind}-{self.repeat}"

    @property
    def search(self) -> "Unit":
        """The search that it is, or confirms."""
        return Unit(self.arm, "search", self.repeat)

    def path(self, workdir: RunPath) -> RunPath:
        """Returns its file."""
        return workdir / "trials" / f"{self}.json"


@dataclass(frozen=True)
class Protocol:
    """How the arms of a study are searched and confirmed.

    Attributes:
      arms: Their names, in order.
      space: Of the search; without axes nothing is searched, and the arms are confirmed
        as their configs are.
      points: Of a search.
      repeats: Searches of each arm, each with points and a stream of its own.
      streams: New ones on which the best point of each search is trained.
      seed: Names the points and the streams.
      cut: See the module; 0 cuts nothing.
    """

    arms: tuple[str, ...]
    space: Space
    points: int
    repeats: int
    streams: int
    seed: int
    cut: float

    def units(self) -> list[Unit]:
        """Returns all units, in the order in which they are made."""
        kinds = ("search", "confirm") if self.space.axes else ("confirm",)
        return [
            Unit(arm, kind, repeat)
            for repeat in range(self.repeats)
            for arm in self.arms
            for kind in kinds
        ]

    def size(self, unit: Unit) -> int:
        """Returns how many trials a unit has, if its search has found a point."""
        return self.points if unit.kind == "search" else self.streams

    def is_over(self, found: Sequence[Trial]) -> bool:
        """Whether a search with these trials has all, so that its best is known."""
        return not self.space.axes or len(found) >= self.points

    def stream(self, unit: Unit, number: int) -> int:
        """Returns the stream of a trial."""
        if unit.kind == "search":
            return self.seed + unit.repeat
        # Beyond those of the searches, however many more there will be.
        return self.seed + 1000 + number

    def points_of(self, unit: Unit, found: Sequence[Trial]) -> list[Mapping[str, Any]]:
        """Returns the point of every trial of a unit.

        Args:
          unit: The unit.
          found: The trials of its search; none of a search itself.

        Returns:
          Nothing where no trial of the search has met the target.
        """
        if unit.kind == "search":
            return [*self.space.points(self.points, self.seed + unit.repeat)]
        if not self.space.axes:
            return [{}] * self.streams
        best = best_of(found)
        return [best.point] * self.streams if best else []

    def limit(self, updates: int, eval_every: int, before: Sequence[Trial]) -> int:
        """Returns the updates that a trial of a search may take.

        Args:
          updates: Without a cut.
          eval_every: The updates from one evaluation to the next.
          before: The trials of the search before it.
        """
        best = best_of(before)
        if best is None or best.updates_to_target is None or not self.cut:
            return updates
        # As many evaluations as are needed to see that it is late.
        needed = self.cut * best.updates_to_target
        return min(updates, math.ceil(needed / eval_every) * eval_every)


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the first trial with the least score, if any has one."""
    scored = [(trial.score, trial.number, trial) for trial in trials]
    found = [each for each in scored if each[0] is not None]
    return min(found, key=lambda each: each[:2])[2] if found else None


def crossing(
    updates: Sequence[int],
    fresh: Sequence[int],
    values: Sequence[float | None],
    target: float,
    mode: str,
) -> tuple[float, float] | None:
    """Returns updates and fresh examples at which a metric met its target.

    Evaluations every ten of 310 updates are 3 % apart, as far as arms may differ: so
    between the last one above the target and the first one below it, a straight line
    says where it was met.

    Args:
      updates: At every evaluation.
      fresh: Fresh examples read until then.
      values: The metric; None or NaN where it was no number.
      target: To be met.
      mode: ``min`` or ``max``: whether the metric is to be small or large.

    Returns:
      None where it was not met.

    Example:
      >>> crossing([0, 10, 20], [0, 320, 640], [5.0, 3.0, 2.0], 2.25, "min")
      (17.5, 560.0)
    """
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
    """Names all that decides a unit's trials but how many there are: a hash.

    Args:
      config: Of the arm, plain fields.
      protocol: Of the study.
      unit: Of the arm.
    """
    space = {name: asdict(axis) for name, axis in protocol.space.axes.items()}
    deciding = [config, space, protocol.seed, protocol.cut, unit.repeat]
    text = json.dumps(deciding, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_unit(workdir: RunPath, unit: Unit, wanted: str = "") -> list[Trial]:
    """Reads the trials of a unit that there are.

    Args:
      workdir: Of the study.
      unit: The unit.
      wanted: From `made_of`; without it those of any study are read.

    Raises:
      DamagedFileError: It was not written like this.
      ValueError: They are of another study.
    """
    path = unit.path(workdir)
    content = read_json(path, _UNIT)
    if content is None:
        return []
    if wanted and content["made_of"] != wanted:
        raise ValueError(
            f"{path} holds trials of another config or search; use another --workdir"
        )
    return [*_trials(path, content["trials"])]


def _trials(path: RunPath, rows: Sequence[Any]) -> Iterator[Trial]:
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
            raise DamagedFileError(path, f"trial {number} is none ({wrong})")
        yield Trial(**{**row, "message": printable(row["message"])})


def read_environments(workdir: RunPath, unit: Unit) -> list[Mapping[str, Any]]:
    """Reads on what the trials of a unit were made: software, machine and data.

    Returns:
      Those that differ; none of trials of an earlier version.

    Raises:
      DamagedFileError: It was not written like this.
    """
    path = unit.path(workdir)
    found = (read_json(path, _UNIT) or {}).get("environments", [])
    if not all(isinstance(each, dict) for each in found):
        raise DamagedFileError(path, "an environment is none")
    return list(found)


def write_unit(
    workdir: RunPath,
    unit: Unit,
    made_of: str,
    trials: Sequence[Trial],
    environments: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Replaces the file of a unit; for who has locked it."""
    content = {
        "made_of": made_of,
        "environments": [*environments],
        "trials": [asdict(trial) for trial in trials],
    }
    write_json(unit.path(workdir), content, indent=None)
