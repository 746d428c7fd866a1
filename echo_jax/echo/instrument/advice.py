"""The report of a probe, for people and for machines, and its advice.

An echo is the last resort, because a fresh example is worth more than a repeated one.
So the advice first names changes that would make the loader fast enough, then the echo.
"""

import functools
import json
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from echo_jax.echo.instrument.rates import (
    FED_RATIO,
    LEAST_WORTH,
    SLOWED,
    StepTimes,
    seconds_per_update,
)

_LINES = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False)
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
_SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))

# From this many updates between two uses of an example, a repeat has nearly its full
# worth (Choi et al. 2019, figure 7, drawn over the lag instead of the buffer).
_GOOD_LAG = 100

# Updates to the same loss relative to fresh data, for factors up to each key: the 95 %
# intervals of tuned arms in order window_shuffle, over all batch sizes
# (docs/results.md).
_UPDATES = {2: (0.88, 1.43), 4: (0.86, 1.16), 8: (0.94, 1.40), math.inf: (1.06, 1.44)}


@dataclass(frozen=True)
class StageTime:
    """The seconds of one stage of a loader per batch, in a thread of its own."""

    name: str
    wall_s: float
    cpu_s: float  # How much of them the thread computed; the rest it waited.


@dataclass(frozen=True)
class ProbeReport:
    """How starved a trainer is, and advice: a table for people as a ``str``."""

    t_up_s: float  # Mean seconds per fresh batch of the loader alone,
    t_down_s: float  # and per update with one batch held.
    steps: StepTimes  # These updates, and how many were slow.
    # The part of t_up_s by which a fresh batch delays the step: they want the same
    # cores, or take turns.
    contention: float
    # Student's 95 % interval of R over the rounds, with and without rare slow steps.
    ratio_low: float
    ratio_high: float
    batch_size: int  # Examples in a batch; 0 if its arrays have no first axis.
    batch_bytes: int
    stages: tuple[StageTime, ...]  # The loader's, if they are known.
    measured_s: Mapping[float, float]  # Seconds per update, by echo factor; 1 is none.
    advised_factor: float  # 1 means do not echo.
    seconds: float  # How long the probe took.
    advice: tuple[str, ...] = ()  # Short paragraphs, the most useful first.
    how: str = ""  # The code or option that switches the advised echo on.

    @property
    def ratio(self) -> float:
        """R: how many updates take as long as a fresh batch."""
        return self.t_up_s / self.t_down_s

    @property
    def is_starved(self) -> bool:
        """Whether the loader is slower than the step."""
        return self.ratio > FED_RATIO

    @property
    def idle_fraction(self) -> float:
        """The share of time in which the accelerator waits or is slowed down."""
        return 1 - self.t_down_s / self.measured_s[1]

    def predicted(self, factor: float) -> float:
        """Returns the seconds per update with an echo of a factor, at least 1."""
        return seconds_per_update(self.t_up_s, self.t_down_s, factor, self.contention)

    @property
    def predicted_s(self) -> dict[float, float]:
        """The prediction for every factor to 8, and those that were measured."""
        factors = sorted({*range(1, 9), *self.measured_s})
        return {factor: self.predicted(factor) for factor in factors}

    def to_json(self) -> str:
        """Returns the report as JSON, with R, the idle fraction and predictions."""
        names = ("ratio", "idle_fraction", "predicted_s")
        content = asdict(self) | {name: getattr(self, name) for name in names}
        return json.dumps(content, indent=2)

    def waits(self, update_s: float) -> str:
        """Says for which share of an update the accelerator waits."""
        word = "idle or slowed down" if self.contention else "idle"
        return f"{word} {max(1 - self.t_down_s / update_s, 0):.0%} of the time"

    def __str__(self) -> str:
        size, of, together_s = self.batch_size, self.steps, self.measured_s[1]
        examples = f" of {size} examples" if size else ""
        lines = [
            f"Loader alone  {_short(self.t_up_s):>9} per fresh batch{examples}",
            f"Step alone    {_short(self.t_down_s):>9} per update: mean of {of.timed}",
        ]
        if of.slow:
            counts = "again and again: counted" if of.recur else "rarely: left out"
            times = f"{_short(of.slow_s)}, the others {_short(of.others_s)}"
            lines.append(f"{'':14}{of.slow} took {times} ({counts})")
        waits = f"the accelerator is {self.waits(together_s)}"
        lines.append(f"Together      {_short(together_s):>9} per update: {waits}")
        if self.contention:
            delays = "of a fresh batch's time delays the step"
            lines.append(f"Contention    {self.contention:9.2f} {delays}")
        interval = f"{self.ratio_low:.2f} to {self.ratio_high:.2f}: 95 % interval"
        rounds = f"{len(of.round_means_s)} rounds"
        lines.append(f"R             {self.ratio:9.2f} ({interval} over {rounds})")
        if self.stages:
            lines += ["", "Stages, per batch in one thread"]
        for stage in self.stages:
            times = f"{_short(stage.wall_s):>9}   of it computing"
            lines.append(f"  {stage.name:<12}{times} {_short(stage.cpu_s):>9}")
        unit = "per fresh example" if size else "per fresh batch"
        head = f"{'per update':>12}{unit:>20}{'measured per update':>22}"
        lines += ["", f"{'Echo factor':<12}{head}"]
        for factor, update_s in self.predicted_s.items():
            fresh = _short(factor * update_s / max(size, 1))
            seen = _short(self.measured_s[factor]) if factor in self.measured_s else ""
            row = f"{factor:<12g}{_short(update_s):>12}{fresh:>20}{seen:>22}"
            lines.append(row.rstrip())
        lines += ["", "Advice", *(_LINES.fill(f"- {each}") for each in self.advice)]
        if self.how:
            lines += ["", f"  {self.how}"]
        return "\n".join(lines)


