"""The figure of a study: the metric against each of its costs."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from echo_jax.folders import RunPath, run_file
from echo_jax.studies.runs import Run, Study

__all__ = ["COLOURS", "MARKERS", "STYLE", "write_drawn", "write_figure", "write_png"]

# Okabe and Ito (2008): told apart with every common colour blindness. Black is
# the first, so that the baseline is the line in the neutral colour.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# A second sign beside the colour, for print in grey.
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# Of the first seven arms, and of those who have their colours again.
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))


@dataclass(frozen=True)
class _Panel:
    """One cost axis: the field of the metrics' rows."""

    label: str
    field: str


_PANELS = (
    _Panel("fresh examples read", "fresh"),
    _Panel("updates", "updates"),
    _Panel("seconds of training", "wall_s"),
)
_BYTES = _Panel("bytes sent by a device", "bytes_sent")
_PANEL_INCHES = 3.8

STYLE: dict[Any, Any] = {
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
    # A dollar sign in an arm's name is no formula.
    "text.parse_math": False,
    # The same study gives the same bytes.
    "svg.hashsalt": "echo_jax",
}


def write_figure(study: Study, stem: str | os.PathLike[str]) -> tuple[RunPath, RunPath]:
    """Draws the study and writes it as PNG and as SVG.

    Three panels share the metric's axis: it is plotted against fresh examples,
    updates and seconds of training. Where devices send more for an update in one run
    than in another, there is a fourth, of the bytes. The target is a dashed line, and a
    marker shows where an arm met it.

    Args:
      study: The runs to compare.
      stem: The file name without its suffix, such as ``runs/s/figure``.

    Returns:
      The paths of the PNG and of the SVG.
    """
    return write_drawn(lambda: _draw(study), stem)


def write_drawn(
    draw: Callable[[], Figure], stem: str | os.PathLike[str]
) -> tuple[RunPath, RunPath]:
    """Draws a figure in the style of all of them, and writes it as PNG and as SVG.

    Args:
      draw: Draws it, without pyplot.
      stem: The file name without its suffix.

    Returns:
      The paths of the PNG and of the SVG.
    """
    stem = run_file(stem)
    png, svg = (stem.parent / f"{stem.name}{suffix}" for suffix in (".png", ".svg"))
    with mpl.rc_context(STYLE):
        figure = draw()
        write_png(figure, png)
        drawn = BytesIO()
        FigureCanvasSVG(figure).print_figure(
            drawn, format="svg", metadata={"Date": None}
        )
        svg.write(drawn.getvalue())
    return png, svg


def write_png(figure: Figure, path: RunPath) -> None:
    """Writes a figure as PNG; the caller's backend and open figures stay as they are.

    Args:
      figure: Drawn without pyplot.
      path: The file.
    """
    drawn = BytesIO()
    FigureCanvasAgg(figure).print_figure(drawn, format="png", dpi=160)
    path.write(drawn.getvalue())


def _draw(study: Study) -> Figure:
    panels = (*_PANELS, _BYTES) if study.sends_unevenly else _PANELS
    size = _PANEL_INCHES * len(panels), 4.4
    figure = Figure(figsize=size, facecolor="white")
    axes: Sequence[Axes] = figure.subplots(1, len(panels), sharey=True)
    for ax, panel in zip(axes, panels, strict=True):
        for index, run in enumerate(study.runs):
            _draw_run(ax, panel, run, index)
        _draw_target(ax, study)
        ax.set_xlabel(panel.label)
        ax.set_xlim(left=0)
        ax.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        if panel.field != "wall_s":
            ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0].set_ylabel(f"eval {study.runs[0].metric}")
    axes[0].set_ylim(*_limits(study))
    _head(figure, study, axes)
    return figure


def _draw_run(ax: Axes, panel: _Panel, run: Run, index: int) -> None:
    colour = COLOURS[index % len(COLOURS)]
    ax.plot(
        [row.get(panel.field, 0) for row in run.evals],
        run.values,
        color=colour,
        linestyle=_dashes(index),
        # The baseline shows behind an arm that runs along it.
        linewidth=2.8 if index == 0 else 1.7,
        solid_joinstyle="round",
    )
    if run.diverged is not None:
        ax.plot(
            [run.evals[-1].get(panel.field, 0)],
            [run.values[-1]],
            marker="x",
            color=colour,
            markersize=8,
            markeredgewidth=2.0,
        )
    if run.reached:
        ax.plot(
            [run.at_target.get(panel.field, 0)],
            [run.at_target[f"eval_{run.metric}"]],
            marker=MARKERS[index % len(MARKERS)],
            color=colour,
            # Smaller and smaller: markers in one place all show.
            markersize=max(9.5 - 1.2 * index, 5),
            markeredgecolor="white",
            markeredgewidth=1.0,
            clip_on=False,
            zorder=5 + index,
        )


def _label(run: Run) -> str:
    if run.diverged is None:
        return run.name
    return f"{run.name} (x: diverged at update {run.diverged:,})"


def _dashes(index: int) -> Any:
    return _DASHES[index // len(COLOURS) % len(_DASHES)]


def _draw_target(ax: Axes, study: Study) -> None:
    target = study.runs[0].target
    if target is not None:
        ax.axhline(target, color="#777777", linewidth=1.1, linestyle=(0, (4, 3)))


def _limits(study: Study) -> tuple[float, float]:
    """Limits of the metric's axis, with room for the target's line.

    The first tenth of each run's evaluations may lie outside: the fall from the
    untrained value would leave no room for what is compared. So may what diverged.
    """
    values = [study.runs[0].target] if study.runs[0].target is not None else []
    for run in [run for run in study.runs if run.diverged is None] or study.runs:
        late = run.values[len(run.values) // 10 :]
        values += [value for value in late if math.isfinite(value)]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    margin = 0.06 * (high - low or 1.0)
    return low - margin, high + margin


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.1f}", f"{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _head(figure: Figure, study: Study, axes: Sequence[Axes]) -> None:
    """Writes title, subtitle and the one legend above the panels."""
    first = study.runs[0]
    figure.subplots_adjust(left=0.065, right=0.985, bottom=0.125, top=0.76, wspace=0.1)
    figure.text(0.012, 0.945, study.name, fontsize=14, weight="bold", color="#111111")
    words = list(study.caveats)
    ratios = [run.summary["R"] for run in study.runs if run.summary["R"] is not None]
    if ratios:
        words.append(f"R = {_range(ratios)} as measured")
    if first.target is not None:
        words.append(f"dashed: the target, eval {first.metric} {first.target:g}")
        words.append("marker: where an arm met it")
    subtitle = ";  ".join(words)
    subtitle = subtitle[:1].upper() + subtitle[1:]
    figure.text(0.012, 0.89, subtitle, fontsize=10, color="#555555")
    handles = [
        Line2D(
            [],
            [],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=7,
            markeredgecolor="white",
            linestyle=_dashes(index),
            linewidth=1.8,
        )
        for index in range(len(study.runs))
    ]
    figure.legend(
        handles,
        [_label(run) for run in study.runs],
        loc="upper left",
        bbox_to_anchor=(0.0, 0.875),
        ncols=min(len(handles), 6),
        frameon=False,
        handlelength=2.2,
        columnspacing=1.8,
    )
