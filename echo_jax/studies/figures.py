"""The figure of a study: the metric against each of its costs."""

import contextlib
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any

from etils import epath
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from echo_jax.files.folders import run_file, write
from echo_jax.studies.runs import Run, Study

# Okabe and Ito (2008): distinct with every common colour blindness. Black is first, so
# that the baseline has the neutral colour.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Markers distinguish variants in grey print.
# "x" marks a run that diverged.
MARKERS = ("o", "s", "^", "D", "v", "P", "<")
# For the first seven variants, and for the variants that reuse their colours.
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


# The fields of the metrics' rows that are axes, and their labels.
_PANELS = {
    "fresh": "fresh examples",
    "updates": "updates",
    "wall_s": "seconds of training",
}
_BYTES = {"bytes_sent": "bytes sent by a device"}
_PANEL_INCHES = 3.8
# Characters that fit into a line of a figure with three panels.
_LINE = 170

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777777",
    "axes.labelcolor": "#222222",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    # A dollar sign in a variant's name does not start a formula.
    "text.parse_math": False,
    # The same study gives the same bytes.
    "svg.hashsalt": "echo_jax",
}


def write_figure(
    study: Study, stem: str | os.PathLike[str]
) -> tuple[epath.Path, epath.Path]:
    """Writes the figure of a study and returns the paths of PNG and SVG."""
    return write_drawn(lambda: draw_study(study), stem)


def mean_curve(
    curves: Sequence[Sequence[tuple[float, float]]],
) -> list[tuple[float, float]]:
    """Returns the mean of curves of (cost, metric), up to the end of the shortest."""
    means = []
    for points in zip(*curves, strict=False):
        x, y = zip(*points, strict=True)
        means.append((sum(x) / len(x), sum(y) / len(y)))
    return means


@contextlib.contextmanager
def own_style(changes: dict[Any, Any] = _STYLE) -> Iterator[None]:
    """Sets a style that does not depend on the machine's ``matplotlibrc``."""
    with style.context(["default", changes]):
        yield


def write_drawn(
    draw: Callable[[], Figure], stem: str | os.PathLike[str]
) -> tuple[epath.Path, epath.Path]:
    """Draws a figure in this style; writes PNG and SVG and returns their paths."""
    stem = run_file(stem)
    png, svg = (stem.parent / f"{stem.name}{suffix}" for suffix in (".png", ".svg"))
    with own_style():
        figure = draw()
        # Canvases of their own leave the caller's backend and open figures alone.
        drawn, undated = BytesIO(), {"Date": None}
        FigureCanvasAgg(figure).print_figure(drawn, format="png", dpi=160)
        write(png, drawn.getvalue())
        drawn = BytesIO()
        FigureCanvasSVG(figure).print_figure(drawn, format="svg", metadata=undated)
        write(svg, drawn.getvalue())
    return png, svg


# `variants` groups the runs of a variant: their mean is bold, each run is thin. By
# default each run is a variant. There is a panel of bytes if runs send unevenly.
def draw_study(study: Study, variants: Sequence[Sequence[Run]] = ()) -> Figure:
    """Draws a study with a panel for each cost."""
    variants = variants or [[run] for run in study.runs]
    panels = _PANELS | (_BYTES if study.sends_unevenly else {})
    target = study.runs[0].target
    size = _PANEL_INCHES * len(panels), 4.7
    figure = Figure(figsize=size, facecolor="white", layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), sharey=True)
    for ax, (panel, label) in zip(axes, panels.items(), strict=True):
        for index, runs in enumerate(variants):
            _draw_variant(ax, panel, runs, index)
        if target is not None:
            ax.axhline(target, color="#777777", linewidth=1.1, linestyle=(0, (4, 3)))
        ax.set_xlabel(label)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if panel != "wall_s":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel(f"evaluation {study.runs[0].metric}")
    axes[0].set_ylim(*_limits(study))
    _head(
        figure, study, [*map(_label, variants)], is_mean=len(variants) < len(study.runs)
    )
    return figure


