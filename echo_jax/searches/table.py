"""The report of a study that searched: the costs of each arm's tuned points."""

import math

from echo_jax.searches.comparison import ArmResult, Falsified, Search
from echo_jax.searches.figures import search_figures
from echo_jax.searches.statistics import Interval, relative_seconds
from echo_jax.studies.page import plain_json
from echo_jax.studies.report import Report
from echo_jax.studies.table import optional

_RATIOS = (1, 2, 4, 8)
_IN_TERMINAL = ("arm", "tuned", "infeasible", "n", "fresh, ratio", "updates, ratio")
_IN_TERMINAL += ("final less the baseline's",)
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
        "<h2>The config of the arms</h2>",
        plain_json(search.base),
    ]
    return Report(
        title=search.name,
        headings=_headings(search),
        rows=[_cells(search, arm) for arm in search.arms],
        notes=_notes(search),
        in_terminal=_IN_TERMINAL,
        figures=search_figures(search),
        details=lambda folder: details,
    )


def _headings(search: Search) -> tuple[str, ...]:
    tuned = ("arm", "tuned")
    searched: tuple[str, ...] = ()
    if search.protocol.space.axes:
        fewer = f"expected best of {_fewer(search)}"
        searched = ("infeasible", "best of searches", fewer)
    end = ("final", "best", "n")
    if not search.has_target:
        reads = "fresh examples, of the whole run"
        published = ("published",) if search.paper else ()
        return (*tuned, *searched, reads, "final less the baseline's", *published, *end)
    seconds = tuple(f"s at R={ratio}" for ratio in _RATIOS)
    costs = ("fresh examples", "fresh, ratio", "updates, ratio", *seconds, "published")
    return (*tuned, *searched, *costs, *end)


def _cells(search: Search, arm: ArmResult) -> tuple[str, ...]:
    cells = [arm.name, _tuned(search, arm)]
    if search.protocol.space.axes:
        scores = arm.best_scores
        spread = f"{min(scores):,.5g} to {max(scores):,.5g}" if scores else "none"
        fewer = optional(arm.expected_best(_fewer(search)), "{:,.5g}")
        cells += [f"{arm.infeasible:.0%}", spread, fewer]
    if search.has_target:
        at_least = "≥ " if arm.is_bound else ""
        cells += [
            optional(arm.mean("fresh_to_target"), "{:,.0f}"),
            at_least + _interval(arm.fresh),
            at_least + _interval(arm.updates),
            *(_seconds(search, arm, ratio) for ratio in _RATIOS),
            optional(search.paper.get(arm.name), "{:.2f}"),
        ]
    else:
        reads = [trial.fresh[-1] for trial in arm.confirmed if trial.fresh]
        cells.append(f"{sum(reads) / len(reads):,.0f}" if reads else "—")
        cells.append(_interval(arm.final))
        if search.paper:
            cells.append(optional(search.paper.get(arm.name), "{:+.3g}"))
    cells += [optional(arm.mean(name), "{:.4g}") for name in ("final", "best")]
    return (*cells, arm.n)


def _fewer(search: Search) -> int:
    """Returns half the number of trials of a search."""
    return max(1, search.protocol.points // 2)


def _tuned(search: Search, arm: ArmResult) -> str:
    """Returns the best point of all searches; ``*`` counts best points at an edge."""
    found = [each.best for each in arm.searches if each.best]
    if not found:
        return "as it is" if not search.protocol.space.axes else "none met the target"
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


def _seconds(search: Search, arm: ArmResult, ratio: int) -> str:
    """Returns the computed seconds relative to the baseline's."""
    if search.baseline is None:
        return "—"
    times = []
    for each in (arm, search.baseline):
        fresh, updates = each.mean("fresh_to_target"), each.mean("updates_to_target")
        if fresh is None or updates is None:
            return "—"
        size = search.base["batch_size"]
        times.append(relative_seconds(fresh, updates, batch_size=size, ratio=ratio))
    return f"{times[0] / times[1]:.2f}" if times[1] else "—"


def _notes(search: Search) -> list[str]:
    """Returns sentences on the meaning of the numbers and on the falsifiers."""
    protocol = search.protocol
    lines = [f"{search.setting}."]
    if protocol.space.axes:
        space = ", ".join(
            f"{name} {axis.scale} {axis.low:g} to {axis.high:g}"
            if not axis.choices
            else f"{name} of {', '.join(map(str, axis.choices))}"
            for name, axis in protocol.space.axes.items()
        )
        lines.append(
            f"Searches of each arm: {protocol.repeats}, of {protocol.points} points, "
            f"quasi-random, each on a stream of its own; {space}. The best point of "
            f"each search was trained on {protocol.streams} new streams; tuned: the "
            "best of them all. *1 of 3: of so many searches the best point lies in the "
            "outer tenth of what was tried. Expected best: the mean over searches of "
            "half as many trials, drawn from these."
        )
    else:
        lines.append(f"Every arm on {protocol.streams} streams, nothing tuned.")
    what = "Ratios: to" if search.has_target else "Differences: from"
    lines.append(
        f"{what} the baseline, paired by stream and search; in brackets 95 % "
        "intervals (BCa bootstrap over searches and streams, as long as Student's). "
        "log1m: 1 less the value."
    )
    if search.has_target:
        lines.append(
            "Seconds: by arithmetic from the counts, beside the baseline's, if a fresh "
            "batch takes R steps and loading and training go on at the same time."
        )
    for arm in search.arms:
        if arm.is_bound:
            missed = sum(trial.score is None for trial in arm.confirmed)
            lines.append(
                f"{arm.name} missed the target on {missed} of {len(arm.confirmed)} "
                "streams; what it had read by then is counted for them."
            )
    sign = "/" if search.has_target else "-"
    return lines + [_said(each, sign) for each in search.falsifiers]


def _said(each: Falsified, sign: str) -> str:
    verdict = {True: "It is", False: "It is not", None: "Nobody can tell"}[each.is_met]
    return (
        f'Falsifier, written down before: "{each.says}", if {each.arm} {sign} '
        f"{each.over} is below {each.bound:.3g}. {verdict}: {_interval(each.ratio)}."
    )
