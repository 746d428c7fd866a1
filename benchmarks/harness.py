"""What a benchmark returns, and how two things are timed side by side."""

import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import jax

from echo_jax.echo.instrument.measure import MAX_IN_FLIGHT, BoundedSteps
from echo_jax.training.records.environment import code_commit

_PACKAGES = ("echo-jax", "grain", "jax", "numpy", "tensorflow-cpu")


@dataclass(frozen=True)
class Result:
    """One measured figure.

    Attributes:
      id: The benchmark's name, such as ``"P5"``.
      title: What was measured.
      value: The figure: the median of the repeats.
      goal: What it should reach, as ``">= 20"`` or ``"<= 1.05"``.
      unit: Of value and repeats; ``"x"`` for a ratio.
      peer: What it was compared with, in the same run.
      repeats: The single measurements.
      note: What a reader must know beside the figure.
    """

    id: str
    title: str
    value: float
    goal: str
    unit: str
    peer: str
    repeats: list[float] = field(default_factory=list)
    note: str = ""

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        sign, bound = self.goal.split()
        holds = {">=": float.__ge__, "<=": float.__le__, "==": float.__eq__}[sign]
        return holds(float(self.value), float(bound))

    @property
    def spread(self) -> str:
        """The least and the largest of the repeats."""
        return f"{min(self.repeats):.4g} to {max(self.repeats):.4g}"

    def as_json(self) -> dict[str, Any]:
        """The record that ``--json`` writes."""
        return {
            "id": self.id,
            "title": self.title,
            "value": self.value,
            "goal": self.goal,
            "met": self.met,
            "unit": self.unit,
            "peer": self.peer,
            "repeats": self.repeats,
            "note": self.note,
            "machine": machine(),
            "versions": versions(),
            "commit": code_commit(),
        }

    @classmethod
    def of_json(cls, record: dict[str, Any]) -> "Result":
        """Reads what `as_json` returned."""
        names = [each.name for each in fields(cls)]
        return cls(**{name: record[name] for name in names})


def paired(
    ours: Callable[[], float], peer: Callable[[], float], repeats: int = 7
) -> tuple[float, list[float]]:
    """Runs two measurements in turn and compares them pair by pair.

    Args:
      ours: Returns seconds, or another cost.
      peer: Returns the peer's cost for the same work.
      repeats: How many pairs count; one more runs first and does not.

    Returns:
      The median of peer / ours (over 1: ours costs less), and all ratios.
    """
    ratios = []
    for repeat in range(repeats + 1):
        gc.collect()
        if repeat % 2:
            mine, other = ours(), peer()
        else:
            other, mine = peer(), ours()
        if repeat:
            ratios.append(other / mine)
    return statistics.median(ratios), ratios


def seconds(work: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drive(step: Callable[[], Any], count: int) -> float:
    """Seconds that each of some steps takes, of which two are in flight."""
    steps = BoundedSteps(lambda _: step(), jax.block_until_ready)
    # From the end of a first step on: until then nothing hides the host's work.
    first = MAX_IN_FLIGHT + 1
    for number in range(first):
        steps(number)

    def run() -> None:
        for number in range(first, count + 1):
            steps(number)
        steps.finish()

    return seconds(run) / count


def machine() -> dict[str, Any]:
    """The machine, without its name."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    """Architecture, maker and model: with another of them other figures hold."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    pairs = (line.partition(":")[::2] for line in lines)
    facts = {name.strip(): value.strip() for name, value in pairs}
    kind = ("cpu family", "model")
    about = ", ".join(f"{name} {facts[name]}" for name in kind if name in facts)
    name = facts.get("model name", "")
    return f"{platform.machine()} {name} ({about})" if about else platform.machine()


def versions() -> dict[str, str]:
    """Versions of the packages that figures depend on."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
