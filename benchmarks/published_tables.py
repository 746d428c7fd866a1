"""The tables of the pages in docs that follow from the trials of published studies."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.pages import Place
from benchmarks.worth import PREDICTORS, Point, error, rank, read_points, regrets
from echo_jax.searches.comparison import ArmResult, Search, log_speedups
from echo_jax.searches.fastest import best_arms
from echo_jax.searches.statistics import Interval, relative_seconds
from echo_jax.studies.runs import BASELINE, Study, read_study

Studies = Mapping[str, Search]
"""The published studies by the names of their folders."""

Clocked = Mapping[int, Sequence[Study]]
"""Studies that were trained by a clock, one for each seed, by R."""

FACTORS = ("s2_8", "s2_32", "s2_128")
"""The studies of factors, one for each batch size."""

# What asks nothing, beside what predicts.
_RULES = {
    "no cap": "nothing: the smallest factor that feeds the accelerator",
    "cap 4": "nothing: the same, at most 4",
}
_CLOCKED_RATIOS = (2, 4, 8)
_PAPER_FIGURES = ("5a", "5b")
_BEST_RATIOS = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, and what it says of an arm."""

    heading: str
    says: Callable[[Studies, str], str]


@dataclass(frozen=True)
class Table:
    """A table of a page.

    Attributes:
      first: The heading of the first column.
      columns: The others.
      labels: What the page calls each arm, in its order.
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


def _arm(studies: Studies, study: str, name: str) -> ArmResult:
    return next(arm for arm in studies[study].arms if arm.name == name)


def in_words(found: Interval | None, digits: int, *, sign: bool = False) -> str:
    """Returns an interval as a page has it; nothing for None."""
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
    """The fresh examples of the whole runs."""

    def says(studies: Studies, name: str) -> str:
        confirmed = _arm(studies, study, name).confirmed
        return f"{sum(t.fresh[-1] for t in confirmed) / len(confirmed):,.0f}"

    return Column("read", says)


def _made(study: str) -> Column:
    """The updates of the whole runs."""

    def says(studies: Studies, name: str) -> str:
        (updates,) = {t.updates[-1] for t in _arm(studies, study, name).confirmed}
        return f"{updates:,}"

    return Column("updates", says)


def _paper(study: str, heading: str, *, times: bool = False) -> Column:
    def says(studies: Studies, name: str) -> str:
        ratio = studies[study].paper.get(name)
        if ratio is None:
            return ""
        return f"{ratio:.2f}" + (f" ({1 / ratio:.2f}x fewer)" if times else "")

    return Column(heading, says)


def _seconds(study: str, ratio: float) -> Column:
    """Seconds beside the baseline's at one R, by arithmetic from the counts."""

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


_BY_FACTOR = {f"e{factor}": f"{factor}" for factor in (2, 4, 8, 16)}
_BY_LAG = {
    "lag_1": "1 (batches back to back)",
    "lag_4": "4",
    "lag_16": "16",
    "lag_64": "64",
    "shuffle": "`window_shuffle` in the memory of 16",
}
_LESS_THAN_FRESH = "last loss less that of fresh data"
_LESS_THAN_CONSTANT = "last loss less that of the constant"

