"""The figures of a study that searched: curves, ratios with intervals, every trial."""

import functools
import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import (
    EngFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    StrMethodFormatter,
)

from echo_jax.searches.comparison import Search, VariantResult
from echo_jax.searches.statistics import Interval
from echo_jax.searches.trials import crossing
from echo_jax.studies.figures import COLOURS, MARKERS, mean_curve
from echo_jax.studies.runs import BASELINE

_RATIO = 4  # R of the seconds that are drawn
_WIDTH = 11.0
_LINE = 150  # characters that fit into it
# The number of values of a mean curve to a target.
_VALUES = 60
# A score is drawn apart if its distance from the middle half exceeds this multiple of
# the half's width.
_FAR = 3.0

_Cost = Callable[[float, float], float]


# ``curves``: the metric of every seed against fresh examples, updates and seconds.
# ``ratios``: each variant's cost over the baseline's, with published values.
# ``trials``: each trial's cost by the field searched over most orders of magnitude.
def search_figures(search: Search) -> dict[str, Callable[[], Figure]]:
    """Returns the functions that draw the figures of a study, by the figures' names."""
    drawn = {"curves": _curves}
    if any(variant.fresh or variant.final for variant in search.variants):
        drawn["ratios"] = _ratios
    if search.protocol.space.axes:
        drawn["trials"] = _trials
    return {name: functools.partial(draw, search) for name, draw in drawn.items()}


def _titled(search: Search, height: float, *columns: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), facecolor="white", layout="constrained")
    setting = textwrap.fill(search.setting, _LINE)
    figure.suptitle(f"{search.name}\n{setting}", fontsize=9)
    axes = figure.subplots(
        1, len(columns), squeeze=False, gridspec_kw={"width_ratios": columns}
    )
    return figure, axes[0]


def _curves(search: Search) -> Figure:
    figure, axes = _titled(search, 5.0, 1, 1, 1)
    size = search.base["batch_size"]
    costs: tuple[tuple[str, _Cost], ...] = (
        ("fresh examples", lambda updates, fresh: fresh),
        ("updates", lambda updates, fresh: updates),
        (
            f"time in steps, R = {_RATIO} (by arithmetic)",
            lambda updates, fresh: max(fresh / size * _RATIO, updates),
        ),
    )
    for ax, (label, cost) in zip(axes, costs, strict=True):
        for number, variant in enumerate(search.variants):
            for trial in variant.confirmed:
                rows = zip(trial.updates, trial.fresh, trial.values, strict=True)
                points = [
                    (cost(u, f), value) for u, f, value in rows if value is not None
                ]
                if points:
                    thin = {"linewidth": 0.5, "alpha": 0.3, "zorder": 1.5}
                    x, y = zip(*points, strict=True)
                    ax.plot(x, y, color=_colour(number), **thin)
        for number, variant in enumerate(search.variants):
            points = mean_points(search, variant, cost)
            x, y = zip(*points, strict=True) if points else ((), ())
            # On white, so that it is visible in front of its seeds.
            ax.plot(x, y, color="white", linewidth=4.4, zorder=3)
            ax.plot(x, y, color=_colour(number), lw=2.4, label=variant.name, zorder=4)
        if search.has_target:
            ax.axhline(search.base["target"], color="#777777", dashes=(4, 3), lw=1)
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        _zoom(ax, search)
    axes[0].set_ylabel(f"evaluation {search.metric}")
    what = "mean cost\nof each value" if search.has_target else "mean"
    _legend(figure, axes[0], f"thin: a seed\nbold: {what}")
    return figure


# Trials end where they reach a target. With a target, the curve is the mean cost at
# which all trials reach each value on the way to it.
def mean_points(
    search: Search, variant: VariantResult, cost: _Cost
) -> list[tuple[float, float]]:
    """Returns the mean curve (cost, metric) of a variant's new seeds."""
    if not search.has_target:
        return mean_curve(
            [
                [
                    (cost(u, f), math.nan if value is None else value)
                    for u, f, value in zip(t.updates, t.fresh, t.values, strict=True)
                ]
                for t in variant.confirmed
                if t.values
            ]
        )
    firsts = [t.values[0] for t in variant.confirmed if t.values]
    starts = [value for value in firsts if value is not None]
    if not starts:
        return []
    points = []
    for value in np.linspace(sum(starts) / len(starts), search.base["target"], _VALUES):
        met = [
            crossing(t.updates, t.fresh, t.values, float(value), search.mode)
            for t in variant.confirmed
            if t.values
        ]
        known = [cost(*each) for each in met if each is not None]
        if len(known) == len(met):
            points.append((sum(known) / len(known), float(value)))
    return points


def _zoom(ax: Axes, search: Search) -> None:
    """Leaves out two fifths of the gain, where all curves fall steeply."""
    rows = [trial.values for each in search.variants for trial in each.confirmed]
    values = [value for row in rows for value in row if value is not None]
    starts = [row[0] for row in rows if row and row[0] is not None]
    if not values or not starts:
        return
    start = sum(starts) / len(starts)
    end = max(max(values), min(values), key=lambda value: abs(value - start))
    near = start + 0.4 * (end - start)
    margin = 0.05 * (end - near)
    ax.set_ylim(*sorted((near, end + margin)))


