"""Makes the tables of docs/results.md and docs/large-batches.md from trials."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import Place
from echo_jax.searches.comparison import Search, VariantResult, log_speedups
from echo_jax.searches.fastest import best_variants
from echo_jax.searches.statistics import Interval
from echo_jax.studies.runs import BASELINE, read_study

Studies = Mapping[str, Search]
"""The published studies by the names of their folders."""

FACTORS = ("s2_8", "s2_32", "s2_128")
"""The studies of factors, one for each batch size."""

_REAL = "real-pipelines.md"  # the page of pipelines without simulation

_BEST_RATIOS = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and the text for an arm of a study."""

    heading: str
    says: Callable[[Studies, str], str]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
      first: The heading of the first column.
      columns: The other columns.
      labels: The page's names of the arms, in the order of the rows.
      page: The file in docs.
    """

    first: str
    columns: Sequence[Column]
    labels: Mapping[str, str]
    page: str = "results.md"

    def markdown(self, studies: Studies) -> str:
        """Returns the table."""
        body = [
            (label, *(column.says(studies, arm) for column in self.columns))
            for arm, label in self.labels.items()
        ]
        names = (self.first, *(column.heading for column in self.columns))
        return _markdown(names, body)


def _markdown(names: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rule = ("---", *("---:" for _ in names[1:]))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, rule, *body))


def _arm(studies: Studies, study: str, name: str) -> VariantResult:
    return next(arm for arm in studies[study].variants if arm.name == name)


def in_words(found: Interval | None, digits: int, *, sign: bool = False) -> str:
    """Returns an interval as text, and an empty text for None."""
    if found is None:
        return ""
    value = f"{found.value:{'+' if sign else ''}.{digits}f}"
    return f"{value} ({found.low:.{digits}f} to {found.high:.{digits}f})"


def _fresh(study: str, heading: str = "fresh examples") -> Column:
    return Column(heading, lambda s, arm: in_words(_arm(s, study, arm).fresh, 3))


def _updates(study: str, heading: str = "updates") -> Column:
    return Column(heading, lambda s, arm: in_words(_arm(s, study, arm).updates, 2))


def _final(study: str, heading: str) -> Column:
    return Column(
        heading, lambda s, arm: in_words(_arm(s, study, arm).final, 3, sign=True)
    )


def _read(study: str) -> Column:
    """Returns a column of the fresh examples of whole runs."""

    def says(studies: Studies, name: str) -> str:
        confirmed = _arm(studies, study, name).confirmed
        return f"{sum(t.fresh[-1] for t in confirmed) / len(confirmed):,.0f}"

    return Column("fresh examples", says)


def _made(study: str) -> Column:
    """Returns a column of the updates of whole runs."""

    def says(studies: Studies, name: str) -> str:
        (updates,) = {t.updates[-1] for t in _arm(studies, study, name).confirmed}
        return f"{updates:,}"

    return Column("updates", says)


def _placements(
    study: str, data: str, paper: str, arms: Mapping[str, str]
) -> list[Column]:
    """Returns the columns of one study of placements.

    Args:
      study: The name of the study's folder.
      data: The name of its data.
      paper: The name of the paper's data.
      arms: The study's arms, by the table's. Other rows are empty.
    """

    def published(studies: Studies, arm: str) -> str:
        ratio = studies[study].paper.get(arm)
        return "" if ratio is None else f"{ratio:.2f}"

    def of_arms(column: Column) -> Column:
        def says(studies: Studies, arm: str) -> str:
            return column.says(studies, arms[arm]) if arm in arms else ""

        return Column(column.heading, says)

    columns = (
        _fresh(study, f"{data}: fresh examples"),
        _updates(study),
        Column(f"paper, {paper}: fresh examples", published),
    )
    return [*map(of_arms, columns)]


def _seconds(study: str, ratio: float) -> Column:
    """Returns a column of seconds by arithmetic from counts, over the baseline's."""

    def says(studies: Studies, name: str) -> str:
        search = studies[study]
        gains = log_speedups(
            _arm(studies, study, name),
            _arm(studies, study, BASELINE),
            batch_size=search.base["batch_size"],
            ratio=ratio,
        )
        return f"{math.exp(-gains.mean()):.2f}"

    return Column(f"R = {ratio:g}", says)