TABLES = {
    "s1": Table(
        "arm",
        [_fresh("s1"), _updates("s1"), _paper("s1", "Choi et al. 2019, LM1B")],
        {
            "batch": "`batch`, back to back",
            "shuffle_buffer": "`shuffle_buffer` of 1,024 uses, the paper's",
            "shuffle": "`window_shuffle`, buffer 512",
            "spread": "`spread`, buffer 512; the same on the device, to the bit",
        },
    ),
    "s1_cifar": Table(
        "arm",
        [
            _fresh("s1_cifar"),
            _updates("s1_cifar"),
            _paper("s1_cifar", "Choi et al. 2019, ResNet-32", times=True),
        ],
        {
            "batch": "`batch`, back to back",
            "after": "`after` augmentation, shuffled",
            "before": "`before` augmentation, shuffled",
            "spread": "`spread`, before augmentation",
        },
    ),
    "s2_32": Table(
        "e",
        [
            _fresh("s2_32"),
            _updates("s2_32"),
            *(_seconds("s2_32", ratio) for ratio in (2, 4, 8)),
            _fresh("s3", "untuned: fresh"),
            _updates("s3", "untuned: updates"),
        ],
        _BY_FACTOR,
    ),
    "s2_8 and s2_128": Table(
        "e",
        [
            _fresh("s2_8", "B = 8: fresh"),
            _updates("s2_8"),
            _fresh("s2_128", "B = 128: fresh"),
            _updates("s2_128"),
        ],
        _BY_FACTOR,
    ),
    "s2_decay": Table(
        "arm",
        [
            _read("s2_decay"),
            _made("s2_decay"),
            _final("s2_decay", "last loss less that of 400 fresh batches"),
        ],
        {
            "baseline": "fresh data",
            "e2": "e = 2",
            "e4": "e = 4",
            "e8": "e = 8",
            "fresh_2": "half of the fresh data, no echo",
            "fresh_4": "a quarter of it",
            "fresh_8": "an eighth",
        },
    ),
    "s4_32": Table("lag", [_fresh("s4_32"), _updates("s4_32")], _BY_LAG),
    "s4_8": Table(
        "lag", [_fresh("s4_8", "B = 8: fresh examples"), _updates("s4_8")], _BY_LAG
    ),
    "s4_long": Table(
        "lag",
        [_read("s4_long"), _final("s4_long", _LESS_THAN_FRESH)],
        {
            "baseline": "fresh data",
            "lag_1": "1 (batches back to back)",
            "lag_16": "16",
            "lag_256": "256",
            "lag_1000": "1,000",
            "shuffle": "`window_shuffle` in the memory of 16",
        },
    ),
    "s4_cifar": Table(
        "lag",
        [_fresh("s4_cifar", "CIFAR-10: fresh examples"), _updates("s4_cifar")],
        {
            "lag_1": "1 (batches back to back)",
            "lag_16": "16",
            "lag_62": "62",
            "shuffle": "`window_shuffle` in the memory of 16",
        },
    ),
    "s5": Table(
        "arm",
        [_read("s5"), _final("s5", _LESS_THAN_FRESH)],
        {
            "baseline": "fresh data",
            "epochs_4": "4 epochs of 4,096 examples, read again",
            "epochs": "8 epochs of 2,048, read again",
            "cache": "the same, all 2,048 in memory (`spread`)",
            "echo_512": "512 of them in memory",
            "echo_64": "64 of them in memory",
            "batch": "whole batches, back to back",
        },
    ),
    "s6": Table(
        "probability over updates",
        [_read("s6"), _final("s6", _LESS_THAN_CONSTANT)],
        {
            "baseline": "constant, 1/4",
            "linear": "linear, 0.4 to 0.1",
            "cosine": "cosine, 0.4 to 0.1",
            "multistep": "two halvings",
            "reversed": "linear, 0.1 to 0.4",
            "reversed_cosine": "cosine, 0.1 to 0.4",
            "fixed": "no coin: every example 4 times, far apart",
            "adaptive_4": "adaptive, data ready before every 4th update, `max_uses` 4",
            "adaptive_8": "the same, `max_uses` 8",
        },
    ),
    "s6_decay": Table(
        "probability over updates, the rate decays",
        [_read("s6_decay"), _final("s6_decay", _LESS_THAN_CONSTANT)],
        {
            "baseline": "constant, 1/4",
            "cosine": "cosine, 0.4 to 0.1",
            "reversed_cosine": "cosine, 0.1 to 0.4",
            "fixed": "no coin: every example 4 times, far apart",
        },
    ),
    "s7": Table(
        "a quarter of the bytes of data parallelism",
        [
            _final("s7", "last loss less that of data parallelism"),
            _final("s7_echo", "the same, each example used 4 times"),
        ],
        {
            "every": "replicas that synchronise after every 4th update",
            "bernoulli": "… with probability 1/4",
            "accumulate": "gradients of 4 parts (accumulation)",
            "diloco": "… every 4th, by an outer step (DiLoCo, its rate and momentum as "
            "published)",
        },
    ),
    "s8": Table(
        "arm",
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


def read_clocked(folder: Path) -> Clocked:
    """Reads the studies that were trained by a clock: ``R4_seed0`` and its like."""
    return {
        ratio: [read_study(path) for path in sorted(folder.glob(f"R{ratio}_seed*"))]
        for ratio in _CLOCKED_RATIOS
    }


def write_tables(studies: Studies, clocked: Clocked, results: Path, docs: Path) -> None:
    """Writes the tables of the pages between their marks.

    Args:
      studies: All of them.
      clocked: Those by a clock.
      results: Holds the values of the paper's figures, and what predicted the worth.
      docs: Holds the pages.
    """
    for name, table in TABLES.items():
        Place(docs / table.page, name).write(table.markdown(studies) + "\n")
    paper, file = results / "paper" / "choi2019_figures.json", docs / "results.md"
    Place(file, "best").write(_best_markdown(studies, paper) + "\n")
    Place(file, "seconds").write(_clocked_markdown(clocked) + "\n")
    points = read_points(results / "worth")
    Place(file, "worth").write(_worth_markdown(points) + "\n")


def _clocked_markdown(clocked: Clocked) -> str:
    """Seconds beside the baseline's, of every seed, and what arithmetic promises."""
    names = [run.name for run in clocked[_CLOCKED_RATIOS[0]][0].runs]
    body = [
        (
            name.removeprefix("e"),
            *(_by_a_clock(seeds, name, ratio) for ratio, seeds in clocked.items()),
        )
        for name in names
        if name != BASELINE
    ]
    return _markdown(("e", *(f"R = {ratio}" for ratio in clocked)), body)


def _worth_markdown(points: Sequence[Point]) -> str:
    """What predicts the worth of a repeat, and what following it costs."""
    slower = regrets(points)
    body = []
    for name, label in {**PREDICTORS, **_RULES}.items():
        said = [f"{rank(points, name):.2f}" if name in PREDICTORS else "", "", ""]
        if name in slower:
            mean, most = statistics.fmean(slower[name]), max(slower[name])
            said[2] = f"{100 * mean:.1f} %, {100 * most:.1f} %"
            if name in PREDICTORS:
                said[1] = f"{error(points, name):.2f}"
        body.append((label, *said))
    names = (
        "predicts",
        f"rank correlation with the worth, {len(points)} arms",
        "error (root mean square)",
        "slower than with the best factor: mean, at most",
    )
    return _markdown(names, body)


def _by_a_clock(seeds: Sequence[Study], name: str, ratio: int) -> str:
    measured, promised = [], []
    for study in seeds:
        runs = {run.name: run for run in study.runs}
        ours, other = (
            (
                run.summary["seconds_to_target"],
                relative_seconds(
                    run.summary["fresh_to_target"],
                    run.summary["updates_to_target"],
                    batch_size=study.base["batch_size"],
                    ratio=ratio,
                ),
            )
            for run in (runs[name], runs[BASELINE])
        )
        measured.append(f"{ours[0] / other[0]:.2f}")
        promised.append(ours[1] / other[1])
    return f"{', '.join(measured)} ({sum(promised) / len(promised):.2f})"


def _best_markdown(studies: Studies, paper: Path) -> str:
    """Which factor is the fastest at which R, for each batch size."""
    body = []
    for name in FACTORS:
        search = studies[name]
        cells = [_best_in_words(search, ratio) for ratio in _BEST_RATIOS]
        body.append((f"B = {search.base['batch_size']}", *cells))
    figures = json.loads(paper.read_text(encoding="utf-8"))
    for figure in _PAPER_FIGURES:
        arms = figures[figure]
        cells = [_best_of_paper(arms, ratio) for ratio in _BEST_RATIOS]
        body.append((f"Choi et al. 2019, LM1B, B = {arms[0]['batch']:,}", *cells))
    return _markdown(("", *(f"R = {ratio:g}" for ratio in _BEST_RATIOS)), body)


def _best_of_paper(arms: Sequence[Mapping[str, Any]], ratio: float) -> str:
    """By the same arithmetic, from one value of each arm."""
    gains = [
        (ratio / max(ratio / arm["speedup_fresh"], arm["steps_ratio"]), -arm["e"])
        for arm in arms
    ]
    gain, factor = max(gains)
    return "no echo" if factor == -1 else f"{-factor}, {gain:.2f}"


def _best_in_words(search: Search, ratio: float) -> str:
    (best,) = best_arms(search, [ratio])
    if best.name == BASELINE:
        return "no echo"
    words = f"{best.name.removeprefix('e')}, {in_words(best.speedup, 2)}"
    return words if best.speedup.low > 1 else f"{words}: nobody can tell"
