"""Reads run folders and study folders.

A run folder is the output of `echo_jax.training`. This module needs only its files, so
that a study can be reported on a machine without an accelerator.
"""

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etils import epath

from echo_jax.echo.instrument.rates import RepeatWorth
from echo_jax.files.folders import is_name, run_folder
from echo_jax.files.json_files import DamagedFileError, missing, read_json, read_line
from echo_jax.studies import fields
from echo_jax.terminal.printable import printable

BASELINE = "baseline"
"""The name of the variant to which the others are compared."""


class StudyError(ValueError):
    """A folder cannot be reported on; the message says what to do."""


# The fields that a run that diverged does not have.
_UNKNOWN: dict[str, Any] = {
    "reached": False,
    **dict.fromkeys(("fresh_to_target", "updates_to_target", "seconds_to_target")),
    **dict.fromkeys(("R", "idle_fraction", "t_down_s")),
}
# Runs send unevenly if the bytes per update differ by more than this factor.
_EVEN_BYTES = 1.01


@dataclass(frozen=True)
class Run:
    """A run that has finished or diverged."""

    name: str  # The folder's name; in a study, the variant.
    # ``config.json``; ``{}`` if left out, as in the runs that are published.
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    # ``summary.json``; for a run that diverged, unknown fields are None.
    summary: Mapping[str, Any]
    # The rows of ``metrics.jsonl`` that hold an evaluation, in order.
    evals: Sequence[Mapping[str, Any]]
    diverged: int | None = None  # The update at which it diverged, or None.
    # Whether the last line of ``metrics.jsonl`` is half written, and left out.
    is_cut: bool = False

    @property
    def metric(self) -> str:
        """The metric of the target, such as ``"loss"``."""
        return self.summary["metric"]

    @property
    def target(self) -> float | None:
        """The value of the metric to reach; None if the run had no target."""
        return self.summary["target"] or None

    @property
    def reached(self) -> bool:
        return bool(self.target is not None and self.summary["reached"])

    @property
    def values(self) -> list[float]:
        """The metric at every evaluation; NaN where it was not finite."""
        values = [row[f"eval_{self.metric}"] for row in self.evals]
        # JSON has no NaN: the files hold null.
        return [math.nan if value is None else value for value in values]

    @property
    def branches(self) -> list[RepeatWorth]:
        """The results of the branches on fresh data (`config.probe_repeats`)."""
        found = []
        sign = -1 if self.summary["mode"] == "max" else 1
        points = zip(self.evals, self.values, strict=True)
        for (row, start), (end, value) in itertools.pairwise(points):
            after_fresh = row.get("after_fresh")
            fresh, repeats = (end[name] - row[name] for name in ("fresh", "repeats"))
            if after_fresh is None or not fresh + repeats:
                continue
            if math.isfinite(start + value + after_fresh):
                start, value, after = sign * start, sign * value, sign * after_fresh
                part = fresh / (fresh + repeats)
                found.append(RepeatWorth(start, value, after, part))
        return found

    @property
    def best(self) -> float:
        """The best finite value of the metric; NaN if there is none."""
        finite = [value for value in self.values if math.isfinite(value)]
        choose = max if self.summary["mode"] == "max" else min
        return choose(finite, default=math.nan)

    @property
    def evaluated_every(self) -> int | None:
        """Updates between evaluations; None for a run with one evaluation."""
        updates = [row["updates"] for row in self.evals]
        # The last evaluation comes at the run's end.
        return max((b - a for a, b in itertools.pairwise(updates)), default=None)

    @property
    def at_target(self) -> Mapping[str, Any]:
        """The evaluation that reached the target; the run must have one."""
        updates = self.summary["updates_to_target"]
        return next(row for row in self.evals if row["updates"] == updates)

    @property
    def bytes_sent(self) -> float:
        """Bytes from collectives on each device; 0 where not counted."""
        return self.summary.get("bytes_sent", 0)


