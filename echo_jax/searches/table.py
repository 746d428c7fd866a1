"""The report of a study that searched: the costs of each variant's tuned points."""

import math

from echo_jax.searches.comparison import Prediction, Search, VariantResult
from echo_jax.searches.figures import search_figures
from echo_jax.searches.statistics import Interval, relative_seconds
from echo_jax.studies.page import plain_json
from echo_jax.studies.report import Report
from echo_jax.studies.table import optional

_RATIOS = (1, 2, 4, 8)
_IN_TERMINAL = ("variant", "tuned", "infeasible", "n", "fresh, ratio", "updates, ratio")
_IN_TERMINAL += ("final minus the baseline's",)
_PICTURES = (
    "<p>Trials leave no run folders behind: <code>echo-jax report examples --config "
    "CONFIG --workdir FOLDER</code> draws the first examples of a training, with each "
    "of their uses.</p>"
)


def search_report(search: Search) -> Report:
    """Returns the report of a study that searched."""
    details = [
        _PICTURES,
        *["<h2>What it ran on</h2>"] * bool(search.environments),
        *map(plain_json, search.environments),
        "<h2>The config of the variants</h2>",
        plain_json(search.base),
    ]
    return Report(
        title=search.name,
        headings=_headings(search),
        rows=[_cells(search, variant) for variant in search.variants],
        notes=_notes(search),
        in_terminal=_IN_TERMINAL,
        figures=search_figures(search),
        details=lambda folder: details,
    )


def _headings(search: Search) -> tuple[str, ...]:
    tuned = ("variant", "tuned")
    searched: tuple[str, ...] = ()
    if search.protocol.space.axes:
        fewer = f"expected best of {_fewer(search)}"
        searched = ("infeasible", "best of searches", fewer)
    end = ("final", "best", "n")
    if not search.has_target:
        reads = "fresh examples of the whole run"
        published = ("published",) if search.paper else ()
        return (
            *tuned,
            *searched,
            reads,
            "final minus the baseline's",
            *published,
            *end,
        )
    seconds = tuple(f"s at R={ratio}" for ratio in _RATIOS)
    costs = ("fresh examples", "fresh, ratio", "updates, ratio", *seconds, "published")
    return (*tuned, *searched, *costs, *end)


def _cells(search: Search, variant: VariantResult) -> tuple[str, ...]:
    cells = [variant.name, _tuned(search, variant)]
    if search.protocol.space.axes:
        scores = variant.best_scores
        spread = f"{min(scores):,.5g} to {max(scores):,.5g}" if scores else "none"
        fewer = optional(variant.expected_best(_fewer(search)), "{:,.5g}")
        cells += [f"{variant.infeasible:.0%}", spread, fewer]
    if search.has_target:
        at_least = "≥ " if variant.is_bound else ""
        cells += [
            optional(variant.mean("fresh_to_target"), "{:,.0f}"),
            at_least + _interval(variant.fresh),
            at_least + _interval(variant.updates),
            *(_seconds(search, variant, ratio) for ratio in _RATIOS),
            optional(search.paper.get(variant.name), "{:.2f}"),
        ]
    else:
        reads = [trial.fresh[-1] for trial in variant.confirmed if trial.fresh]
        cells.append(f"{sum(reads) / len(reads):,.0f}" if reads else "—")
        cells.append(_interval(variant.final))
        if search.paper:
            cells.append(optional(search.paper.get(variant.name), "{:+.3g}"))
    cells += [optional(variant.mean(name), "{:.4g}") for name in ("final", "best")]
    return (*cells, variant.n)


def _fewer(search: Search) -> int:
    """Returns half the number of trials of a search."""
    return max(1, search.protocol.points // 2)


def _tuned(search: Search, variant: VariantResult) -> str:
    """Returns the best point of all searches; ``*`` counts best points at an edge."""
    found = [each.best for each in variant.searches if each.best]
    if not found:
        return (
            "as it is" if not search.protocol.space.axes else "none reached the target"
        )
    best = min(found, key=lambda trial: trial.score or 0)
    edges = [search.protocol.space.edges(trial.point) for trial in found]
    cells = []
    for name, value in best.point.items():
        shown = f"{value:.3g}" if isinstance(value, float) else f"{value}"
        at_edge = sum(name in each for each in edges)
        mark = f" (*{at_edge} of {len(found)})" if at_edge else ""
        cells.append(f"{name.rpartition('.')[2]} {shown}{mark}")
    return ", ".join(cells)


def _interval(found: Interval | None) -> str:
    if found is None:
        return "—"
    if math.isnan(found.low):
        return f"{found.value:.3g}"
    return f"{found.value:.3g} ({found.low:.3g} to {found.high:.3g})"


def _seconds(search: Search, variant: VariantResult, ratio: int) -> str:
    """Returns the computed seconds relative to the baseline's."""
    if search.baseline is None:
        return "—"
    times = []
    for each in (variant, search.baseline):
        fresh, updates = each.mean("fresh_to_target"), each.mean("updates_to_target")
        if fresh is None or updates is None:
            return "—"
        size = search.base["batch_size"]
        times.append(relative_seconds(fresh, updates, batch_size=size, ratio=ratio))
    return f"{times[0] / times[1]:.2f}" if times[1] else "—"


def _notes(search: Search) -> list[str]:
    """Returns sentences on the meaning of the numbers and on the predictions."""
    protocol = search.protocol
    lines = [f"{search.setting}."]
    if protocol.space.axes:
        space = ", ".join(
            f"{name} {axis.scale} {axis.low:g} to {axis.high:g}"
            if not axis.choices
            else f"{name} of {', '.join(map(str, axis.choices))}"
            for name, axis in protocol.space.axes.items()
        )
        lines += [
            f"Each variant had {protocol.repeats} searches of {protocol.points} "
            f"quasi-random points, each search with its own seed; {space}. The best "
            f"point of each search was trained with {protocol.num_seeds} new seeds.",
            "Tuned: the best point of all searches. *1 of 3: the best point of one "
            "search of three is in the outer tenth of the range. log1m: the scale of 1 "
            "minus the value is logarithmic.",
            f"Expected best of {_fewer(search)}: the mean best of so many trials that "
            "are drawn from a search.",
        ]
    else:
        seeds = protocol.num_seeds
        lines.append(f"Each variant was trained with {seeds} seeds, and not tuned.")
    what = "Ratios: to" if search.has_target else "Differences: from"
    lines.append(
        f"{what} the baseline, paired by seed and search, with 95 % intervals in "
        "brackets (BCa bootstrap over searches and seeds, as long as Student's)."
    )
    if search.has_target:
        lines.append(
            "s at R: seconds by arithmetic from the counts, divided by the baseline's. "
            "A fresh batch takes R steps, and is loaded while training goes on."
        )
    for variant in search.variants:
        if variant.is_bound:
            missed = sum(trial.score is None for trial in variant.confirmed)
            lines.append(
                f"{variant.name} missed the target with {missed} of "
                f"{len(variant.confirmed)} seeds; their costs count to the end."
            )
    sign = "/" if search.has_target else "-"
    return lines + [_said(each, sign) for each in search.predictions]


def _said(each: Prediction, sign: str) -> str:
    verdicts = {True: "Refuted", False: "Not refuted", None: "Not significant"}
    return (
        f"Prediction, written beforehand: {each.variant} {sign} {each.over} is at "
        f'least {each.bound:.3g}. If refuted, "{each.says}". '
        f"{verdicts[each.is_refuted]}: {_interval(each.ratio)}."
    )
