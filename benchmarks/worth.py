"""Whether anything that is seen during a training says what its repeats are worth.

``python -m benchmarks.worth --workdir runs/worth`` trains tuned arms of the published
studies again, with branches on fresh data (`config.probe_repeats`), and compares what
these and three rivals say with what the studies measured: fresh examples that a repeat
replaced until the target. It takes some minutes, and goes on where it was stopped.
"""

import argparse
import functools
import io
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from scipy import stats

from benchmarks.pages import progress_bar
from echo_jax.cli.command_end import path_argument
from echo_jax.config import RunSpec, load_config
from echo_jax.echo.instrument.rates import mean_worth
from echo_jax.searches.comparison import VariantResult, read_search
from echo_jax.searches.statistics import relative_seconds
from echo_jax.studies.figures import COLOURS, MARKERS, write_drawn
from echo_jax.studies.report import Report
from echo_jax.studies.runs import BASELINE, Run, read_run
from echo_jax.training import train
from echo_jax.variants import ready_for_trials, variant_configs
from echo_jax.workloads import build

_STUDIES = {
    "s2_8": "configs/sweeps/s2_factor.py:8",
    "s2_32": "configs/sweeps/s2_factor.py:32",
    "s2_128": "configs/sweeps/s2_factor.py:128",
    "s4_32": "configs/sweeps/s4_lag.py:32",
    "s4_8": "configs/sweeps/s4_lag.py:8",
    "s1_cifar": "configs/sweeps/s1_placement.py:cifar",
}
_STREAMS = 2
# Beyond those of the studies.
_FIRST_STREAM = 2000
_RATIOS = (2, 4, 8, 16)
_CAP = 4
# What predicts, and its words.
PREDICTORS = {
    "probed": "branches on fresh data",
    "by_noise": "B / (B + noise scale)",
    "by_gap": "loss of first uses less that of repeats",
    "by_fit": "evaluation loss less training loss",
}
# These two say how much; of the others a larger number means less worth.
_SIGNS = {"probed": 1, "by_noise": 1, "by_gap": -1, "by_fit": -1}


