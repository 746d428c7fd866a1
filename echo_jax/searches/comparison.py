"""The arms of a study that searched, compared: what each needed, and how surely."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.json_files import DamagedFileError, missing, read_json
from echo_jax.searches.space import Space
from echo_jax.searches.statistics import (
    Interval,
    expected_best,
    mean_interval,
    relative_seconds,
)
from echo_jax.searches.trials import (
    Protocol,
    Trial,
    Unit,
    best_of,
    read_environments,
    read_unit,
)
from echo_jax.studies import fields
from echo_jax.studies.runs import BASELINE, StudyError
from echo_jax.studies.setting import setting_in_words
from echo_jax.terminal.printable import printable

__all__ = [
    "ArmResult",
    "Falsified",
    "Search",
    "Searched",
    "is_searched",
    "log_speedups",
    "read_search",
]

# Of trials of earlier versions, which do not say theirs.
_METRICS = {"cifar": "accuracy", "lm": "loss"}
# More would take for ever to look for.
_MOST_UNITS = 100_000


class Searched(NamedTuple):
    """What one search of an arm found.

    Attributes:
      trials: All of them.
      best: The one whose point was confirmed; None if none met the target.
      confirmed: On new streams.
    """

    trials: Sequence[Trial]
    best: Trial | None
    confirmed: Sequence[Trial]


@dataclass(frozen=True)
class ArmResult:
    """One line of the comparison.

    Attributes:
      name: The arm.
      searches: One for each repeat; of an arm that was not searched, a single one.
      fresh: Fresh examples to the target beside the baseline's: a ratio. None without a
        baseline, a target, or streams that can be paired.
      updates: The same of updates.
      final: The last value of the metric less the baseline's.
      is_bound: Whether a stream did not meet the target, and was counted with what it
        had read by then: then the ratios are at least so large.
    """

    name: str
    searches: Sequence[Searched]
    fresh: Interval | None
    updates: Interval | None
    final: Interval | None
    is_bound: bool

    @property
    def trials(self) -> list[Trial]:
        """All trials of all searches."""
        return [trial for each in self.searches for trial in each.trials]

    @property
    def confirmed(self) -> list[Trial]:
        """All trials on new streams."""
        return [trial for each in self.searches for trial in each.confirmed]

    @property
    def infeasible(self) -> float:
        """The part of the searches' trials that diverged, or could not be trained."""
        bad = [trial.outcome in ("diverged", "failed") for trial in self.trials]
        return sum(bad) / len(bad) if bad else 0.0

    @property
    def best_scores(self) -> list[float]:
        """The score of every search's best trial."""
        return [each.best.score or 0 for each in self.searches if each.best]

    @property
    def n(self) -> str:
        """How many trials on new streams: searches, and streams of each; or streams."""
        sizes = [len(each.confirmed) for each in self.searches if each.confirmed]
        return f"{len(sizes)} x {max(sizes)}" if len(sizes) > 1 else f"{sum(sizes)}"

    def expected_best(self, k: int) -> float | None:
        """Returns what a search of k trials would have found, on average."""
        found = [
            expected_best([trial.score for trial in each.trials], k)
            for each in self.searches
            if len(each.trials) >= k
        ]
        known = [score for score in found if score is not None]
        return sum(known) / len(known) if known else None

    def mean(self, name: str) -> float | None:
        """Returns the mean of a field over the new streams; None if one lacks it."""
        values = [getattr(trial, name) for trial in self.confirmed]
        if not values or None in values:
            return None
        return float(np.mean(values))


class Falsified(NamedTuple):
    """What became of something that would show an expectation to be wrong.

    Attributes:
      says: What it would mean.
      arm: Whose cost is divided, or from whose last value is subtracted.
      over: The other arm.
      ratio: Of the fresh examples of two arms, or the difference of their last values.
      bound: Below which it would be met.
      is_met: None where the interval holds the bound, so that nobody can tell.
    """

    says: str
    arm: str
    over: str
    ratio: Interval
    bound: float
    is_met: bool | None