def _short(value: float, units: Sequence[tuple[str, float]] = _TIMES) -> str:
    """Returns three digits and the unit that suits them, such as '12.3 ms'."""
    unit, scale = next((each for each in units if value >= each[1]), units[-1])
    value /= scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


@dataclass(frozen=True)
class OptionNames:
    """Names of a trainer's settings, for the advice."""

    threads: str = "the loader's threads"
    workers: str = "the loader's worker processes"
    prefetch: str = "the loader's prefetching"
    seconds: str = "seconds"
    worth: str = "ej.worth_of_repeats"
    min_uses: str = "ej.AdaptiveSpec(min_uses={factor}, max_uses={most})"
    device: str = "on the accelerator"
    # The stages that an echo can follow; empty for all that are timed.
    placements: tuple[str, ...] = ()
    echo: str = (
        'ej.echo_batches(loader, ej.EchoSpec(factor={factor}, order="spread", '
        "buffer={buffer}, batch_size={batch_size}))"
    )


def advised(report: ProbeReport, options: OptionNames) -> ProbeReport:
    """Returns the report with its advice, and how to follow it."""
    sentences, how = [], ""
    factor, size = report.advised_factor, report.batch_size
    if factor == 1:
        sentences.append(
            f"Do not echo: echoed twice, an update takes {_short(report.predicted(2))} "
            f"instead of {_short(report.predicted(1))}. {_saves_time(report, 2)}"
        )
    if report.ratio_low <= FED_RATIO < report.ratio_high:
        sentences.append(
            f"R may lie anywhere from {report.ratio_low:.2f} to "
            f"{report.ratio_high:.2f}, on either side of 1: measure for longer with "
            f"{options.seconds} before you rely on it."
        )
    alone = functools.partial(seconds_per_update, report.t_up_s, report.t_down_s)
    if any(report.predicted(e) > SLOWED * alone(e) for e in report.measured_s):
        sentences.append(
            "Loading and training hinder each other: they take turns, want the same "
            f"cores, or come in bursts. More of {options.prefetch}, in a thread or "
            "process of its own, is the cure, if a core is free."
        )
    if report.is_starved:
        sentences.append(_stage_fix(report, options))
    if factor > 1:
        after = _placement(report, options)
        sentences += _echo(report, options, after)
        parts = {"buffer": _GOOD_LAG * size, "batch_size": size, "after": after}
        how = options.echo.format(factor=factor, **parts) if size else ""
    return replace(report, advice=tuple(sentences), how=how)


