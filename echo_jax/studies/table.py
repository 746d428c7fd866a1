"""The table of a study: the cost at which each arm reached the target.

There are three costs: fresh examples, updates, and seconds of training. Echoing uses
more updates to save fresh examples. It saves seconds only where the accelerator waited.
"""

import html
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from echo_jax.echo.instrument.rates import mean_worth
from echo_jax.files.folders import run_file, write
from echo_jax.studies.runs import Run, Study

# These columns are only in the Markdown table and the report.
_NOT_IN_TERMINAL = ("echo", "idle")
# Names up to this length stay whole; the columns beside them are folded.
_WHOLE_NAME = 20
# On an otherwise idle machine, step times differ by a few percent.
_EVEN_STEPS = 1.25


@dataclass(frozen=True)
class ArmRow:
    """One line of the table."""

    name: str
    echo: str  # Factor, placement and order in words.
    reached: bool  # Whether the target was met. If not, the costs are lower bounds.
    diverged: int | None  # The update at which it diverged, or None.
    fresh: int
    updates: int
    seconds: float  # Training time, without evaluation, saving and compiling.
    # Costs over the baseline's; None unless both met the target.
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
    repeat_worth: float | None


def headings(study: Study) -> tuple[str, ...]:
    """Returns the names of the columns; the first two columns are words."""
    metric = study.runs[0].metric
    costs = ("fresh examples", "updates", "seconds")
    values = (f"final {metric}", f"best {metric}")
    return ("arm", "echo", *costs, *values, "idle", "R", "repeat's worth")


def arm_rows(study: Study) -> list[ArmRow]:
    """Returns one row for each run, in the study's order."""
    return [_arm_row(run, study.baseline) for run in study.runs]


def cells(row: ArmRow) -> tuple[str, ...]:
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
        optional(row.repeat_worth, "{:.2f}"),
    )


def notes(study: Study) -> list[str]:
    """Returns sentences on the meaning and the limits of the numbers."""
    first = study.runs[0]
    lines = []
    if first.target is None:
        lines.append("The runs had no target: the costs are those of the whole run.")
    else:
        comparison = "at least" if first.summary["mode"] == "max" else "at most"
        every = sorted({run.evaluated_every or 0 for run in study.runs} - {0})
        looked = f", looked at every {' or '.join(map(str, every))} updates"
        lines.append(
            f"Target: eval {first.metric} {comparison} {first.target:g}"
            f"{looked if every else ''}."
        )
    if study.baseline is None:
        lines.append("No run is named 'baseline', so nothing is relative to it.")
    else:
        lines.append("x: relative to the baseline; below 1 is cheaper.")
    lines += [
        "Seconds: training and waiting for input, without evaluation, saving and "
        "compiling.",
        "Idle: the part of the seconds in which no step could run.",
        "R: seconds per fresh batch over seconds per step, measured in each run.",
        "Repeat's worth: fresh examples that one repeat replaced on average "
        "(1: as good as fresh, 0: worth nothing).",
    ]
    for run in study.runs:
        if run.diverged is not None:
            lines.append(
                f"{run.name} diverged: its loss, or what it had learnt, was not finite "
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
            "run: if it is the same step, something else used the machine, and the "
            "seconds do not compare."
        )
    if study.sends_unevenly:
        sent = (f"{run.name} {decimal(int(run.bytes_sent))}" for run in study.runs)
        lines.append(f"Sent by each device in the whole run: {', '.join(sent)}.")
    if any(run.environment.get("cpu_count") == 1 for run in study.runs):
        lines.append(
            "One CPU core: the input pipeline takes its time from the steps, so an "
            "echo saves the pipeline's work, and no waiting."
        )
    if "simulated storage" in study.caveats:
        lines.append(f"Simulated storage: {_storage_in_words(study)}.")
    if "synthetic data" in study.caveats:
        lines.append("Synthetic data: the examples were made by a program.")
    # Of runs whose files have been damaged.
    for run in study.runs:
        if run.is_cut:
            lines.append(
                f"{run.name}: the last line of metrics.jsonl is half written, and left "
                "out."
            )
        if updates := run.summary.get("restored"):
            lines.append(
                f"{run.name} went on from an older checkpoint where that of update "
                f"{', '.join(map(str, updates))} was damaged."
            )
        if lost := run.summary.get("rows_lost"):
            lines.append(f"{run.name} lost {lost} rows of metrics.jsonl to damage.")
    return lines


def terminal_table(study: Study) -> Table:
    """Returns the table for a terminal, 80 columns wide; some columns are left out."""
    names = headings(study)
    shown = [index for index, name in enumerate(names) if name not in _NOT_IN_TERMINAL]
    table = in_terminal(
        ", ".join([study.name, *study.caveats]),
        [names[index].replace(" ", "\n") for index in shown],
        [[cells(row)[index] for index in shown] for row in arm_rows(study)],
        [note for note in notes(study) if not note.startswith("Idle:")],
    )
    longest = max(len(run.name) for run in study.runs)
    table.columns[0].no_wrap = longest <= _WHOLE_NAME
    return table


# Text, not str: square brackets in a name are not markup.
def in_terminal(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str],
    *,
    words: int = 1,
) -> Table:
    """Returns a table with its notes; the first `words` columns are aligned left.

    Text in brackets, such as a ratio to the baseline, is below its cell.
    """
    table = Table(
        title=Text(f"{title}\n", style="bold"),
        caption=Text("\n".join(["", *notes])),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for index, name in enumerate(headings):
        justify = "left" if index < words else "right"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for row in rows:
        folded = [cell.replace(" (", "\n(") for cell in row[words:]]
        table.add_row(*map(Text, [*row[:words], *folded]))
    return table


def write_markdown(study: Study, path: str | os.PathLike[str]) -> None:
    title = ", ".join([study.name, *study.caveats])
    rows = map(cells, arm_rows(study))
    write_table(path, title, headings(study), rows, notes(study))


def write_table(
    path: str | os.PathLike[str],
    title: str,
    headings: Sequence[str],
    rows: Iterable[Iterable[str]],
    notes: Iterable[str],
) -> None:
    """Writes a table as Markdown; the first two columns are aligned to the left."""
    lines = markdown_table(title, headings, rows, notes)
    write(run_file(path), "\n".join(lines) + "\n")


def markdown_table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Iterable[str]],
    notes: Iterable[str],
    *,
    words: int = 2,
) -> list[str]:
    """Returns a table's lines and notes; the first `words` columns are aligned left."""
    ends = ["---"] * words + ["---:"] * (len(headings) - words)
    cells = [headings, ends, *(map(_markdown_text, row) for row in rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    said = [f"- {_markdown_text(note)}" for note in notes]
    return [f"**{_markdown_text(title)}**", "", *lines, "", *said]


def _arm_row(run: Run, baseline: Run | None) -> ArmRow:
    summary, costs = run.summary, _costs(run)
    relative = repeat_worth = None
    if run.reached and baseline is not None and baseline.reached:
        base = _costs(baseline)
        relative = (costs[0] / base[0], costs[1] / base[1], costs[2] / base[2])
        if repeats := run.at_target["repeats"]:
            repeat_worth = (base[0] - costs[0]) / repeats
    return ArmRow(
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
        repeat_worth=repeat_worth,
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


def _markdown_text(text: str) -> str:
    """Escapes text for a Markdown cell: HTML, cell borders and line breaks."""
    return " ".join(html.escape(text, quote=False).replace("|", "&#124;").split())