@dataclass(frozen=True)
class Search:
    """A study that searched, or trained its arms on several streams.

    Attributes:
      name: The heading of the report.
      base: The config of the arms, plain fields.
      protocol: How they were searched.
      arms: In their order, the baseline first.
      falsifiers: What was written down before.
      environments: Those on which trials were made.
      paper: Published ratios to a baseline's fresh examples, by arm.
    """

    name: str
    base: Mapping[str, Any]
    protocol: Protocol
    arms: Sequence[ArmResult]
    falsifiers: Sequence[Falsified]
    environments: Sequence[Mapping[str, Any]]
    paper: Mapping[str, float]

    @property
    def has_target(self) -> bool:
        """Whether arms are compared by what they needed to reach a target."""
        return bool(self.base["target"])

    @property
    def metric(self) -> str:
        """What is evaluated, such as ``"loss"``."""
        said = next((e["metric"] for e in self.environments if "metric" in e), None)
        return printable(str(said or _METRICS.get(self.base["workload"], "metric")))

    @property
    def mode(self) -> str:
        """Whether the metric is to be small, ``min``, or large, ``max``."""
        for arm in self.arms:
            for trial in (*arm.trials, *arm.confirmed):
                if self.has_target and trial.values and trial.values[0] is not None:
                    return "max" if trial.values[0] < self.base["target"] else "min"
                if not self.has_target and trial.score:
                    return "min" if trial.score == trial.final else "max"
        return "min"

    @property
    def setting(self) -> str:
        """Says what was trained: data, model, batch and optimizer."""
        return setting_in_words(self.base)