_ON_TEXT = {arm: arm for arm in ("batch", "shuffle_buffer", "shuffle", "spread")}
_ON_IMAGES = {"shuffle": "before"} | {arm: arm for arm in ("batch", "after", "spread")}
_ABOVE_FRESH = "final loss above fresh data's"

TABLES = {
    "s1": Table(
        "e = 2",
        [
            *_placements("s1", "text", "LM1B", _ON_TEXT),
            *_placements("s1_cifar", "CIFAR-10", "ResNet-32", _ON_IMAGES),
        ],
        {
            "batch": "`batch`, back to back",
            "shuffle_buffer": "`shuffle_buffer` of 1,024 uses, the paper's order",
            "shuffle": "`window_shuffle`",
            "after": "`window_shuffle`, after augmentation",
            "spread": "`spread`; bit-exact on the device",
        },
    ),
    "s2_32": Table(
        "e",
        [
            _fresh("s2_32"),
            _updates("s2_32"),
            *(_seconds("s2_32", ratio) for ratio in (2, 4, 8)),
            _fresh("s3", "nothing re-tuned: fresh examples"),
            _updates("s3", "nothing re-tuned: updates"),
        ],
        {f"e{factor}": f"{factor}" for factor in (2, 4, 8, 16)},
    ),
    "s4_long": Table(
        "reuse distance, updates",
        [_read("s4_long"), _final("s4_long", _ABOVE_FRESH)],
        {
            "baseline": "fresh data",
            "lag_1": "1 (batches back to back)",
            "lag_16": "16",
            "lag_256": "256",
            "lag_1000": "1,000",
            "shuffle": "`window_shuffle` in the memory of 16",
        },
    ),
    "s5": Table(
        "variant",
        [_read("s5"), _final("s5", _ABOVE_FRESH)],
        {
            "baseline": "fresh data",
            "epochs_4": "4 epochs of 4,096 examples",
            "epochs": "8 epochs of 2,048",
            "cache": "a cache: all 2,048 in memory, `spread`",
            "echo_512": "an echo: 512 of them in memory",
            "echo_64": "an echo: 64 of them in memory",
            "batch": "an echo: whole batches, back to back",
        },
    ),
    "s9": Table(
        "variant",
        [_fresh("s9"), _updates("s9"), *(_seconds("s9", ratio) for ratio in (1, 2, 4))],
        {
            "e2": "`spread`, e = 2",
            "e3": "`spread`, e = 3",
            "e4": "`spread`, e = 4",
            "e6": "`spread`, e = 6",
            "back_to_back": "batches back to back, e = 3",
        },
        page=_REAL,
    ),
    "s10": Table(
        "variant",
        [
            _fresh("s10"),
            _updates("s10"),
            *(_seconds("s10", ratio) for ratio in (1, 4, 8)),
        ],
        {
            "e2": "`spread`, e = 2",
            "e4": "`spread`, e = 4",
            "e8": "`spread`, e = 8",
            "back_to_back": "batches back to back, e = 4",
            "reservoir": "reservoir: uniform draws, a fetch with probability 1/4",
        },
        page=_REAL,
    ),
    "s8": Table(
        "variant",
        [_made("s8"), _final("s8", "last loss less that of batches of 32")],
        {
            "baseline": "batches of 32, AdamW",
            "growing": "of 32, 128 and 256: half of the examples, a quarter, a quarter",
            "adamw": "of 256, AdamW",
            "onecycle": "of 256, AdamW, one cycle",
            "lars": "of 256, LARS",
            "lamb": "of 256, LAMB",
        },
        page="large-batches.md",
    ),
}
"""The tables that follow from searches, by their marks in the pages."""