def _draw_variant(ax: Axes, panel: str, runs: Sequence[Run], index: int) -> None:
    style = {**_style(index), "solid_joinstyle": "round"}
    curves = []
    for run in runs:
        costs = [row.get(panel, 0) for row in run.evals]
        curves.append([*zip(costs, run.values, strict=True)])
    # The wide baseline is visible behind a variant with the same curve.
    width = 2.8 if index == 0 else 1.7
    if len(runs) > 1:
        for curve in curves:
            ax.plot(*zip(*curve, strict=True), linewidth=0.7, alpha=0.5, **style)
    whole = [c for c, run in zip(curves, runs, strict=True) if run.diverged is None]
    ax.plot(*zip(*mean_curve(whole or curves), strict=True), linewidth=width, **style)
    # Where a run diverged or reached the target. In decreasing sizes, so that all
    # markers in one place are visible.
    diverged = {"marker": "x", "markersize": 8, "markeredgewidth": 2.0}
    reached = {
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": max(9.5 - 1.2 * index, 5),
        **{"markeredgecolor": "white", "markeredgewidth": 1.0},
        **{"clip_on": False, "zorder": 5 + index},
    }
    for run in runs:
        if run.diverged is not None:
            x, y = run.evals[-1].get(panel, 0), run.values[-1]
            ax.plot([x], [y], color=style["color"], **diverged)
        if run.reached:
            x, y = run.at_target.get(panel, 0), run.at_target[f"eval_{run.metric}"]
            ax.plot([x], [y], color=style["color"], **reached)


def _label(runs: Sequence[Run]) -> str:
    ends = [run.diverged for run in runs if run.diverged is not None]
    if not ends:
        return runs[0].name
    if len(runs) == 1:
        return f"{runs[0].name} (x: diverged at update {ends[0]:,})"
    return f"{runs[0].name} (x: {len(ends)} of {len(runs)} diverged)"


def _style(index: int) -> dict[str, Any]:
    dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


# The limits ignore the first tenth of each run's evaluations and runs that diverged.
# The fall from the untrained value would leave no room for the comparison.
def _limits(study: Study) -> tuple[float, float]:
    """Returns the limits of the metric's axis, with room for the target's line."""
    values = [study.runs[0].target] if study.runs[0].target is not None else []
    for run in [run for run in study.runs if run.diverged is None] or study.runs:
        late = run.values[len(run.values) // 10 :]
        values += [value for value in late if math.isfinite(value)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = 0.06 * (high - low or 1.0)
    return low - margin, high + margin


def _head(figure: Figure, study: Study, names: Sequence[str], *, is_mean: bool) -> None:
    """Writes the title, and below the panels one legend with the setting."""
    first = study.runs[0]
    words = list(study.caveats)
    ratios = [run.summary["R"] for run in study.runs if run.summary["R"] is not None]
    if ratios:
        low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
        words.append(f"R = {low if low == high else f'{low} to {high}'} as measured")
    if first.target is not None:
        words.append(f"dashed: the target, eval {first.metric} {first.target:g}")
        words.append("marker: the target is reached")
    if is_mean:
        words.append("thin: a run;  bold: the mean")
    subtitle = ";  ".join(words)
    texts = (study.setting, subtitle[:1].upper() + subtitle[1:])
    lines = [line for text in texts for line in textwrap.wrap(text, _LINE)]
    figure.suptitle(study.name, x=0.01, ha="left", fontsize=14, weight="bold")
    marked = {"markersize": 7, "markeredgecolor": "white", "linewidth": 1.8}
    handles = [
        Line2D([], [], marker=MARKERS[k % len(MARKERS)], **marked, **_style(k))
        for k in range(len(names))
    ]
    figure.legend(
        handles,
        names,
        loc="outside lower left",
        title="\n".join(lines),
        title_fontsize=9,
        alignment="left",
        # As many as fit, by the longest name.
        ncols=max(1, min(6, 150 // (max(map(len, names)) + 6))),
        frameon=False,
        handlelength=2.2,
    )
