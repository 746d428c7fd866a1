"""The table of a study: the cost at which each variant reached the target.

There are three costs: fresh examples, updates, and seconds of training. Echoing uses
more updates to save fresh examples. It saves seconds only where the accelerator waited.
"""

import functools
import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from etils import epath
from rich.filesize import decimal

from echo_jax.echo.instrument.rates import mean_worth
from echo_jax.studies.figures import draw_study
from echo_jax.studies.page import plain_json
from echo_jax.studies.report import Report
from echo_jax.studies.runs import Run, Study

# These columns are only in the Markdown table and the page.
_NOT_IN_TERMINAL = ("echo", "idle")
# The file names of `echo-jax report examples` and `echo-jax evaluate --report`.
_PAGES = {"examples.html": "first examples", "evaluation.html": "evaluation"}
_COMMANDS = (
    "<code>echo-jax report examples RUN</code> draws the first examples of a run with "
    "each of their uses, and <code>echo-jax evaluate RUN --report RUN</code> the "
    "predictions of its model; the next report links these pages."
)
# On an otherwise idle machine, step times differ by a few percent.
_EVEN_STEPS = 1.25


@dataclass(frozen=True)
class VariantRow:
    """One line of the table."""

    name: str
    echo: str  # Factor, placement and order in words.
    reached: bool  # Whether the target was reached. If not, the costs are bounds.
    diverged: int | None  # The update at which it diverged, or None.
    fresh: int
    updates: int
    seconds: float  # Training time, without evaluation, saving and compiling.
    # Costs over the baseline's; None unless both reached the target.
    relative: tuple[float, float, float] | None
    final: float | None
    best: float
    # The fraction of the run in which the accelerator waited, which does not see
    # contention. It is negative if steps ran faster than the step that was timed.
    idle_fraction: float | None
    # R, time per fresh batch over time per step, measured in the run.
    ratio: float | None
    # Fresh examples that one repeat replaced on average until the target, ``(baseline's
    # fresh - fresh) / repeats``; 1 is as good as fresh.
    repeat_value: float | None


def study_report(study: Study) -> Report:
    """Returns the report of a study, with links to the pages of its runs.

    Example:
      >>> files = study_report(read_study("runs/quickstart")).write("runs/quickstart")
      >>> [file.name for file in files]
      ['figure.png', 'report.html']
    """
    metric = study.runs[0].metric
    costs = ("fresh examples", "updates", "seconds")
    values = (f"final {metric}", f"best {metric}")
    headings = ("variant", "echo", *costs, *values, "idle", "R", "repeat's value")
    return Report(
        title=study.name,
        caveats=study.caveats,
        headings=headings,
        rows=[*map(_cells, variant_rows(study))],
        notes=_notes(study),
        in_terminal=[name for name in headings if name not in _NOT_IN_TERMINAL],
        figures={"figure": functools.partial(draw_study, study)},
        details=functools.partial(_details, study),
    )


def variant_rows(study: Study) -> list[VariantRow]:
    """Returns one row for each run, in the study's order."""
    return [_variant_row(run, study.baseline) for run in study.runs]


def _cells(row: VariantRow) -> tuple[str, ...]:
    """Returns a row's cells, such as ``"3,355 (0.33x)"`` for a cost."""
    costs = (f"{row.fresh:,}", f"{row.updates:,}", f"{row.seconds:.1f}")
    if row.diverged is not None:
        costs = ("—", f"diverged at update {row.diverged:,}", "—")
    elif not row.reached:
        costs = tuple(f"not in {cost}" for cost in costs)
    elif row.relative is not None:
        costs = tuple(
            f"{cost} ({ratio:.2f}x)"
            for cost, ratio in zip(costs, row.relative, strict=True)
        )
    return (
        row.name,
        row.echo,
        *costs,
        _metric(row.final),
        _metric(row.best),
        percent(row.idle_fraction),
        optional(row.ratio, "{:.2f}"),
        optional(row.repeat_value, "{:.2f}"),
    )


