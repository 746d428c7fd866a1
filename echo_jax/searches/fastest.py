"""Finds the fastest variant for each R, in one or several studies that searched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from echo_jax.searches.comparison import Search, VariantResult, log_speedups
from echo_jax.searches.statistics import Interval, mean_interval
from echo_jax.studies import page
from echo_jax.studies.figures import COLOURS
from echo_jax.studies.report import Report
from echo_jax.studies.runs import BASELINE, Study, StudyError

_RATIOS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
_TITLE = "Which variant is the fastest at which R"
_HEADINGS = ("study", "fastest", "R", "speedup", "as fast")
_NOTES = (
    "R: the steps that a fresh batch takes. Seconds follow from the counts of fresh "
    "examples and updates; loading and training run at the same time.",
    "In brackets: 95 % intervals (BCa bootstrap over searches and seeds, as long as "
    "Student's). The fastest is chosen with the seeds that its interval is from.",
    "Speedup: the baseline's seconds over those of the fastest.",
    "As fast: variants without a significant difference from the fastest.",
)


class BestVariant(NamedTuple):
    """The fastest variant at one R."""

    ratio: float  # R, the steps that a fresh batch takes.
    name: str  # ``baseline`` where nothing should be echoed.
    speedup: Interval  # Relative to the baseline.
    alike: Sequence[str]  # Variants without a significant difference from it.


Found = Sequence[tuple[Search, Sequence[BestVariant]]]
"""Studies, and the fastest variants of each."""


def best_variants(
    search: Search, ratios: Sequence[float] = _RATIOS
) -> list[BestVariant]:
    """Returns the fastest variant for each R; the study has a target and a baseline."""
    found = []
    size = search.base["batch_size"]
    for ratio in ratios:
        best, gains = _fastest(search, ratio)
        alike = []
        for variant in search.variants:
            logs = log_speedups(best, variant, batch_size=size, ratio=ratio)
            if variant is not best and logs.size and mean_interval(logs).low <= 0:
                alike.append(variant.name)
        found.append(BestVariant(ratio, best.name, mean_interval(gains).exp(), alike))
    return found


def _fastest(search: Search, ratio: float) -> tuple[VariantResult, np.ndarray]:
    """Returns the fastest variant and its log speedups over the baseline."""
    baseline = search.baseline
    if baseline is None or not search.has_target:
        raise StudyError(
            f"{search.name} has no variant {BASELINE!r} or no target to compare with; "
            "leave it out"
        )
    size = search.base["batch_size"]
    each = [
        (variant, log_speedups(variant, baseline, batch_size=size, ratio=ratio))
        for variant in search.variants
    ]
    found = [(variant, gains) for variant, gains in each if gains.size]
    if not found:
        raise StudyError(f"{search.name} has no trials with new seeds yet")
    # The first of equals wins: the baseline, or the variant that repeats less.
    return max(found, key=lambda each: each[1].mean())


# `clocked` studies trained each variant once to a target with measured seconds. Their
# fastest variants become points of the figure.
def fastest_report(found: Found, *, clocked: Sequence[Study] = ()) -> Report:
    """Returns the report on the fastest variants."""
    points = [*map(speedup_by_clock, clocked)]
    settings = page.items(f"{search.name}: {search.setting}." for search, _ in found)
    return Report(
        title=_TITLE,
        headings=_HEADINGS,
        rows=_rows(found),
        notes=_notes(found),
        figures={"best": lambda: _draw(found, points)},
        details=lambda folder: [settings],
    )


def _rows(found: Found) -> list[tuple[str, ...]]:
    rows = []
    for search, bests in found:
        for best in bests:
            value, low, high = best.speedup
            name, gain = best.name, f"{value:.2f} ({low:.2f} to {high:.2f})"
            if name == BASELINE:
                name, gain = "no echo", ""
            alike = ", ".join(best.alike) or "none"
            rows.append((search.name, name, f"{best.ratio:g}", gain, alike))
    return rows


def _notes(found: Found) -> list[str]:
    """Returns the notes of the table, with the prediction on larger batches."""
    ordered = sorted(found, key=lambda each: each[0].base["batch_size"])
    names = [[variant.name for variant in search.variants] for search, _ in ordered]
    sizes = [search.base["batch_size"] for search, _ in ordered]
    if len({*sizes}) < 2 or any(each != names[0] for each in names):
        return [*_NOTES]
    later, earlier = [], []
    for least, most in zip(ordered[0][1], ordered[-1][1], strict=True):
        # Places of the variants that may be the fastest.
        small, large = (
            [names[0].index(name) for name in (best.name, *best.alike)]
            for best in (least, most)
        )
        if min(large) > max(small):
            later.append(f"{least.ratio:g}")
        elif max(large) < min(small):
            earlier.append(f"{least.ratio:g}")
    later, earlier = (", ".join(each) or "none of these" for each in (later, earlier))
    return [
        *_NOTES,
        "Prediction for these studies together: where batches are larger, the fastest "
        "variant comes later in their order. Measured: from batches of "
        f"{sizes[0]} to {sizes[-1]} it surely comes later at R = {later}, and surely "
        f"earlier at R = {earlier}. Variants that are as fast may be the fastest.",
    ]


def speedup_by_clock(study: Study) -> tuple[float, float]:
    """Returns the R of a study's baseline and the speedup of its fastest variant."""
    baseline = study.baseline
    if baseline is None or not baseline.reached or not baseline.summary["R"]:
        raise StudyError(
            f"{study.name} has no variant {BASELINE!r} that reached a target and had "
            "an R; leave it out"
        )
    seconds = [r.summary["seconds_to_target"] for r in study.runs if r.reached]
    gain = baseline.summary["seconds_to_target"] / min(seconds)
    return baseline.summary["R"], gain