@dataclass(frozen=True)
class Point:
    """An arm of a study: what a repeat was worth in it, and what was predicted.

    Attributes:
      study: The folder of its results.
      arm: Its name.
      batch_size: B.
      factor: e.
      fresh: Fresh examples to the target, in the study.
      updates: Updates to the target.
      measured: Fresh examples that a repeat replaced: beside the study's baseline.
      branch_updates: Of a branch.
      num_branches: Over all streams.
      probed, by_noise, by_gap, by_fit: See `PREDICTORS`.
    """

    study: str
    arm: str
    batch_size: int
    factor: float
    fresh: float
    updates: float
    measured: float
    branch_updates: int
    num_branches: int
    probed: float
    by_noise: float
    by_gap: float
    by_fit: float

    @property
    def fresh_part(self) -> float:
        """Of its examples: above 1 / e in a short run, whose buffer is still full."""
        return self.fresh / (self.updates * self.batch_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains, compares and writes; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worth")
    parser.description = __doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = functools.partial(parser.add_argument, type=path_argument)
    add("--workdir", required=True, help="receives the runs; resumes")
    add("--results", default="results", help="holds the studies")
    add("--out", help="receives table.md, worth.png and worth.json")
    parser.add_argument("--studies", nargs="+", default=[*_STUDIES], metavar="NAME")
    args = parser.parse_args(argv)
    points = [*_points(args.studies, args.results, args.workdir)]
    out = args.out or args.workdir
    write_worth(points, out)
    print((out / "table.md").read_text())
    return 0


def _points(names: Sequence[str], results: Path, workdir: Path) -> Iterator[Point]:
    for name in names:
        search = read_search(results / name)
        configs = ready_for_trials(variant_configs(load_config(_STUDIES[name])))
        arms = {arm.name: arm for arm in search.variants}
        noise = _noise_scale(configs[BASELINE], arms[BASELINE], workdir / name)
        with progress_bar() as bar:
            for arm in bar.track([*arms.values()], description=name):
                if arm.name != BASELINE:
                    folder = workdir / name / arm.name
                    runs = [
                        _trained(configs[arm.name], arm, k, folder)
                        for k in range(_STREAMS)
                    ]
                    yield _point(name, arm, arms[BASELINE], runs, noise)


@dataclass(frozen=True)
class _Trained:
    """A run, with its logged rows of the second half."""

    run: Run
    rows: Sequence[Mapping[str, Any]]


def _trained(
    config: RunSpec, arm: VariantResult, stream: int, folder: Path, **fields: Any
) -> _Trained:
    """Trains an arm at a point that a search of it found, with branches."""
    best = [each.best for each in arm.searches if each.best]
    seed, every = _FIRST_STREAM + stream, _branch_updates(arm)
    known = {"seed": seed, "echo.seed": seed, "eval_every": every, "log_every": every}
    known |= {"probe_repeats": 2 * every, **best[stream % len(best)].point}
    given = {name.replace("__", "."): value for name, value in fields.items()}
    config = config.changed(known | given)
    folder = folder / f"stream_{stream}"
    train(config, build(config), folder, console=Console(file=io.StringIO()))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    return _Trained(read_run(folder), rows[len(rows) // 2 :])


def _branch_updates(arm: VariantResult) -> int:
    """A tenth of the training: there are some branches, and each is long enough."""
    return max(10, round((arm.mean("updates_to_target") or 100) / 10))


def _noise_scale(config: RunSpec, arm: VariantResult, folder: Path) -> float:
    """The gradient noise scale of the baseline, in examples."""
    found = _trained(
        config, arm, 0, folder / "noise", batch__accumulation_steps=2, probe_repeats=0
    )
    scales = [row["noise_scale"] for row in found.rows if "noise_scale" in row]
    return statistics.median(scales)


def _point(
    study: str,
    arm: VariantResult,
    baseline: VariantResult,
    runs: Sequence[_Trained],
    noise_scale: float,
) -> Point:
    config = runs[0].run.config
    size, echo = config["batch_size"], config["echo"]
    costs = [
        (each.mean("fresh_to_target") or math.nan, each.mean("updates_to_target") or 0)
        for each in (arm, baseline)
    ]
    (fresh, updates), (base_fresh, _) = costs
    branches = [branch for each in runs for branch in each.run.branches]
    return Point(
        study=study,
        arm=arm.name,
        batch_size=size,
        factor=echo["factor"],
        fresh=fresh,
        updates=updates,
        measured=(base_fresh - fresh) / (updates * size - fresh),
        branch_updates=config["eval_every"],
        num_branches=len(branches),
        probed=mean_worth(branches),
        by_noise=size / (size + noise_scale),
        by_gap=statistics.mean(map(_gap, runs)),
        by_fit=statistics.mean(map(_fit, runs)),
    )


def _gap(found: _Trained) -> float:
    """Loss of first uses less that of repeats."""
    gaps = []
    for row in found.rows:
        repeats = [
            value
            for name, value in row.items()
            if name.startswith("loss_repeat_") and name != "loss_repeat_0"
        ]
        if repeats and "loss_repeat_0" in row:
            gaps.append(row["loss_repeat_0"] - statistics.mean(repeats))
    return statistics.mean(gaps)


def _fit(found: _Trained) -> float:
    """Evaluation loss less training loss, over the same updates."""
    evals = {row["updates"]: row["eval_loss"] for row in found.run.evals}
    gaps = [
        evals[row["updates"]] - row["loss"]
        for row in found.rows
        if row["updates"] in evals
    ]
    return statistics.mean(gaps)


def regrets(points: Sequence[Point]) -> dict[str, list[float]]:
    """How much longer a training takes than with the best factor, for every R and B.

    The factor is chosen among those of a study by what a predictor says a repeat is
    worth, or by a rule that asks nothing: the smallest one that feeds the accelerator,
    and a cap on it.
    """
    regrets: dict[str, list[float]] = {}
    several = [p for p in points if p.study.startswith("s2")]
    for _, group in itertools.groupby(several, key=lambda p: p.study):
        arms = [*group]
        base = arms[0]
        # A factor of 1, whose cost follows from what a repeat was worth.
        base_updates = (
            base.fresh + base.measured * (base.updates * base.batch_size - base.fresh)
        ) / base.batch_size
        for ratio in _RATIOS:
            taken = {1.0: base_updates * max(ratio, 1)}
            for arm in arms:
                taken[arm.factor] = relative_seconds(
                    arm.fresh, arm.updates, batch_size=arm.batch_size, ratio=ratio
                )
            fed = [a.factor for a in arms if ratio * a.fresh_part <= 1]
            enough = min(fed, default=max(taken))
            chosen = {
                f"cap {_CAP}": min(enough, _CAP),
                "no cap": enough,
                **{
                    name: _chosen(arms, ratio, [getattr(arm, name) for arm in arms])
                    for name in ("probed", "by_noise")
                },
            }
            for name, factor in chosen.items():
                regret = taken[factor] / min(taken.values()) - 1
                regrets.setdefault(name, []).append(regret)
    return regrets


def _chosen(arms: Sequence[Point], ratio: float, worths: Sequence[float]) -> float:
    """Returns the factor that is the fastest, if repeats are worth so much."""
    gains = {1.0: 1 / ratio}
    for arm, worth in zip(arms, worths, strict=True):
        part = arm.fresh_part
        per_update = part + worth * (1 - part)
        gains[arm.factor] = per_update / max(ratio * part, 1)
    return max(gains, key=gains.__getitem__)


def read_points(folder: Path) -> list[Point]:
    """Returns the points that `write_worth` has written into a folder."""
    content = (folder / "worth.json").read_text(encoding="utf-8")
    return [Point(**each) for each in json.loads(content)]


def rank(points: Sequence[Point], predictor: str) -> float:
    """Returns the rank correlation of what was predicted with what was measured."""
    measured = [point.measured for point in points]
    given = [_SIGNS[predictor] * getattr(point, predictor) for point in points]
    differ = min(len({*given}), len({*measured})) > 1
    return float(stats.spearmanr(given, measured)[0]) if differ else math.nan


def error(points: Sequence[Point], predictor: str) -> float:
    """Returns the root mean square error of what was predicted."""
    errors = [getattr(point, predictor) - point.measured for point in points]
    return math.sqrt(statistics.fmean(each**2 for each in errors))


def write_worth(points: Sequence[Point], folder: Path) -> None:
    """Writes the points and what follows from them: JSON, table and figure."""
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps([asdict(point) for point in points], indent=1)
    (folder / "worth.json").write_text(content + "\n")
    notes = []
    for name, words in PREDICTORS.items():
        said = f"{rank(points, name):.2f}"
        note = f"{words}: rank correlation with the measured worth {said}"
        if name in ("probed", "by_noise"):
            note += f", root mean square error {error(points, name):.2f}"
        notes.append(f"{note} (n = {len(points)} variants).")
    notes += [
        f"Factor chosen by {PREDICTORS.get(name, name)}: {np.mean(found):.1%} slower "
        f"than with the best one of the study, at most {max(found):.1%} "
        f"(n = {len(found)}: R of {', '.join(map(str, _RATIOS))} at each batch size)."
        for name, found in regrets(points).items()
    ]
    headings = (
        "study",
        "variant",
        "e",
        "worth, measured",
        "branches",
        "updates of each",
    )
    rows = [
        (
            point.study,
            point.arm,
            f"{point.factor:g}",
            f"{point.measured:.2f}",
            f"{point.num_branches}",
            f"{point.branch_updates}",
            *(f"{getattr(point, name):.2f}" for name in PREDICTORS),
        )
        for point in points
    ]
    title = "What a repeat is worth: predicted and measured"
    headings = (*headings, *PREDICTORS.values())
    report = Report(title=title, headings=headings, rows=rows, notes=notes)
    (folder / "table.md").write_text(report.markdown())
    write_drawn(lambda: _draw(points), folder / "worth")


def _draw(points: Sequence[Point]) -> Figure:
    figure = Figure(figsize=(11, 4), facecolor="white", layout="constrained")
    figure.suptitle(
        "What a repeat is worth: predicted and measured\n"
        "variants of S1 (ResNet-8 on CIFAR-10), S2 and S4 (byte-level LM), tuned",
        fontsize=9,
    )
    studies = list(dict.fromkeys(point.study for point in points))
    axes = figure.subplots(1, 3, sharey=True)
    for ax, name in zip(axes, ("probed", "by_noise", "by_gap"), strict=True):
        for number, study in enumerate(studies):
            own = [point for point in points if point.study == study]
            ax.plot(
                [getattr(point, name) for point in own],
                [point.measured for point in own],
                MARKERS[number],
                color=COLOURS[number],
                label=study,
            )
        if name != "by_gap":
            ax.axline((0, 0), slope=1, color="#777777", lw=1)
        ax.set_xlabel(PREDICTORS[name])
    axes[0].set_ylabel("worth, measured")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


if __name__ == "__main__":
    sys.exit(main())
