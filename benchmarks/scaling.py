"""What input stragglers cost many hosts, without an echo and with one: simulated.

``python -m benchmarks.scaling results/scaling`` draws scaling.png and writes the tables
of scaling.md there, between its marks. It takes some minutes.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter, StrMethodFormatter

from benchmarks.pages import Place, progress_bar
from benchmarks.simulation import (
    Adaptive,
    Fixed,
    Outcome,
    Producer,
    service_times,
    simulate_hosts,
)
from echo_jax.cli.command_end import path_argument
from echo_jax.studies.figures import COLOURS, MARKERS, own_style

_POLICIES = {
    "no echo": Fixed(1),
    "fixed, e = 2": Fixed(2),
    "fixed, e = 4": Fixed(4),
    "adaptive": Adaptive(cap=4, buffer=128),
}
_DRAWN = ("no echo", "fixed, e = 2", "adaptive")
_PRODUCERS: dict[Producer, str] = {
    "exponential": "exponential times",
    "pareto": "heavy tail (Pareto)",
    "stalling": "rare long stalls",
}
_RATIOS = (0.8, 2.0)
_PREFETCHES = (2, 128)
# How many hosts, and how many programs of so many are simulated.
_REPEATS = {1: 12, 8: 8, 64: 4, 1024: 3}
_BATCHES, _FEW_BATCHES = 5000, 200


@dataclass(frozen=True)
class _Case:
    """What is simulated: R, a producer, its queue, an echo, and how many hosts."""

    ratio: float
    producer: Producer
    prefetch: int
    policy: str
    hosts: int


@dataclass(frozen=True)
class _Seen:
    """Shares of the time, in every repeat.

    Attributes:
      busy: In which the accelerators train.
      fresh: In which a host trains on fresh data, on average over hosts.
    """

    busy: Sequence[float]
    fresh: Sequence[float]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], hosts: int) -> "_Seen":
        return cls(
            busy=[outcome.busy_fraction for outcome in outcomes],
            # A step takes a second.
            fresh=[o.used / hosts / o.seconds for o in outcomes],
        )


def main(argv: list[str] | None = None) -> int:
    """Simulates, draws, and writes the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description="Simulates the input of 1 to 1,024 hosts that train together.",
        epilog="example: python -m benchmarks.scaling results/scaling",
    )
    parser.add_argument(
        "folder",
        type=path_argument,
        help="receives scaling.png; its scaling.md the tables",
    )
    parser.add_argument(
        "--small", action="store_true", help=f"{_FEW_BATCHES} batches a host: a check"
    )
    args = parser.parse_args(argv)
    try:
        place = Place(args.folder / "scaling.md", "simulated")
    except ValueError as error:
        parser.error(str(error))
    seen = _simulate(_FEW_BATCHES if args.small else _BATCHES)
    place.write("\n".join(_table(seen, ratio) for ratio in _RATIOS))
    _draw(seen, _RATIOS[0], args.folder / "scaling.png")
    return 0


def _simulate(batches: int) -> dict[_Case, _Seen]:
    """Follows every case, each repeat on hosts of its own."""
    seen = {}
    num_cases = len(_RATIOS) * len(_PRODUCERS) * len(_REPEATS)
    num_cases *= len(_PREFETCHES) * len(_POLICIES)
    with progress_bar() as progress:
        task = progress.add_task("simulating", total=num_cases)
        for ratio, producer, hosts in itertools.product(_RATIOS, _PRODUCERS, _REPEATS):
            programs = list(_programs(producer, ratio, hosts, batches))
            for prefetch, name in itertools.product(_PREFETCHES, _POLICIES):
                outcomes = [
                    simulate_hosts(service, 1.0, _POLICIES[name], prefetch=prefetch)
                    for service in programs
                ]
                case = _Case(ratio, producer, prefetch, name, hosts)
                seen[case] = _Seen.of(outcomes, hosts)
                progress.advance(task)
    return seen


def _programs(
    producer: Producer, ratio: float, hosts: int, batches: int
) -> Iterator[np.ndarray]:
    for repeat in range(_REPEATS[hosts]):
        seeds = range(repeat * hosts, (repeat + 1) * hosts)
        yield np.stack([service_times(producer, ratio, batches, s) for s in seeds])


