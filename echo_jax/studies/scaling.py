"""Computes how throughput grows with the devices: T = S N efficiency.

T is the throughput of a run in examples per second and N its number of devices. S is
the throughput of one device in the runs with the fewest devices. So the efficiency is
the fraction of a device's throughput that remains when it works with others. Runs that
train the same thing make a group; runs of different groups are not compared.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etils import epath
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, StrMethodFormatter

from echo_jax.files.folders import run_folder, write
from echo_jax.files.lock import REPORT_LOCK_NAME, FolderLock
from echo_jax.studies.figures import COLOURS, MARKERS, write_drawn
from echo_jax.studies.report import Report
from echo_jax.studies.runs import Run, Study, StudyError, read_run
from echo_jax.studies.table import percent, variant_rows

_HEADINGS = ("run", "processes", "devices", "batch per device", "steps/s", "examples/s")
_HEADINGS += ("efficiency", "idle")


@dataclass(frozen=True)
class Point:
    """The measurements of a run on its devices."""

    name: str
    processes: int
    devices: int  # N, the devices that trained.
    batch: float  # Examples per update, over all devices.
    steps_per_s: float  # Updates per second of training, waiting for input included.
    idle_fraction: float | None  # The fraction of that time in which no step could run.

    @property
    def examples_per_s(self) -> float:
        """T, the throughput."""
        return self.steps_per_s * self.batch


@dataclass(frozen=True)
class Scaling:
    """Runs that train the same thing on different numbers of devices."""

    name: str  # Setting, echo, kind of device, and caveats about the input.
    points: Sequence[Point]  # In the order of their devices.
    on_cpu: bool = False  # Whether the devices are parts of a CPU.

    @property
    def base(self) -> Sequence[Point]:
        """The runs with the fewest devices."""
        fewest = self.points[0].devices
        return [point for point in self.points if point.devices == fewest]

    @property
    def examples_per_s_of_one(self) -> float:
        """S, examples per second of one device; the mean over the base."""
        each = [point.examples_per_s / point.devices for point in self.base]
        return sum(each) / len(each)

    @property
    def kind(self) -> str:
        """Weak or strong scaling, in words."""
        per_device = {point.batch / point.devices for point in self.points}
        if len({point.devices for point in self.points}) == 1:
            return "one number of devices"
        if len(per_device) == 1:
            return "weak scaling"
        if len({point.batch for point in self.points}) == 1:
            return "strong scaling"
        return "neither weak nor strong scaling: the batch varies with and without N"

    @property
    def heading(self) -> str:
        fewest = self.points[0].devices
        devices = "1 device" if fewest == 1 else f"{fewest} devices"
        one = _rate(self.examples_per_s_of_one)
        return f"{self.name}: {self.kind}, S = {one} examples/s on {devices}"

    def efficiency(self, point: Point) -> float:
        """Returns T / (S N)."""
        return point.examples_per_s / (self.examples_per_s_of_one * point.devices)


def read_scaling(folders: Iterable[str | os.PathLike[str]]) -> list[Scaling]:
    """Reads finished runs and groups those that train the same thing."""
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if run.diverged is not None:
            raise StudyError(
                f"{run.name} diverged at update {run.diverged}, and has no time; "
                "leave it out"
            )
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(_what_is_trained(run), []).append(run)
    found = [_scaling(group) for group in groups.values()]
    if all(len({p.devices for p in group.points}) == 1 for group in found):
        devices = ", ".join(f"{run.name}: {_num_devices(run)}" for run in runs)
        raise StudyError(
            "no two of the runs train the same thing on different numbers of devices "
            f"({devices}); name runs of one config that differ in --config.mesh.data"
        )
    names = [group.name for group in found]
    return [
        replace(group, name=f"{group.name} ({index})")
        if names.count(group.name) > 1
        else group
        for index, group in enumerate(found, start=1)
    ]


def scaling_reports(groups: Sequence[Scaling]) -> list[Report]:
    """Returns a report for each group; the last one has the notes of all."""
    return [
        Report(
            title=group.heading,
            headings=_HEADINGS,
            rows=[_cells(group, point) for point in group.points],
            notes=_notes(groups) if group is groups[-1] else (),
            num_texts=1,
        )
        for group in groups
    ]


def _cells(scaling: Scaling, point: Point) -> tuple[str, ...]:
    return (
        point.name,
        f"{point.processes}",
        f"{point.devices}",
        f"{point.batch / point.devices:g}",
        _rate(point.steps_per_s),
        _rate(point.examples_per_s),
        f"{scaling.efficiency(point):.2f}",
        percent(point.idle_fraction),
    )


def _notes(groups: Sequence[Scaling]) -> list[str]:
    lines = [
        "T = S N efficiency: T is examples/s, S that of one device of the run with the "
        "fewest devices, N the number of devices.",
        "Seconds: training and waiting for input, without evaluation, saving and "
        "compiling. Idle: the fraction in which no step could run.",
    ]
    if any(group.on_cpu for group in groups):
        lines.append(
            "CPU devices are parts of one machine's cores: their efficiency says "
            "whether a program scales, not how accelerators scale."
        )
    return lines


def write_scaling(
    groups: Sequence[Scaling], folder: str | os.PathLike[str]
) -> tuple[epath.Path, epath.Path]:
    """Writes ``scaling.md`` and the figure; returns the paths of table and PNG."""
    folder = run_folder(folder)
    tables = folder / "scaling.md"
    with FolderLock(folder, name=REPORT_LOCK_NAME):
        write(tables, "\n".join(each.markdown() for each in scaling_reports(groups)))
        png, _ = write_drawn(lambda: _draw(groups), folder / "scaling")
    return tables, png


def _scaling(runs: Sequence[Run]) -> Scaling:
    """Makes a group of runs that train the same thing."""
    points = sorted(map(_point, runs), key=lambda p: (p.devices, p.processes))
    study = Study("", runs, {})
    # The table of a study puts a run's echo into words.
    echo = variant_rows(study)[0].echo
    environment = runs[0].environment
    kinds = ", ".join(sorted(set(environment["devices"])))
    words = [runs[0].summary["workload"], f"echo: {echo}", f"on {kinds}"]
    return Scaling(
        name=", ".join([*words, *study.caveats]),
        points=points,
        on_cpu=environment["backend"] == "cpu",
    )


def _point(run: Run) -> Point:
    summary = run.summary
    return Point(
        name=run.name,
        processes=run.environment.get("processes", 1),
        devices=_num_devices(run),
        batch=(summary["fresh"] + summary["repeats"]) / summary["updates"],
        steps_per_s=summary["updates"] / summary["wall_s"],
        idle_fraction=summary["idle_fraction"],
    )


def _num_devices(run: Run) -> int:
    """Returns the number of devices of the mesh, which may leave some out."""
    visible = len(run.environment["devices"])
    mesh = run.config.get("mesh", {"data": -1, "fsdp": 1})
    data = mesh["data"] if mesh["data"] != -1 else visible // mesh["fsdp"]
    return data * mesh["fsdp"]


def _what_is_trained(run: Run) -> str:
    """Returns the key that runs of a group share, without batch and mesh."""
    echo = {"min_uses": 1, **run.summary["echo"]}
    asked = ("factor", "mode", "buffer_on", "stage", "max_uses", "min_uses")
    shared = {
        "workload": run.summary["workload"],
        "model": run.config.get("model"),
        "source": run.config.get("data", {}).get("source"),
        "echo": [*map(echo.get, asked)],
        "storage": run.summary["storage"],
        "devices": sorted(set(run.environment["devices"])),
    }
    return json.dumps(shared, sort_keys=True)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 1000 else f"{per_s:.3g}"


def _draw(groups: Sequence[Scaling]) -> Figure:
    figure = Figure(figsize=(10.5, 4.8), facecolor="white", layout="constrained")
    figure.suptitle("Throughput by devices", x=0.01, ha="left", size=14, weight="bold")
    left, right = figure.subplots(1, 2)
    ideal: dict[str, Any] = {"color": "#777777", "lw": 1.1, "dashes": (4, 3)}
    for index, group in enumerate(groups):
        devices = [point.devices for point in group.points]
        style: dict[str, Any] = {
            **{"color": COLOURS[index % len(COLOURS)], "linewidth": 1.8, "zorder": 5},
            **{"marker": MARKERS[index % len(MARKERS)], "markersize": 7},
            **{"markeredgecolor": "white", "clip_on": False},
        }
        left.plot(devices, [group.examples_per_s_of_one * n for n in devices], **ideal)
        rates = [point.examples_per_s for point in group.points]
        left.plot(devices, rates, label=group.heading, **style)
        right.plot(devices, [*map(group.efficiency, group.points)], **style)
    right.axhline(1, label="ideal: T = S N", **ideal)
    right.set_ylim(0, max(1.1, right.get_ylim()[1]))
    left.set_yscale("log", base=2)
    left.yaxis.set_major_locator(LogLocator(2))
    left.yaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}"))
    left.set_ylabel("T: examples per second")
    right.set_ylabel("efficiency: T / (S N)")
    counts = sorted({point.devices for group in groups for point in group.points})
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(FixedLocator(counts))
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        ax.minorticks_off()
        ax.set_xlabel("N: devices")
    figure.legend(loc="outside lower left", frameon=False)
    return figure
