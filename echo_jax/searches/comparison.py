"""Compares the variants of a study that searched: their costs, with intervals."""

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
    """The result of one search of a variant; `confirmed` are trials with new seeds."""

    trials: Sequence[Trial]
    best: Trial | None
    confirmed: Sequence[Trial]


@dataclass(frozen=True)
class VariantResult:
    """One line of the comparison.

    Attributes:
      searches: One for each repeat; a single one for a variant that was not searched.
      fresh, updates: The variant's cost to the target over the baseline's. None without
        a baseline, a target, or seeds that can be paired.
      final: The last value of the metric minus the baseline's.
      is_bound: Whether a seed missed the target, so that the ratios are lower bounds.
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
        """All trials with new seeds."""
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
        """The number of trials with new seeds, as "SEARCHES x SEEDS" or "SEEDS"."""
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
        """Returns the mean of a field over the new seeds; None if one lacks it."""
        values = [getattr(trial, name) for trial in self.confirmed]
        if not values or None in values:
            return None
        return float(np.mean(values))


class Prediction(NamedTuple):
    """A prediction, written before the study, and what the study found."""

    says: str  # What the study would show if the prediction is refuted.
    variant: str
    over: str
    # Fresh examples of `variant` / of `over`, or the difference of their last values.
    ratio: Interval
    bound: float
    # Whether the ratio is below `bound`; None where the interval holds it.
    is_refuted: bool | None


@dataclass(frozen=True)
class Search:
    """A study that searched, or that trained its variants with several seeds."""

    name: str
    base: Mapping[str, Any]  # The config of the variants, plain fields.
    protocol: Protocol
    variants: Sequence[VariantResult]  # The baseline first.
    predictions: Sequence[Prediction]
    # The environments on which trials were made.
    environments: Sequence[Mapping[str, Any]]
    # Published ratios to a baseline's fresh examples, or differences in last values.
    paper: Mapping[str, float]

    @property
    def has_target(self) -> bool:
        """Whether variants are compared by their costs to a target."""
        return bool(self.base["target"])

    @property
    def metric(self) -> str:
        """The evaluated metric, such as ``"loss"``."""
        said = next((e["metric"] for e in self.environments if "metric" in e), None)
        return printable(str(said or _METRICS.get(self.base["workload"], "metric")))

    @property
    def baseline(self) -> VariantResult | None:
        return next((each for each in self.variants if each.name == BASELINE), None)

    @property
    def mode(self) -> str:
        """``min`` or ``max``: whether a smaller or a larger metric is better."""
        for variant in self.variants:
            for trial in (*variant.trials, *variant.confirmed):
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
            raise StudyError(f"{folder} holds no study.json, so it is not a study")
        _refuse_damaged(folder / "study.json", metadata)
        protocol = Protocol.of(map(printable, metadata["arms"]), metadata)
        results = {x: _searches(folder, protocol, x) for x in protocol.variants}
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
    names = sorted(protocol.variants, key=lambda name: name != BASELINE)
    return Search(
        name=printable(metadata["name"]),
        base=metadata["base_config"],
        protocol=protocol,
        variants=[_result(name, results[name], baseline, has_target) for name in names],
        predictions=[
            found
            for each in metadata["falsifiers"]
            if (found := _prediction(each, results, has_target))
        ],
        environments=environments,
        paper=metadata.get("paper", {}),
    )


def _refuse_damaged(path: epath.Path, metadata: Mapping[str, Any]) -> None:
    """Refuses values that no study writes and that would break the reading."""
    variants, search = metadata["arms"], metadata["search"]
    if not all(map(is_name, variants)) or len({*variants}) < len(variants):
        raise DamagedFileError(path, "its 'arms' are not names of variants")
    if not 1 <= search["repeats"] * max(1, len(variants)) <= _MOST_UNITS:
        raise DamagedFileError(path, f"'search.repeats' is {search['repeats']!r:.40}")
    if metadata["base_config"]["batch_size"] < 1:
        raise DamagedFileError(path, "'base_config.batch_size' is below 1")
    for each in metadata["falsifiers"]:
        what = "" if isinstance(each, dict) else "one is not an object"
        if what := what or missing(each, fields.PREDICTION):
            raise DamagedFileError(path, f"of its 'falsifiers', {what}")
    for variant, ratio in metadata.get("paper", {}).items():
        if not isinstance(ratio, int | float):
            raise DamagedFileError(
                path, f"'paper.{printable(variant)}' is not a number"
            )


def _searches(folder: epath.Path, protocol: Protocol, variant: str) -> list[Searched]:
    found = []
    for repeat in range(protocol.repeats):
        unit = Unit(variant, "search", repeat)
        trials = read_unit(folder, unit) if protocol.space.axes else []
        for trial in trials:
            if {*trial.point} != {*protocol.space.axes}:
                raise DamagedFileError(unit.path(folder), "points of another space")
        confirmed = read_unit(folder, Unit(variant, "confirm", repeat))
        found.append(Searched(trials, best_of(trials), confirmed))
    return found


def _result(
    name: str,
    searches: Sequence[Searched],
    baseline: Sequence[Searched] | None,
    has_target: bool,
) -> VariantResult:
    fresh = updates = final = None
    if baseline is not None and name != BASELINE and has_target:
        fresh, updates = (_ratio(searches, baseline, x) for x in ("fresh", "updates"))
    elif baseline is not None and name != BASELINE:
        final = _difference(searches, baseline)
    is_bound = any(trial.score is None for each in searches for trial in each.confirmed)
    return VariantResult(name, searches, fresh, updates, final, is_bound)


def _ratio(
    variant: Sequence[Searched], other: Sequence[Searched], what: str
) -> Interval | None:
    """Returns the ratio of two variants' costs, paired by search and seed."""
    found = [
        [math.log(_cost(a, what) / _cost(b, what)) for a, b in row]
        for row in _pairs(variant, other)
    ]
    return mean_interval(found).exp() if found else None