def _table(seen: Mapping[_Case, _Seen], ratio: float) -> str:
    """Makes a Markdown table of one R: training / on fresh data, in percent."""
    hosts = [n for n in _REPEATS if n > 1]
    columns = list(itertools.product(_PREFETCHES, hosts))
    heads = [f"{p} prefetched, {n:,} hosts" for p, n in columns]
    lines = [
        f"**R = {ratio:g}, simulated**: % of the time in training / on fresh data",
        "",
        f"| producer | echo | {' | '.join(heads)} |",
        f"| --- | --- |{' ---: |' * len(columns)}",
    ]
    for producer, policy in itertools.product(_PRODUCERS, _POLICIES):
        cells = []
        for prefetch, n in columns:
            found = seen[_Case(ratio, producer, prefetch, policy, n)]
            busy, fresh = statistics.mean(found.busy), statistics.mean(found.fresh)
            cells.append(f"{100 * busy:.0f} / {100 * fresh:.0f}")
        lines.append(f"| {_PRODUCERS[producer]} | {policy} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _draw(seen: Mapping[_Case, _Seen], ratio: float, path: Path) -> None:
    """Draws the share of time in training by hosts, a panel for queue and producer."""
    with own_style():
        figure = Figure(figsize=(11.5, 6.6), facecolor="white")
        figure.subplots_adjust(
            left=0.085, right=0.905, bottom=0.085, top=0.8, wspace=0.42, hspace=0.3
        )
        figure.text(
            0.012,
            0.95,
            "A fast loader is not enough: the slowest of many hosts sets the pace",
            fontsize=14,
            weight="bold",
            color="#111111",
        )
        figure.text(
            0.012,
            0.885,
            f"Simulated. On average a batch takes {ratio:g} of a step on every host "
            f"(R = {ratio:g}).\nSolid: share of the time in training; dashed: on fresh "
            "data. The rest, up to 100 %, all hosts wait.",
            fontsize=10,
            color="#555555",
        )
        axes = figure.subplots(len(_PREFETCHES), len(_PRODUCERS), sharey=True)
        for row, prefetch in zip(axes, _PREFETCHES, strict=True):
            for ax, producer in zip(row, _PRODUCERS, strict=True):
                _draw_panel(ax, seen, ratio, producer, prefetch)
            row[0].set_ylabel(f"queue of {prefetch} batches\nshare of the time")
        _say_fresh(axes[0][-1], seen, ratio)
        for ax, title in zip(axes[0], _PRODUCERS.values(), strict=True):
            ax.set_title(title, loc="left", color="#222222", pad=10)
        for ax in axes[-1]:
            ax.set_xlabel("hosts")
        figure.savefig(path, dpi=150)


def _draw_panel(
    ax: Axes,
    seen: Mapping[_Case, _Seen],
    ratio: float,
    producer: Producer,
    prefetch: int,
) -> None:
    hosts = list(_REPEATS)
    ends = {}
    for index, policy in enumerate(_DRAWN):
        found = [seen[_Case(ratio, producer, prefetch, policy, n)] for n in hosts]
        busy = [statistics.mean(f.busy) for f in found]
        if policy != "no echo":
            fresh = [statistics.mean(f.fresh) for f in found]
            ax.plot(
                hosts, fresh, color=COLOURS[index], linewidth=1.5, linestyle=(0, (3, 2))
            )
        ax.plot(
            hosts,
            busy,
            color=COLOURS[index],
            marker=MARKERS[index],
            markersize=6.5,
            markeredgecolor="white",
            linewidth=2.2,
            clip_on=False,
            zorder=5,
        )
        ends[index] = busy[-1]
    for index, height in _apart(ends, 0.095).items():
        ax.annotate(
            _DRAWN[index],
            (hosts[-1], height),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=COLOURS[index],
            annotation_clip=False,
        )
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(FixedLocator(hosts))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.minorticks_off()
    ax.set_ylim(0, 1)
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1))


def _say_fresh(ax: Axes, seen: Mapping[_Case, _Seen], ratio: float) -> None:
    """Says at one dashed line, the adaptive one of the last producer, what it is."""
    hosts = list(_REPEATS)[1]
    producer = list(_PRODUCERS)[-1]
    found = seen[_Case(ratio, producer, _PREFETCHES[0], "adaptive", hosts)]
    ax.annotate(
        "on fresh data",
        (hosts, statistics.mean(found.fresh)),
        xytext=(0, -5),
        textcoords="offset points",
        va="top",
        fontsize=9.5,
        color=COLOURS[_DRAWN.index("adaptive")],
    )


def _apart(heights: Mapping[int, float], least: float) -> dict[int, float]:
    """Moves labels up where they would touch, and all of them below the top."""
    placed: dict[int, float] = {}
    floor = 0.0
    for index in sorted(heights, key=heights.__getitem__):
        placed[index] = max(heights[index], floor)
        floor = placed[index] + least
    ceiling = 1.0
    for index in sorted(placed, key=placed.__getitem__, reverse=True):
        placed[index] = min(placed[index], ceiling)
        ceiling = placed[index] - least
    return placed


if __name__ == "__main__":
    sys.exit(main())