@dataclass(frozen=True)
class Study:
    """Runs that are compared: the variants of a study, or named folders."""

    name: str
    runs: Sequence[Run]  # In the order of the table.
    calibration: Mapping[str, Any]  # Measurements before the variants ran, or ``{}``.
    # The config from which the variants differ; ``{}`` if there is none.
    base: Mapping[str, Any] = field(default_factory=dict)

    @property
    def setting(self) -> str:
        """The trained setting in words; "" if unknown or not the same in all runs."""
        configs = [self.base] if self.base else [run.config for run in self.runs]
        found = {fields.setting_in_words(config) for config in configs}
        return found.pop() if len(found) == 1 else ""

    @property
    def baseline(self) -> Run | None:
        return next((run for run in self.runs if run.name == BASELINE), None)

    @property
    def sends_unevenly(self) -> bool:
        """Whether devices send more for an update in one run than in another."""
        each = [
            run.bytes_sent / max(run.summary["updates"], 1)
            for run in self.runs
            if run.diverged is None
        ]
        return max(each, default=0) > _EVEN_BYTES * min(each, default=0)

    @property
    def caveats(self) -> list[str]:
        """Facts about the input that a reader of any table or figure must know."""
        simulated = any(run.summary["simulated_storage"] for run in self.runs)
        data = [run.environment["workload"]["data"] for run in self.runs]
        synthetic = any(each["synthetic"] for each in data)
        return [*["simulated storage"] * simulated, *["synthetic data"] * synthetic]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Reads a run that is finished, or that is marked as diverged."""
    folder = run_folder(folder)
    if not folder.is_dir():
        raise StudyError(f"{folder} is not a folder; name the --workdir of a run")
    has_config = (folder / "config.json").exists()
    diverged = _read_diverged(folder)
    if diverged is None and not (folder / "summary.json").exists():
        if not has_config:
            raise StudyError(
                f"{folder} holds no config.json, so it is not a run folder; "
                "name the --workdir of 'echo-jax train' or 'echo-jax study'"
            )
        raise StudyError(
            f"{folder} holds no summary.json: the run is not finished; resume it "
            "with the command that started it"
        )
    rows, is_cut = _read_rows(folder / "metrics.jsonl")
    evals = [row for row in rows if row.get("kind") == "eval"]
    if diverged is None:
        summary = _read_json(folder / "summary.json", fields.SUMMARY)
    else:
        summary = {**diverged, **_UNKNOWN, **(evals[-1] if evals else {})}
    run = Run(
        name=printable(folder.name or Path.cwd().name),
        config=_read_json(folder / "config.json", fields.CONFIG) if has_config else {},
        environment=_read_json(folder / "environment.json", fields.ENVIRONMENT),
        summary=summary,
        evals=evals,
        diverged=None if diverged is None else diverged["update"],
        is_cut=is_cut,
    )
    _check_run(run, len(rows), folder)
    return run


def read_runs(folders: Iterable[str | os.PathLike[str]], name: str = "Runs") -> Study:
    """Reads runs that belong to no study, to compare them."""
    runs = [read_run(folder) for folder in folders]
    _check_comparable(runs)
    return Study(name, runs, calibration={})


def read_study(folder: str | os.PathLike[str]) -> Study:
    """Reads a study from its ``--workdir``; its baseline comes first."""
    folder = run_folder(folder)
    if not (folder / "study.json").exists():
        raise StudyError(
            f"{folder} holds no study.json, so it is not a study; "
            "name the --workdir of 'echo-jax study', or run folders"
        )
    metadata = _read_json(folder / "study.json", fields.STUDY)
    if not all(map(is_name, metadata["arms"])):
        raise StudyError(
            f"{folder / 'study.json'} is damaged: its 'arms' are not names of variants"
        )
    # A config sorts its variants by name, so any variant may come before the baseline.
    variants = sorted(metadata["arms"], key=lambda variant: variant != BASELINE)
    runs = [read_run(folder / variant) for variant in variants]
    _check_comparable(runs)
    return Study(
        name=metadata["name"],
        runs=runs,
        calibration=metadata["calibration"],
        base=metadata.get("base_config", {}),
    )


def _read_diverged(folder: epath.Path) -> dict[str, Any] | None:
    """Returns the study's record of a divergence, unless the run finished later."""
    if not (folder / "diverged.json").exists():
        return None
    diverged = _read_json(folder / "diverged.json", fields.DIVERGED)
    if (folder / "summary.json").exists():
        finished = _read_json(folder / "summary.json", {"updates": int})
        # An earlier, shorter run finished and was continued.
        if finished["updates"] >= diverged["update"]:
            return None
    return diverged