def _notes(study: Study) -> list[str]:
    """Returns sentences on the meaning and the limits of the numbers."""
    first = study.runs[0]
    lines = []
    if first.target is None:
        lines.append("The runs had no target: the costs are those of the whole run.")
    else:
        comparison = "at least" if first.summary["mode"] == "max" else "at most"
        every = sorted({run.evaluated_every or 0 for run in study.runs} - {0})
        evaluated = f", evaluated every {' or '.join(map(str, every))} updates"
        lines.append(
            f"Target: eval {first.metric} {comparison} {first.target:g}"
            f"{evaluated if every else ''}."
        )
    if study.baseline is None:
        lines.append("No run is named 'baseline', so nothing is relative to it.")
    else:
        lines.append("x: times the baseline's cost; below 1 is cheaper.")
    lines += [
        "Seconds: training and waiting for input, without evaluation, saving and "
        "compiling.",
        "Idle: the fraction of the seconds in which no step could run.",
        "R: seconds per fresh batch over seconds per step, measured in each run.",
        "Repeat's value: fresh examples that one repeat replaced on average "
        "(1: as good as fresh, 0: no use).",
    ]
    for run in study.runs:
        if run.diverged is not None:
            lines.append(
                f"{run.name} diverged: its loss or its parameters were not finite "
                f"from update {run.diverged:,} on."
            )
        elif run.target is not None and not run.reached:
            lines.append(
                f"{run.name} did not reach the target; its best was {run.best:.4g}."
            )
    for run in study.runs:
        if branches := run.branches:
            lines.append(
                f"{run.name}: a repeat was worth {mean_worth(branches):.2f} fresh "
                f"examples, by {len(branches)} branches on fresh data alone."
            )
    timed = [run for run in study.runs if run.diverged is None]
    steps = [run.summary["t_down_s"] * 1e3 for run in timed]
    if timed and max(steps) > _EVEN_STEPS * min(steps):
        lines.append(
            f"A step took {min(steps):.3g} to {max(steps):.3g} ms, depending on the "
            "run. If it is the same step, something else used the machine, and the "
            "seconds cannot be compared."
        )
    if study.sends_unevenly:
        sent = (f"{run.name} {decimal(int(run.bytes_sent))}" for run in study.runs)
        lines.append(f"Sent by each device in the whole run: {', '.join(sent)}.")
    if any(run.environment.get("cpu_count") == 1 for run in study.runs):
        lines.append(
            "One CPU core: the input pipeline takes its time from the steps, so an "
            "echo saves the pipeline's work, but does not save waiting."
        )
    if "simulated storage" in study.caveats:
        lines.append(f"Simulated storage: {_storage_in_words(study)}.")
    if "synthetic data" in study.caveats:
        lines.append("Synthetic data: the examples were made by a program.")
    # Of runs whose files have been damaged.
    for run in study.runs:
        if run.is_cut:
            lines.append(
                f"{run.name}: the last line of metrics.jsonl is half written, and is "
                "left out."
            )
        if updates := run.summary.get("restored"):
            lines.append(
                f"{run.name} resumed from an older checkpoint, since the checkpoint of "
                f"update {', '.join(map(str, updates))} was damaged."
            )
        if lost := run.summary.get("rows_lost"):
            lines.append(f"{run.name} lost {lost} rows of metrics.jsonl to damage.")
    return lines


def _variant_row(run: Run, baseline: Run | None) -> VariantRow:
    summary, costs = run.summary, _costs(run)
    relative = repeat_value = None
    if run.reached and baseline is not None and baseline.reached:
        base = _costs(baseline)
        relative = (costs[0] / base[0], costs[1] / base[1], costs[2] / base[2])
        if repeats := run.at_target["repeats"]:
            repeat_value = (base[0] - costs[0]) / repeats
    return VariantRow(
        name=run.name,
        echo=_echo_in_words(run),
        reached=run.diverged is None and (run.reached or run.target is None),
        diverged=run.diverged,
        fresh=costs[0],
        updates=costs[1],
        seconds=costs[2],
        relative=relative,
        final=None if run.diverged is not None else run.values[-1],
        best=run.best,
        idle_fraction=summary["idle_fraction"],
        ratio=summary["R"],
        repeat_value=repeat_value,
    )