def _stage_fix(report: ProbeReport, options: OptionNames) -> str:
    """Returns advice on threads or processes that make the loader fast enough."""
    if not report.stages:
        return (
            f"Make the loader faster first, if you can: with more of {options.threads},"
            f" {options.workers} or {options.prefetch}. Echo what is left."
        )
    slowest = max(report.stages, key=lambda stage: stage.wall_s)
    waits_s, computes_s = slowest.wall_s - slowest.cpu_s, slowest.cpu_s
    is_waiting = waits_s > computes_s
    work_s = sum(s.wall_s - s.cpu_s if is_waiting else s.cpu_s for s in report.stages)
    # How many threads or processes share the work now, and must to feed the step.
    now = max(round(work_s / report.t_up_s), 1)
    needed = math.ceil(work_s / (FED_RATIO * report.t_down_s))
    if is_waiting:
        at_a_time = "at a time"
        fix = f"if the storage answers more, {options.threads}={needed} would hide it"
    else:
        has_affinity = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
        # The trainer needs one core.
        at_a_time, needed = f"of {cores} cores busy", min(needed, cores - 1)
        left = work_s / max(needed, 1) / report.t_down_s
        fix = f"{options.workers}={needed} would bring R to {left:.1f}"
    fix += "; try that first, and echo what is left"
    if needed <= now:
        fix = "more would not help, so echo behind it"
    return (
        f"{slowest.name} waits {_short(waits_s)} per batch and computes "
        f"{_short(computes_s)}; now about {now} {at_a_time}: {fix}."
    )


def _echo(report: ProbeReport, options: OptionNames, after: str) -> list[str]:
    """Returns advice where, how often, and with which buffer to echo."""
    factor, together_s = report.advised_factor, report.measured_s[1]
    update_s = report.predicted(factor)
    where = f"after {after}" if after else "as early in the pipeline as you can"
    sentences = [
        f"Echo every example {factor:g} times, {where}: an update would take "
        f"{_short(update_s)} instead of {_short(together_s)}, and the accelerator be "
        f"{report.waits(update_s)}."
    ]
    if report.contention:
        sentences[0] += f" {_saves_time(report, factor)}"
        computes_s = sum(stage.cpu_s for stage in report.stages)
        if not report.stages or computes_s > report.t_up_s / 2:
            uses = max(2, round(factor))
            limits = options.min_uses.format(factor=uses, most=2 * uses)
            sentences.append(
                "If the loader takes the step's cores, fresh data is always ready, so "
                f"give an adaptive echo {limits}."
            )
    low, high = next(found for most, found in _UPDATES.items() if factor <= most)
    faster = update_s / together_s
    sentences.append(
        "If repeats are worth what they were to a tuned small language model, training "
        f"to the same loss takes {low * faster:.2f} to {high * faster:.2f} of the time."
        f" {options.worth} shows what they are worth to yours, and if more pay."
    )
    if report.batch_size:
        size = _short(_GOOD_LAG * report.batch_bytes, _SIZES)
        # Whole batches are kept where they are made.
        where = "" if after == "batch" else f", {options.device} if its memory allows"
        sentences.append(
            f"Keep {_GOOD_LAG * report.batch_size} examples ({size}){where}, so that "
            f"uses of one lie about {_GOOD_LAG} updates apart; fewer if the whole "
            "training reads less than ten times as many."
        )
    return sentences


def _saves_time(report: ProbeReport, factor: float) -> str:
    # An update learns 1 / e + worth (1 - 1 / e) times as much as on fresh examples.
    faster = report.predicted(factor) / report.predicted(1)
    worth = (faster - 1 / factor) / (1 - 1 / factor)
    return (
        f"That saves time if a repeat is worth more than {worth:.2f} of a fresh "
        f"example; in the studies it was worth {LEAST_WORTH} or more."
    )


def _placement(report: ProbeReport, options: OptionNames) -> str:
    """Returns the earliest stage behind which an echo helps; "" if none is known."""
    # The echo follows the slowest stage. One thread does the later stages for every
    # use, so they must not take longer than a step.
    times, names = [s.wall_s for s in report.stages], [s.name for s in report.stages]
    slowest = times.index(max(times)) if times else 0
    for at, name in enumerate(names[slowest:], slowest):
        is_possible = name in (options.placements or names)
        if is_possible and sum(times[at + 1 :]) <= report.t_down_s:
            return name
    return names[-1] if names else ""
