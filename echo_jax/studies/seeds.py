"""Studies that differ only in the seed, as one: each variant over its seeds."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from echo_jax.studies.fields import flat_fields
from echo_jax.studies.figures import draw_study
from echo_jax.studies.page import plain_json
from echo_jax.studies.report import Report
from echo_jax.studies.runs import Run, Study, StudyError, read_study
from echo_jax.studies.table import VariantRow, variant_rows

_RATIOS_OF = ("fresh", "updates", "seconds")


@dataclass(frozen=True)
class Seeds:
    """Studies of one config with several seeds and the same variants."""

    studies: Sequence[Study]
    seeds: Sequence[int]

    @property
    def variants(self) -> list[list[Run]]:
        """The runs of each variant, in the order of the seeds."""
        each = (study.runs for study in self.studies)
        return [list(runs) for runs in zip(*each, strict=True)]

    @property
    def rows(self) -> list[list[VariantRow]]:
        """The rows of each variant, in the order of the seeds."""
        each = (variant_rows(study) for study in self.studies)
        return [list(rows) for rows in zip(*each, strict=True)]

    @property
    def joined(self) -> Study:
        """All runs as one study."""
        first = self.studies[0]
        runs = [run for study in self.studies for run in study.runs]
        return Study(first.name, runs, {}, first.base)


# A field that only one of two configs has comes from another version. It is not a
# difference.
def read_seeds(folders: Sequence[str | os.PathLike[str]]) -> Seeds:
    """Reads studies that differ only in the seed."""
    studies = [read_study(folder) for folder in folders]
    seeds: list[Any] = [study.base.get("seed") for study in studies]
    first = _identity(studies[0])
    for folder, seed, study in zip(folders, seeds, studies, strict=True):
        if not isinstance(seed, int):
            raise StudyError(f"{folder} does not say its seed; leave it out")
        if seeds.count(seed) > 1:
            raise StudyError(
                f"two of the studies have seed {seed}, and a seed counts once; name "
                "studies that were begun with another --config.base.seed each"
            )
        new = _identity(study)
        for name in sorted(first.keys() & new.keys()):
            if first[name] != new[name]:
                raise StudyError(
                    f"{folder} and {folders[0]} differ in {name} ({new[name]!r:.60}, "
                    f"{first[name]!r:.60}); name studies that differ in "
                    "--config.base.seed alone"
                )
    return Seeds(studies, seeds)


def _identity(study: Study) -> dict[str, Any]:
    """Returns the fields that studies of several seeds must share, by name."""
    same: dict[str, Any] = {
        "the variants": [run.name for run in study.runs],
        "storage_ratio": study.calibration.get("storage_ratio", 0.0),
        **flat_fields(study.base),
    }
    for run in study.runs:
        same |= flat_fields(run.config, f"{run.name}: ")
        same |= flat_fields(run.summary["echo"], f"{run.name}: echo.")
    ignored = ["seed"]
    if study.calibration:
        # The latency that gives the wanted R depends on the machine.
        ignored.append("data.storage.latency_s")
    return {
        name: value
        for name, value in same.items()
        if name.rpartition(": ")[2] not in ignored
    }


def seeds_report(seeds: Seeds) -> Report:
    """Returns the report of studies that differ in the seed."""
    joined = seeds.joined
    metric = joined.runs[0].metric
    costs = ("fresh examples", "updates", "seconds")
    values = (f"final {metric}", f"best {metric}")
    relative = [f"{cost}, ratio" for cost in _RATIOS_OF]
    sent = ["bytes sent"] * joined.sends_unevenly
    shown = ("variant", "n", *costs, values[0])
    environment = plain_json(joined.runs[0].environment)
    return Report(
        title=f"{joined.name}, seeds {', '.join(map(str, seeds.seeds))}",
        caveats=joined.caveats,
        headings=(*shown, values[1], *relative, *sent),
        rows=[*_cells(seeds)],
        notes=_notes(seeds),
        num_texts=1,
        in_terminal=shown,
        figures={"figure": lambda: draw_study(joined, seeds.variants)},
        details=lambda folder: ["<h2>What it ran on</h2>", environment],
    )


def _cells(seeds: Seeds) -> Iterator[tuple[str, ...]]:
    for rows, runs in zip(seeds.rows, seeds.variants, strict=True):
        reached = [row for row in rows if row.reached]
        n = f"{len(rows)}"
        if len(reached) < len(rows):
            n = f"{len(reached)} of {n}"
        relative = [row.relative for row in reached if row.relative is not None]
        sent = [run.bytes_sent for run in runs if run.diverged is None]
        yield (
            rows[0].name,
            n,
            _spread([row.fresh for row in reached], "{:,.0f}".format),
            _spread([row.updates for row in reached], "{:,.0f}".format),
            _spread([row.seconds for row in reached], "{:.1f}".format),
            _spread([r.final for r in rows if r.final is not None], "{:#.4g}".format),
            _spread([row.best for row in rows], "{:#.4g}".format),
            *(_spread([x[k] for x in relative], "{:.2f}".format) for k in range(3)),
            *[_spread(sent, lambda value: decimal(round(value)))]
            * seeds.joined.sends_unevenly,
        )


def _spread(values: Sequence[float], in_words: Callable[[float], str]) -> str:
    """Returns the mean of values with the minimum and maximum in brackets."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return "—"
    mean = in_words(sum(finite) / len(finite))
    low, high = in_words(min(finite)), in_words(max(finite))
    return mean if low == high else f"{mean} ({low} to {high})"


def _notes(seeds: Seeds) -> list[str]:
    first = seeds.studies[0]
    target = first.runs[0].target
    lines = ["Each cell is the mean over seeds, with the range in brackets."]
    if target is None:
        lines.append("The runs had no target: the costs are those of the whole run.")
    else:
        lines.append(
            f"Target: eval {first.runs[0].metric} {target:g}. Costs are those of the n "
            "seeds that reached it."
        )
    lines += [
        "Seconds: training and waiting for input, without evaluation, saving and "
        "compiling.",
        "Ratios: to the baseline of the same seed; below 1 is cheaper.",
    ]
    if first.setting:
        lines.append(f"{first.setting}.")
    return lines + [
        f"{run.name}, seed {seed}, diverged at update {run.diverged:,}."
        for seed, study in zip(seeds.seeds, seeds.studies, strict=True)
        for run in study.runs
        if run.diverged is not None
    ]