def is_searched(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds a study that searched."""
    folder = run_folder(folder)
    try:
        return folder.is_dir() and "search" in (read_json(folder / "study.json") or {})
    except DamagedFileError:
        return False


def read_search(folder: str | os.PathLike[str]) -> Search:
    """Reads a study that searched, as far as it is.

    Args:
      folder: A ``--workdir`` of ``echo-jax study``.

    Raises:
      StudyError: A file is damaged, or no trial was made yet.
    """
    folder = run_folder(folder)
    try:
        metadata = read_json(folder / "study.json", fields.SEARCH)
        if metadata is None:
            raise StudyError(f"{folder} holds no study.json, so it is no study")
        _refuse_damaged(folder / "study.json", metadata)
        protocol = _protocol(metadata)
        results = {arm: _searches(folder, protocol, arm) for arm in protocol.arms}
        environments: list[Mapping[str, Any]] = []
        for unit in protocol.units():
            for each in read_environments(folder, unit):
                if each not in environments:
                    environments.append(each)
    except StudyError:
        raise
    except ValueError as error:
        raise StudyError(str(error)) from None
    if not any(each.trials or each.confirmed for r in results.values() for each in r):
        raise StudyError(f"{folder} holds no trials yet; run its study first")
    has_target = bool(metadata["base_config"]["target"])
    baseline = results.get(BASELINE)
    names = sorted(protocol.arms, key=lambda arm: arm != BASELINE)
    return Search(
        name=printable(metadata["name"]),
        base=metadata["base_config"],
        protocol=protocol,
        arms=[_result(name, results[name], baseline, has_target) for name in names],
        falsifiers=[
            found
            for each in metadata["falsifiers"]
            if (found := _falsified(each, results, has_target))
        ],
        environments=environments,
        paper=metadata.get("paper", {}),
    )


def _refuse_damaged(path: RunPath, metadata: Mapping[str, Any]) -> None:
    """Refuses what no study has written, and reading would choke on."""
    arms, search = metadata["arms"], metadata["search"]
    if not all(isinstance(arm, str) for arm in arms) or len({*arms}) < len(arms):
        raise DamagedFileError(path, "its arms are no names")
    if not 1 <= search["repeats"] * max(1, len(arms)) <= _MOST_UNITS:
        raise DamagedFileError(path, f"'search.repeats' is {search['repeats']!r:.40}")
    if metadata["base_config"]["batch_size"] < 1:
        raise DamagedFileError(path, "'base_config.batch_size' is below 1")
    for each in metadata["falsifiers"]:
        what = "one is none" if not isinstance(each, dict) else ""
        if what := what or missing(each, fields.FALSIFIER):
            raise DamagedFileError(path, f"of its falsifiers, {what}")
    for arm, ratio in metadata.get("paper", {}).items():
        if not isinstance(ratio, int | float):
            raise DamagedFileError(path, f"'paper.{printable(arm)}' is no number")


def _protocol(metadata: Mapping[str, Any]) -> Protocol:
    search = metadata["search"]
    space = Space.parse(search["space"])
    return Protocol(
        arms=tuple(printable(arm) for arm in metadata["arms"]),
        space=space,
        points=search["points"],
        repeats=search["repeats"] if space.axes else 1,
        streams=metadata["confirm"]["streams"],
        seed=search["seed"],
        cut=metadata["stop"]["cut"],
    )


def _searches(folder: RunPath, protocol: Protocol, arm: str) -> list[Searched]:
    found = []
    for repeat in range(protocol.repeats):
        unit = Unit(arm, "search", repeat)
        trials = read_unit(folder, unit) if protocol.space.axes else []
        for trial in trials:
            if {*trial.point} != {*protocol.space.axes}:
                raise DamagedFileError(unit.path(folder), "points of another space")
        confirmed = read_unit(folder, Unit(arm, "confirm", repeat))
        found.append(Searched(trials, best_of(trials), confirmed))
    return found


def _result(
    name: str,
    searches: Sequence[Searched],
    baseline: Sequence[Searched] | None,
    has_target: bool,
) -> ArmResult:
    fresh = updates = final = None
    is_bound = any(trial.score is None for each in searches for trial in each.confirmed)
    if baseline is not None and name != BASELINE:
        if has_target:
            fresh = _ratio(searches, baseline, "fresh")
            updates = _ratio(searches, baseline, "updates")
        else:
            final = _difference(searches, baseline)
    return ArmResult(name, searches, fresh, updates, final, is_bound)


def _ratio(
    arm: Sequence[Searched], other: Sequence[Searched], what: str
) -> Interval | None:
    """Returns the ratio of two arms' costs, paired by search and stream."""
    found = [
        [math.log(_cost(a, what) / _cost(b, what)) for a, b in row]
        for row in _pairs(arm, other)
    ]
    return mean_interval(found).exp() if found else None


def _difference(arm: Sequence[Searched], other: Sequence[Searched]) -> Interval | None:
    """Returns how much larger an arm's last values are."""
    pairs = [[(a.final, b.final) for a, b in row] for row in _pairs(arm, other)]
    known = [[a - b for a, b in r if a is not None and b is not None] for r in pairs]
    if not pairs or [*map(len, known)] != [*map(len, pairs)]:
        return None  # One that diverged has no last value.
    return mean_interval(known)


def log_speedups(
    arm: ArmResult, other: ArmResult, *, batch_size: int, ratio: float
) -> np.ndarray:
    """Returns the logarithm of how many times as fast an arm is as another one.

    By arithmetic from the counts: `echo_jax.searches.statistics.relative_seconds`.

    Args:
      arm: The one.
      other: The other one, of the same study.
      batch_size: Of that study.
      ratio: R, the steps that a fresh batch takes.

    Returns:
      ``float64[searches, streams]``, to the target; empty without streams that can be
      paired.
    """

    def seconds(trial: Trial) -> float:
        fresh, updates = _cost(trial, "fresh"), _cost(trial, "updates")
        return relative_seconds(fresh, updates, batch_size=batch_size, ratio=ratio)

    found = [
        [math.log(seconds(b) / seconds(a)) for a, b in row]
        for row in _pairs(arm.searches, other.searches)
    ]
    return np.array(found, float)


def _pairs(
    arm: Sequence[Searched], other: Sequence[Searched]
) -> list[list[tuple[Trial, Trial]]]:
    """Returns the trials of two arms of the same search and stream.

    As many streams as all searches have.
    """
    rows = [
        list(zip(a.confirmed, b.confirmed, strict=False))
        for a, b in zip(arm, other, strict=True)
        if a.confirmed and b.confirmed
    ]
    width = min(map(len, rows), default=0)
    return [row[:width] for row in rows]


def _cost(trial: Trial, what: str) -> float:
    """Returns fresh examples or updates to the target, or all if it was not met."""
    met = getattr(trial, f"{what}_to_target")
    cost = met if met is not None else max(getattr(trial, what), default=1)
    return max(cost, 1)  # Some meet it before the first update.


def _falsified(
    given: Mapping[str, Any],
    results: Mapping[str, Sequence[Searched]],
    has_target: bool,
) -> Falsified | None:
    arm, other = results.get(given["arm"]), results.get(given["over"])
    if arm is None or other is None:
        return None
    ratio = _ratio(arm, other, "fresh") if has_target else _difference(arm, other)
    if ratio is None:
        return None
    bound = float(given["below"])
    is_met = None
    if ratio.high < bound or ratio.low >= bound:
        is_met = ratio.high < bound
    says, name, over = (printable(given[key]) for key in ("says", "arm", "over"))
    return Falsified(says, name, over, ratio, bound, is_met)
