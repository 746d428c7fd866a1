"""The figures of a study that searched: curves, ratios with intervals, every trial."""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

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

from echo_jax.folders import RunPath, run_folder
from echo_jax.searches.comparison import ArmResult, Search
from echo_jax.searches.statistics import Interval
from echo_jax.studies.figures import COLOURS, MARKERS, write_drawn
from echo_jax.studies.runs import BASELINE

__all__ = ["write_search_figures"]

_RATIO = 4  # R of the seconds that are drawn
_WIDTH = 11.0


def write_search_figures(
    search: Search, folder: str | os.PathLike[str]
) -> list[RunPath]:
    """Draws a study, and writes each figure as PNG and as SVG.

    ``curves``: the metric of every stream against fresh examples, updates and seconds;
    ``ratios``: what each arm needed beside the baseline, with intervals and published
    values; ``trials``: what every trial of the searches needed, by the field that was
    searched over most orders of magnitude.

    Args:
      search: The study.
      folder: Receives them; made if it does not exist.

    Returns:
      The paths of the SVGs.
    """
    drawn: list[tuple[str, Callable[[Search], Figure]]] = [("curves", _curves)]
    if any(arm.fresh or arm.final for arm in search.arms):
        drawn.append(("ratios", _ratios))
    if search.protocol.space.axes:
        drawn.append(("trials", _trials))
    paths = []
    folder = run_folder(folder)
    folder.mkdir()
    for name, draw in drawn:
        _, svg = write_drawn(functools.partial(draw, search), folder / name)
        paths.append(svg)
    return paths


def _titled(search: Search, height: float, *columns: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_WIDTH, height), facecolor="white", layout="constrained")
    figure.suptitle(f"{search.name}\n{search.setting}", fontsize=9)
    axes = figure.subplots(
        1, len(columns), squeeze=False, gridspec_kw={"width_ratios": columns}
    )
    return figure, axes[0]


def _curves(search: Search) -> Figure:
    figure, axes = _titled(search, 5.0, 1, 1, 1)
    size = search.base["batch_size"]
    costs = (
        ("fresh examples read", lambda t, k: t.fresh[k]),
        ("updates", lambda t, k: t.updates[k]),
        (
            f"time in steps, R = {_RATIO} (by arithmetic)",
            lambda t, k: max(t.fresh[k] / size * _RATIO, t.updates[k]),
        ),
    )
    for ax, (label, cost) in zip(axes, costs, strict=True):
        for number, arm in enumerate(search.arms):
            for trial in arm.confirmed:
                points = [
                    (cost(trial, k), value)
                    for k, value in enumerate(trial.values)
                    if value is not None
                ]
                if points:
                    ax.plot(
                        *zip(*points, strict=True),
                        color=_colour(number),
                        linewidth=0.6,
                        alpha=0.5,
                    )
            ax.plot([], [], color=_colour(number), label=arm.name)
        if search.has_target:
            ax.axhline(search.base["target"], color="#777777", dashes=(4, 3), lw=1)
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
        _zoom(ax, search)
    axes[0].set_ylabel("metric, on the evaluation split")
    axes[-1].legend(frameon=False, fontsize=8)
    return figure


def _zoom(ax: Axes, search: Search) -> None:
    """Leaves the first fifth of what was gained out, where all curves fall steeply."""
    values = [
        value
        for arm in search.arms
        for trial in arm.confirmed
        for value in trial.values
        if value is not None
    ]
    starts = [
        trial.values[0]
        for arm in search.arms
        for trial in arm.confirmed
        if trial.values and trial.values[0] is not None
    ]
    if not values or not starts:
        return
    start = sum(starts) / len(starts)
    end = (
        min(values)
        if abs(min(values) - start) > abs(max(values) - start)
        else max(values)
    )
    near = start + 0.4 * (end - start)
    margin = 0.05 * (end - near)
    ax.set_ylim(*sorted((near, end + margin)))


def _ratios(search: Search) -> Figure:
    found: list[tuple[str, Callable[[ArmResult], Interval | None], float]] = [
        ("fresh examples, ratio to the baseline", lambda arm: arm.fresh, 1.0),
        ("updates, ratio to the baseline", lambda arm: arm.updates, 1.0),
    ]
    if not search.has_target:
        found = [("last value less the baseline's", lambda arm: arm.final, 0.0)]
    arms = [arm for arm in search.arms if arm.name != BASELINE]
    figure, axes = _titled(search, 1.9 + 0.34 * len(arms), *[1.0] * len(found))
    for ax, (label, of, neutral) in zip(axes, found, strict=True):
        for place, arm in enumerate(arms):
            interval = of(arm)
            if interval is None:
                continue
            if not math.isnan(interval.low):
                ax.plot(
                    [interval.low, interval.high],
                    [place, place],
                    color="#000000",
                    lw=1.4,
                )
            ax.plot(interval.value, place, "o", color="#000000", ms=5)
            if neutral and of(arm) is arm.fresh and arm.name in search.paper:
                ax.plot(
                    search.paper[arm.name],
                    place,
                    "D",
                    color="#D55E00",
                    ms=6,
                    mfc="none",
                )
        ax.axvline(neutral, color="#777777", lw=1)
        ax.set_yticks(range(len(arms)), _labels(search, arms) if ax is axes[0] else [])
        ax.invert_yaxis()
        ax.set_xlabel(label)
    if search.has_target and search.paper:
        axes[0].plot([], [], "D", color="#D55E00", mfc="none", label="Choi et al. 2019")
        figure.legend(frameon=False, fontsize=8, loc="outside lower left")
    return figure


def _labels(search: Search, arms: list[ArmResult]) -> list[str]:
    return [f"{arm.name}  (n = {arm.n})" for arm in arms]


def _trials(search: Search) -> Figure:
    axes_of = search.protocol.space.axes
    name = max(axes_of, key=lambda n: axes_of[n].high / (axes_of[n].low or 1))
    figure, (ax,) = _titled(search, 5.0, 1)
    worst = max(
        [trial.score or 0 for arm in search.arms for trial in arm.trials], default=1
    )
    for number, arm in enumerate(search.arms):
        style = {"color": _colour(number), "alpha": 0.6, "linestyle": "none"}
        got = [(t.point[name], t.score) for t in arm.trials if t.score is not None]
        lost = [t.point[name] for t in arm.trials if t.score is None]
        marker = MARKERS[number % len(MARKERS)]
        if got:
            ax.plot(
                *zip(*got, strict=True), marker=marker, ms=4, label=arm.name, **style
            )
        ax.plot(lost, [worst * 1.15] * len(lost), marker="x", ms=5, **style)
        for each in arm.searches:
            if each.best:
                ax.plot(
                    each.best.point[name],
                    each.best.score,
                    marker=marker,
                    ms=10,
                    mfc="none",
                    color=_colour(number),
                )
    if axes_of[name].scale == "log":
        ax.set_xscale("log")
        _label_logarithmically(ax.xaxis)
    if search.has_target and worst > 0:
        ax.set_yscale("log")
        _label_logarithmically(ax.yaxis)
    ax.set_xlabel(name)
    what = "fresh examples to the target" if search.has_target else "score"
    ax.set_ylabel(f"{what} (x: cut, missed it or diverged)")
    ax.legend(frameon=False, fontsize=8, title="ring: best of a search")
    return figure


def _label_logarithmically(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