def _costs(run: Run) -> tuple[int, int, float]:
    """Returns fresh examples, updates and seconds to the target or of the run."""
    summary = run.summary
    end = "_to_target" if run.reached else ""
    seconds = summary[f"seconds{end}" if run.reached else "wall_s"]
    return summary[f"fresh{end}"], summary[f"updates{end}"], seconds


def _echo_in_words(run: Run) -> str:
    # Runs of versions without modes do not have these fields.
    echo = {"mode": "fixed", "buffer_on": "host", **run.summary["echo"]}
    if echo["mode"] == "fixed" and echo["factor"] == 1:
        return "none"
    if echo["mode"] == "adaptive":
        least = f"{echo['min_uses']} " if echo.get("min_uses", 1) > 1 else "up "
        words = f"adaptive {least}to {echo['max_uses']}x after {echo['stage']}"
    elif echo["mode"] == "stochastic":
        words = f"stochastic after {echo['stage']}"
    else:
        words = f"{echo['factor']:g}x after {echo['stage']}, {echo['order']}"
    if echo["buffer_on"] == "device":
        words += ", on the device"
    return words if echo["buffer"] == 1 else f"{words}, buffer {echo['buffer']:,}"


def _storage_in_words(study: Study) -> str:
    storage = study.runs[0].summary["storage"]
    words = f"{storage['latency_s'] * 1e3:.3g} ms a read ({storage['distribution']})"
    if storage["bytes_per_s"]:
        words += f", {storage['bytes_per_s'] / 1e6:.3g} MB/s"
    return words


def optional(value: float | None, pattern: str) -> str:
    """Returns a cell with a value, or with a dash for None."""
    return "—" if value is None else pattern.format(value)


def percent(fraction: float | None) -> str:
    """Returns the cell of an idle fraction; a slightly negative one is 0."""
    return "—" if fraction is None else f"{max(fraction, 0.0):.0%}"


def _metric(value: float | None) -> str:
    return "—" if value is None or math.isnan(value) else f"{value:#.4g}"


def _details(study: Study, folder: epath.Path) -> list[str]:
    """Returns what the page has below the table."""
    measured: list[str] = []
    if study.calibration:
        title = "<h2>Measured before the variants ran</h2>"
        measured = [title, plain_json(study.calibration)]
    configs = [
        f"<details><summary>{html.escape(run.name)}</summary>{plain_json(run.config)}"
        "</details>"
        for run in study.runs
        if run.config
    ]
    return [
        *_picture_links(folder, [run.name for run in study.runs]),
        "<h2>What it ran on</h2>",
        plain_json(study.runs[0].environment),
        *measured,
        *["<h2>Configs</h2>"] * bool(configs),
        *configs,
    ]


def _picture_links(folder: epath.Path, names: Sequence[str]) -> list[str]:
    """Returns the HTML that links to the pages of examples and predictions."""
    lines = []
    for name in names:
        # The report of a single run may be in the folder of this run.
        place = name if len(names) > 1 or (folder / name).is_dir() else "."
        found = [
            f'<a href="{quote(f"{place}/{page}")}">{words}</a>'
            for page, words in _PAGES.items()
            if (folder / place / page).is_file()
        ]
        if found:
            lines.append(f"<li>{html.escape(name)}: {', '.join(found)}</li>")
    links = [f"<ul>{''.join(lines)}</ul>"] * bool(lines)
    return ["<h2>Examples and predictions</h2>", *links, f"<p>{_COMMANDS}</p>"]