def write_tables(studies: Studies, results: Path, docs: Path) -> None:
    """Writes the tables of the pages between their marks.

    Args:
      studies: All searched studies.
      results: The folder of published results.
      docs: The folder of pages.
    """
    for name, table in TABLES.items():
        Place(docs / table.page, name).write(table.markdown(studies) + "\n")
    Place(docs / "results.md", "best").write(_best_markdown(studies) + "\n")
    for name, (folders, labels) in _SECONDS.items():
        table = _seconds_markdown(results, folders, labels)
        Place(docs / _REAL, name).write(table + "\n")


_HEAT_FOLDERS = {
    "s10_seconds": "two cores",
    "s10_seconds_again": "the next day",
    "s10_one_core": "one core for everything",
    "s10_fed": "a wide network",
}
_HEAT_LABELS = {
    "baseline": "no echo, 1 solver process",
    "baseline_2": "no echo, 2",
    "baseline_3": "no echo, 3",
    "e2": "`spread`, e = 2",
    "e4": "`spread`, e = 4",
    "e8": "`spread`, e = 8",
    "back_to_back": "batches back to back, e = 4",
    "reservoir": "reservoir, probability 1/4",
    "adaptive": "adaptive, at most 4 uses",
    "adaptive_8": "adaptive, at most 8 uses",
}


# Of each table, the heading of every folder, and the label of every variant.
_SECONDS = {"s10_seconds": (_HEAT_FOLDERS, _HEAT_LABELS)}


def _seconds_markdown(
    results: Path, folders: Mapping[str, str], labels: Mapping[str, str]
) -> str:
    """Seconds divided by the baseline's, over seeds: median; least to most."""
    columns, heads = [], []
    for folder, name in folders.items():
        seeds = [read_study(path) for path in sorted((results / folder).iterdir())]
        runs = [{run.name: run.summary for run in study.runs} for study in seeds]
        ratios = [
            each[BASELINE]["t_up_s"] / each[BASELINE]["t_down_s"] for each in runs
        ]
        heads.append(f"{name}, n = {len(runs)}, R {_span(ratios, '.2g')}")
        columns.append({arm: _of_baseline(runs, arm) for arm in labels})
    body = [
        (label, *(column[arm] for column in columns)) for arm, label in labels.items()
    ]
    return _markdown(("seconds, divided by no echo's", *heads), body)


def _of_baseline(runs: Sequence[Mapping[str, Any]], arm: str) -> str:
    if arm not in runs[0]:
        return ""
    found = [
        each[arm]["seconds_to_target"] / each[BASELINE]["seconds_to_target"]
        for each in runs
    ]
    if arm == BASELINE:
        seconds = [each[arm]["seconds_to_target"] for each in runs]
        return f"1; {_span(seconds, '.0f')} s"
    median = f"{statistics.median(found):.2f}"
    # No brackets: a range over seeds is not a confidence interval.
    return median if len(found) == 1 else f"{median}; {_span(found, '.2f')}"


def _span(values: Sequence[float], form: str) -> str:
    """Returns the least and the largest value, or the only one."""
    least, largest = (format(each, form) for each in (min(values), max(values)))
    return least if len(values) == 1 else f"{least} to {largest}"


def _best_markdown(studies: Studies) -> str:
    """Returns the fastest factor at each R, for each batch size."""
    body = []
    for name in FACTORS:
        search = studies[name]
        cells = [_best_in_words(search, ratio) for ratio in _BEST_RATIOS]
        body.append((f"B = {search.base['batch_size']}", *cells))
    return _markdown(("", *(f"R = {ratio:g}" for ratio in _BEST_RATIOS)), body)


def _best_in_words(search: Search, ratio: float) -> str:
    (best,) = best_variants(search, [ratio])
    if best.name == BASELINE:
        return "no echo"
    words = f"{best.name.removeprefix('e')}, {in_words(best.speedup, 2)}"
    return words if best.speedup.low > 1 else f"{words}: not significant"
