"""The figure of a scaling report: throughput and efficiency by devices."""

import math
import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, StrMethodFormatter

from echo_jax.files.folders import RunPath, run_folder
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies.figures import COLOURS, MARKERS, own_style, write_png
from echo_jax.studies.scaling import Scaling, write_markdown

__all__ = ["write_scaling"]


def write_scaling(
    groups: Sequence[Scaling], folder: str | os.PathLike[str]
) -> tuple[RunPath, RunPath]:
    """Writes ``scaling.md`` and ``scaling.png`` and returns their paths."""
    folder = run_folder(folder)
    page, png = folder / "scaling.md", folder / "scaling.png"
    with FolderLock(folder, name=REPORT_LOCK_NAME), own_style():
        write_markdown(groups, page)
        write_png(_draw(groups), png)
    return page, png


def _draw(groups: Sequence[Scaling]) -> Figure:
    figure = Figure(figsize=(10.5, 4.4), facecolor="white")
    left, right = figure.subplots(1, 2)
    figure.subplots_adjust(
        left=0.075, right=0.965, bottom=0.125, top=0.86 - 0.05 * len(groups), wspace=0.2
    )
    figure.text(
        0.012, 0.935, "Throughput by devices", fontsize=14, weight="bold", color="#111"
    )
    counts = sorted({point.devices for group in groups for point in group.points})
    for index, group in enumerate(groups):
        colour = COLOURS[index % len(COLOURS)]
        figure.text(
            0.012, 0.875 - 0.05 * index, group.heading, fontsize=10, color=colour
        )
        _draw_group(left, right, group, index)
    right.axhline(1, color="#777777", linewidth=1.1, linestyle=(0, (4, 3)))
    right.set_ylim(0, max(1.1, right.get_ylim()[1]))
    left.set_yscale("log", base=2)
    left.yaxis.set_major_locator(LogLocator(2))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    left.set_ylabel("T: examples per second")
    right.set_ylabel("efficiency: T / (S N)")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(counts))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.minorticks_off()
        ax.set_xlim(counts[0] / 1.15, counts[-1] * 1.3)
        ax.set_xlabel("N: devices")
    return figure


def _draw_group(left: Axes, right: Axes, group: Scaling, index: int) -> None:
    devices = [point.devices for point in group.points]
    ends = [devices[0], devices[-1]]
    ideal = [group.examples_per_s_of_one * n for n in ends]
    left.plot(ends, ideal, color="#777777", linewidth=1.1, linestyle=(0, (4, 3)))
    if index == 0:
        left.annotate(
            "ideal: S N",
            (math.sqrt(ends[0] * ends[1]), math.sqrt(ideal[0] * ideal[1])),
            xytext=(-6, 6),
            textcoords="offset points",
            ha="right",
            color="#555555",
        )
    values = (
        [p.examples_per_s for p in group.points],
        [*map(group.efficiency, group.points)],
    )
    for ax, heights in zip((left, right), values, strict=True):
        ax.plot(
            devices,
            heights,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=7,
            markeredgecolor="white",
            linewidth=1.8,
            clip_on=False,
            zorder=5,
        )
    right.annotate(
        f"{values[1][-1]:.2f}",
        (devices[-1], values[1][-1]),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        color=COLOURS[index % len(COLOURS)],
    )
