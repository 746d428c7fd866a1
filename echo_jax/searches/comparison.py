"""Compares the arms of a study that searched: their costs, with intervals."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from echo_jax.files.folders import is_name, run_folder
from echo_jax.files.json_files import DamagedFileError, missing, read_json
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
from echo_jax.terminal.printable import printable

# For trials of earlier versions, which do not record their metric.
_METRICS = {"cifar": "accuracy", "lm": "loss"}
# A larger number would take too long to look for.
_MOST_UNITS = 100_000


class Searched(NamedTuple):
    """The result of one search of an arm; `confirmed` are trials on new streams."""

    trials: Sequence[Trial]
    best: Trial | None
    confirmed: Sequence[Trial]


@dataclass(frozen=True)
class ArmResult:
    """One line of the comparison.

    Attributes:
      searches: One for each repeat; a single one for an arm that was not searched.
      fresh, updates: The arm's cost to the target over the baseline's. None without a
        baseline, a target, or streams that can be paired.
      final: The last value of the metric minus the baseline's.
      is_bound: Whether a stream missed the target, so that the ratios are lower bounds.
    """

    name: str
    searches: Sequence[Searched]
    fresh: Interval | None
    updates: Interval | None
    final: Interval | None
    is_bound: bool

    @property
    def trials(self) -> list[Trial]:
        return [trial for each in self.searches for trial in each.trials]

    @property
    def confirmed(self) -> list[Trial]:
        """All trials on new streams."""
        return [trial for each in self.searches for trial in each.confirmed]

    @property
    def infeasible(self) -> float:
        """The fraction of search trials that diverged or could not be trained."""
        bad = [trial.outcome in ("diverged", "failed") for trial in self.trials]
        return sum(bad) / len(bad) if bad else 0.0

    @property
    def best_scores(self) -> list[float]:
        """The score of every search's best trial."""
        return [each.best.score or 0 for each in self.searches if each.best]

    @property
    def n(self) -> str:
        """The number of trials on new streams, as "SEARCHES x STREAMS" or "STREAMS"."""
        sizes = [len(each.confirmed) for each in self.searches if each.confirmed]
        return f"{len(sizes)} x {max(sizes)}" if len(sizes) > 1 else f"{sum(sizes)}"

    def expected_best(self, k: int) -> float | None:
        """Returns the expected best score of a search of k trials."""
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
    """The outcome of a falsifier of an expectation, written down before the study."""

    says: str
    arm: str
    over: str
    # Fresh examples of `arm` / of `over`, or the difference of their last values.
    ratio: Interval
    bound: float
    # Whether the ratio is below `bound`; None where the interval holds it.
    is_met: bool | None


@dataclass(frozen=True)
class Search:
    """A study that searched, or that trained its arms on several streams."""

    name: str
    base: Mapping[str, Any]  # The config of the arms, plain fields.
    protocol: Protocol
    arms: Sequence[ArmResult]  # The baseline first.
    falsifiers: Sequence[Falsified]
    # The environments on which trials were made.
    environments: Sequence[Mapping[str, Any]]
    # Published ratios to a baseline's fresh examples, or differences in last values.
    paper: Mapping[str, float]

    @property
    def has_target(self) -> bool:
        """Whether arms are compared by their costs to a target."""
        return bool(self.base["target"])

    @property
    def metric(self) -> str:
        """The evaluated metric, such as ``"loss"``."""
        said = next((e["metric"] for e in self.environments if "metric" in e), None)
        return printable(str(said or _METRICS.get(self.base["workload"], "metric")))

    @property
    def baseline(self) -> ArmResult | None:
        return next((arm for arm in self.arms if arm.name == BASELINE), None)

    @property
    def mode(self) -> str:
        """``min`` or ``max``: whether a smaller or a larger metric is better."""
        for arm in self.arms:
            for trial in (*arm.trials, *arm.confirmed):
                if self.has_target and trial.values and trial.values[0] is not None:
                    return "max" if trial.values[0] < self.base["target"] else "min"
                if not self.has_target and trial.score:
                    return "min" if trial.score == trial.final else "max"
        return "min"

    @property
    def setting(self) -> str:
        return fields.setting_in_words(self.base)


def is_searched(folder: str | os.PathLike[str]) -> bool:
    folder = run_folder(folder)
    try:
        return folder.is_dir() and "search" in (read_json(folder / "study.json") or {})
    except DamagedFileError:
        return False


def read_search(folder: str | os.PathLike[str]) -> Search:
    """Reads a study that searched, complete or not, from its ``--workdir``."""
    folder = run_folder(folder)
    try:
        metadata = read_json(folder / "study.json", fields.SEARCH)
        metadata = fields.with_names_of_now(metadata)
        if metadata is None:
            raise StudyError(f"{folder} holds no study.json, so it is no study")
        _refuse_damaged(folder / "study.json", metadata)
        protocol = Protocol.of(map(printable, metadata["arms"]), metadata)
        results = {arm: _searches(folder, protocol, arm) for arm in protocol.arms}
        environments: list[Mapping[str, Any]] = []
        for unit in protocol.units():
            new = read_environments(folder, unit)
            environments += [each for each in new if each not in environments]
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


def _refuse_damaged(path: epath.Path, metadata: Mapping[str, Any]) -> None:
    """Refuses values that no study writes and that would break the reading."""
    arms, search = metadata["arms"], metadata["search"]
    if not all(map(is_name, arms)) or len({*arms}) < len(arms):
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


def _searches(folder: epath.Path, protocol: Protocol, arm: str) -> list[Searched]:
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
    if baseline is not None and name != BASELINE and has_target:
        fresh, updates = (_ratio(searches, baseline, x) for x in ("fresh", "updates"))
    elif baseline is not None and name != BASELINE:
        final = _difference(searches, baseline)
    is_bound = any(trial.score is None for each in searches for trial in each.confirmed)
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
    """Returns the difference of two arms' last values."""
    pairs = [[(a.final, b.final) for a, b in row] for row in _pairs(arm, other)]
    known = [[a - b for a, b in r if a is not None and b is not None] for r in pairs]
    if not pairs or [*map(len, known)] != [*map(len, pairs)]:
        return None  # A trial that diverged has no last value.
    return mean_interval(known)


# The speedup is computed from the counts, see `statistics.relative_seconds`. The
# array is empty if no streams can be paired. `ratio` is R.
def log_speedups(
    arm: ArmResult, other: ArmResult, *, batch_size: int, ratio: float
) -> np.ndarray:
    """Returns log speedups of `arm` over `other`, float64[searches, streams]."""

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
    """Returns two arms' trials in pairs, for the streams that all searches have."""
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
    return max(cost, 1)  # Some trials meet the target before the first update.


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
    is_met = ratio.high < bound if not ratio.low < bound <= ratio.high else None
    says, name, over = (printable(given[key]) for key in ("says", "arm", "over"))
    return Falsified(says, name, over, ratio, bound, is_met)