def _ratios(search: Search) -> Figure:
    found: list[tuple[str, Callable[[VariantResult], Interval | None], float]] = [
        ("fresh examples, ratio to the baseline", lambda each: each.fresh, 1.0),
        ("updates, ratio to the baseline", lambda each: each.updates, 1.0),
    ]
    if not search.has_target:
        minus = f"last evaluation {search.metric} minus the baseline's"
        found = [(minus, lambda each: each.final, 0.0)]
    variants = [each for each in search.variants if each.name != BASELINE]
    figure, axes = _titled(search, 1.9 + 0.34 * len(variants), *[1.0] * len(found))
    for ax, (label, of, neutral) in zip(axes, found, strict=True):
        for place, variant in enumerate(variants):
            interval = of(variant)
            if interval is None:
                continue
            if not math.isnan(interval.low):
                ax.plot(interval[1:], [place] * 2, color="#000000", lw=1.4)
            ax.plot(interval.value, place, "o", color="#000000", ms=5)
            is_published = interval is variant.fresh or interval is variant.final
            if is_published and variant.name in search.paper:
                paper = search.paper[variant.name]
                ax.plot(paper, place, "D", color="#D55E00", ms=6, mfc="none")
        ax.axvline(neutral, color="#777777", lw=1)
        labels = [f"{variant.name}  (n = {variant.n})" for variant in variants]
        ax.set_yticks(range(len(variants)), labels if ax is axes[0] else [])
        ax.set_ylim(len(variants) - 0.5, -0.5)
        ax.set_xlabel(label)
    if search.paper:
        axes[0].plot([], [], "D", color="#D55E00", mfc="none", label="Choi et al. 2019")
        figure.legend(frameon=False, fontsize=8, loc="outside lower left")
    return figure


def _trials(search: Search) -> Figure:
    axes_of = search.protocol.space.axes
    name = max(axes_of, key=lambda n: axes_of[n].high / (axes_of[n].low or 1))
    figure, (ax,) = _titled(search, 5.0, 1)
    scores = [
        t.score
        for variant in search.variants
        for t in variant.trials
        if t.score is not None
    ]
    sign = -1 if search.mode == "max" and not search.has_target else 1
    most = max(scores, default=1.0) if search.has_target else _fence(scores)
    # The height for trials beyond the fence or without a score.
    apart = most + 0.1 * (most - min(scores, default=most) or 1.0)
    if search.has_target:
        apart = most * 1.15
    for number, variant in enumerate(search.variants):
        style = {"color": _colour(number), "linestyle": "none"}
        marker = MARKERS[number % len(MARKERS)]
        got = [(t.point[name], t.score) for t in variant.trials if t.score is not None]
        x = [place for place, _ in got]
        y = [sign * (score if score <= most else apart) for _, score in got]
        ax.plot(x, y, marker=marker, ms=4, alpha=0.6, label=variant.name, **style)
        lost = [t.point[name] for t in variant.trials if t.score is None]
        ax.plot(lost, [sign * apart] * len(lost), marker="x", ms=5, alpha=0.6, **style)
        for each in variant.searches:
            if each.best:
                x, y = each.best.point[name], sign * (each.best.score or 0)
                ax.plot(x, y, marker=marker, ms=10, mfc="none", **style)
    if axes_of[name].scale != "choice":
        for end in (0.0, 1.0):
            ax.axvline(axes_of[name].at(end), color="#777777", dashes=(1, 2), lw=1)
    if axes_of[name].scale == "log":
        ax.set_xscale("log")
        _label_logarithmically(ax.xaxis)
    if search.has_target and most > 0:
        ax.set_yscale("log")
        _label_logarithmically(ax.yaxis)
    beyond = [score for score in scores if score > most]
    if beyond:
        ax.axhline(sign * (most + apart) / 2, color="#777777", lw=0.8)
        said = f" beyond: {sign * min(beyond):.3g} to {sign * max(beyond):.3g}"
        place = {"transform": ax.get_yaxis_transform(), "va": "center", "size": 8}
        ax.text(0.01, sign * apart, said, **place)
    ax.set_xlabel(name)
    if search.has_target:
        ax.set_ylabel("fresh examples to the target (x: cut, missed it or diverged)")
    else:
        ax.set_ylabel(f"last evaluation {search.metric} (x: diverged)")
    _legend(figure, ax, "ring: best\nof a search;\ndotted: bounds")
    return figure


def _fence(scores: Sequence[float]) -> float:
    """Returns the largest score (smaller is better) that is not drawn apart."""
    if not scores:
        return 1.0
    low, high = np.percentile(scores, [25, 75])
    return max(score for score in scores if score <= high + _FAR * (high - low))


def _legend(figure: Figure, ax: Axes, title: str) -> None:
    """Writes one legend next to the panels."""
    small = {"frameon": False, "fontsize": 8, "title_fontsize": 8}
    lines = ax.get_legend_handles_labels()
    figure.legend(*lines, title=title, loc="outside right center", **small)


def _label_logarithmically(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