def _read_json(path: epath.Path, needed: Mapping[str, Any]) -> dict[str, Any]:
    try:
        content = fields.with_names_of_now(read_json(path))
        if content and (what := missing(content, needed)):
            raise DamagedFileError(path, what)
    except DamagedFileError as error:
        raise StudyError(f"{path} is damaged: {error.what}; run it again") from None
    if content is None:
        raise StudyError(f"{path} is missing; run it again")
    return _shown(content)


def _shown(value: Any) -> Any:
    """Returns a JSON value whose texts are printable."""
    if isinstance(value, dict):
        return {printable(name): _shown(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return printable(value) if isinstance(value, str) else value


def _read_rows(path: epath.Path) -> tuple[list[dict[str, Any]], bool]:
    """Returns the rows, and whether a last one is half written, and left out."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StudyError(f"{path} is missing; run it again") from None
    rows, lines = [], content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_shown(read_line(line)))
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not content.endswith(b"\n"):
                return rows, True
            raise StudyError(
                f"{path}, line {number}, is damaged: {error}; run it again"
            ) from None
    return rows, False


def _check_run(run: Run, number: int, folder: epath.Path) -> None:
    rows = folder / "metrics.jsonl"
    # A checksum does not detect a cut between two lines. A summary of an earlier
    # version has no number of rows.
    if number + run.is_cut < run.summary.get("rows", 0):
        raise StudyError(
            f"{rows} holds {number} rows of the {run.summary['rows']} that "
            "summary.json counts; run it again"
        )
    if not run.evals:
        raise StudyError(
            f"{rows} holds no evaluation; set --config.eval_every below "
            "--config.updates"
        )
    if f"eval_{run.metric}" not in run.evals[0]:
        names = sorted(key for key in run.evals[0] if key.startswith("eval_"))
        raise StudyError(
            f"{rows} holds {names}, but not eval_{run.metric}, "
            "the metric of its summary.json"
        )
    held = [(rows, row, fields.row(run.metric)) for row in run.evals]
    if run.summary["simulated_storage"]:
        held.append((folder / "summary.json", run.summary, fields.STORAGE))
    for path, content, needed in held:
        if what := missing(content, needed):
            raise StudyError(f"{path} is damaged: {what}; run it again")
    end = run.summary["updates_to_target"]
    if run.reached and end not in [row["updates"] for row in run.evals]:
        raise StudyError(
            f"{rows} holds no evaluation of update {end}, at which summary.json says "
            "that the target was reached; run it again"
        )


def _check_comparable(runs: Sequence[Run]) -> None:
    if not runs:
        raise StudyError("there is no run to report; name at least one run folder")
    names = [run.name for run in runs]
    for name in names:
        if names.count(name) > 1:
            raise StudyError(
                f"two run folders are named {name!r}; rename one, since the name "
                "is what tells them apart in the table"
            )
    for name in ("workload", "metric", "target"):
        values = {run.name: run.summary[name] for run in runs}
        if len(set(values.values())) > 1:
            raise StudyError(f"runs of different {name} cannot be compared: {values}")