def _difference(
    variant: Sequence[Searched], other: Sequence[Searched]
) -> Interval | None:
    """Returns the difference of two variants' last values."""
    pairs = [[(a.final, b.final) for a, b in row] for row in _pairs(variant, other)]
    known = [[a - b for a, b in r if a is not None and b is not None] for r in pairs]
    if not pairs or [*map(len, known)] != [*map(len, pairs)]:
        return None  # A trial that diverged has no last value.
    return mean_interval(known)


# The speedup is computed from the counts, see `statistics.relative_seconds`. The
# array is empty if no seeds can be paired. `ratio` is R.
def log_speedups(
    variant: VariantResult, other: VariantResult, *, batch_size: int, ratio: float
) -> np.ndarray:
    """Returns log speedups of `variant` over `other`, float64[searches, seeds]."""

    def seconds(trial: Trial) -> float:
        fresh, updates = _cost(trial, "fresh"), _cost(trial, "updates")
        return relative_seconds(fresh, updates, batch_size=batch_size, ratio=ratio)

    found = [
        [math.log(seconds(b) / seconds(a)) for a, b in row]
        for row in _pairs(variant.searches, other.searches)
    ]
    return np.array(found, float)


def _pairs(
    variant: Sequence[Searched], other: Sequence[Searched]
) -> list[list[tuple[Trial, Trial]]]:
    """Returns two variants' trials in pairs, for the seeds that all searches have."""
    rows = [
        list(zip(a.confirmed, b.confirmed, strict=False))
        for a, b in zip(variant, other, strict=True)
        if a.confirmed and b.confirmed
    ]
    width = min(map(len, rows), default=0)
    return [row[:width] for row in rows]


def _cost(trial: Trial, what: str) -> float:
    """Returns fresh examples or updates to the target, or all if it was missed."""
    reached = getattr(trial, f"{what}_to_target")
    cost = reached if reached is not None else max(getattr(trial, what), default=1)
    return max(cost, 1)  # Some trials reach the target before the first update.


def _prediction(
    given: Mapping[str, Any],
    results: Mapping[str, Sequence[Searched]],
    has_target: bool,
) -> Prediction | None:
    variant, other = results.get(given["arm"]), results.get(given["over"])
    if variant is None or other is None:
        return None
    ratio = (
        _ratio(variant, other, "fresh") if has_target else _difference(variant, other)
    )
    if ratio is None:
        return None
    bound = float(given["below"])
    is_refuted = ratio.high < bound if not ratio.low < bound <= ratio.high else None
    says, name, over = (printable(given[key]) for key in ("says", "arm", "over"))
    return Prediction(says, name, over, ratio, bound, is_refuted)