def _draw(found: Found, clocked: Sequence[tuple[float, float]]) -> Figure:
    searches = [search for search, _ in found]
    height = 3.6 + 0.7 * len(searches)
    figure = Figure(figsize=(9.0, height), facecolor="white", layout="constrained")
    figure.suptitle(
        "\n".join([_TITLE, *dict.fromkeys(s.setting for s in searches)]), fontsize=8
    )
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": (3, 0.7 * len(searches) + 0.2)}
    )
    ratios = np.geomspace(_RATIOS[0], _RATIOS[-1], 65)
    names = list(dict.fromkeys(x.name for each in searches for x in each.variants))
    for place, (search, bests) in enumerate(found):
        _draw_gain(above, search, bests, place)
        _draw_band(below, search, place, ratios, names)
    if clocked:
        label = "measured seconds, at the baseline's measured R"
        style = {"color": "#000000", "mfc": "none", "ms": 6, "zorder": 4}
        above.plot(*zip(*clocked, strict=True), "D", label=label, **style)
    above.set_ylabel("speedup over\nthe baseline")
    above.set_yscale("log", base=2)
    above.axhline(1, color="#777777", lw=1)
    above.legend(frameon=False, fontsize=8)
    below.set_yticks([])
    below.set_ylim(len(searches) - 0.5, -0.75)
    below.grid(visible=False)
    below.set_xscale("log", base=2)
    below.set_xlim(_RATIOS[0], _RATIOS[-1])
    for axis in (above.yaxis, below.xaxis):
        axis.set_major_locator(FixedLocator(_RATIOS))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_locator(NullLocator())
    below.set_xlabel(
        "R: steps that a fresh batch takes (seconds by arithmetic); grey: no echo"
    )
    return figure


def _draw_gain(
    ax: Axes, search: Search, found: Sequence[BestVariant], place: int
) -> None:
    style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)]}
    ratios = [best.ratio for best in found]
    values = [best.speedup.value for best in found]
    ax.plot(ratios, values, marker="o", ms=4, label=search.name, **style)
    for best in found:
        ax.plot([best.ratio] * 2, [best.speedup.low, best.speedup.high], lw=1, **style)


def _draw_band(
    ax: Axes, search: Search, place: int, ratios: np.ndarray, names: Sequence[str]
) -> None:
    """Draws for each variant the range of R in which it is the fastest."""
    found = [_fastest(search, ratio)[0].name for ratio in ratios]
    edges = [0, *(k for k in range(1, len(found)) if found[k] != found[k - 1])]
    for start, end in zip(edges, [*edges[1:], len(found) - 1], strict=True):
        name = found[start]
        colour = COLOURS[names.index(name) % len(COLOURS)]
        left, right = ratios[start], ratios[end]
        ax.barh(place, right - left, left=left, height=0.6, color=colour, alpha=0.35)
        if name != BASELINE:
            middle = (left * right) ** 0.5
            ax.text(middle, place, name, ha="center", va="center", size=8)
    ax.text(ratios[0], place - 0.36, f" {search.name}", va="bottom", size=8)
