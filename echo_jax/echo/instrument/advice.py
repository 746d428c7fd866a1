"""The report of a probe, for people and for machines, and its advice.

An echo is the last resort, because a fresh example is worth more than a repeated one.
So the advice first names changes that would make the loader fast enough, then the echo.
"""

import json
import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from echo_jax.echo.instrument.rates import (
    FED_RATIO,
    LEAST_WORTH,
    SlowSteps,
    seconds_per_update,
)

__all__ = [
    "MeasuredRun",
    "OptionNames",
    "ProbeReport",
    "StageTime",
    "advise",
    "how_to_echo",
]

_PREDICTED_FACTORS = range(1, 9)
_LINES = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False)
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


# From this many updates between two uses of an example, a repeat has nearly its full
# worth (Choi et al. 2019, figure 7, drawn over the lag instead of the buffer).
_GOOD_LAG = 100

# Updates to the same loss relative to fresh data, for factors up to each key: the 95 %
# intervals of tuned arms in order window_shuffle, over all batch sizes
# (docs/results.md).
_UPDATES_BESIDE_FRESH = {2: (0.88, 1.43), 4: (0.86, 1.16), 8: (0.94, 1.40)}
_UPDATES_BESIDE_FRESH_ABOVE = (1.06, 1.44)

# Loading and training together should take as long as the slower of them alone.
# Machines vary by up to this much more.
_OVERLAP = 1.15


@dataclass(frozen=True)
class StageTime:
    """One stage of a loader, measured alone.

    Attributes:
      name: Name of the stage.
      wall_s: Seconds per batch in a single thread.
      cpu_s: How much of them the thread computed; the rest it waited.
    """

    name: str
    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class MeasuredRun:
    """A short real run.

    Attributes:
      factor: Factor of the echo around the upstream's batches; 1 means no echo.
      updates: How many were timed.
      seconds_per_update: Their mean.
    """

    factor: float
    updates: int
    seconds_per_update: float


@dataclass(frozen=True)
class ProbeReport:
    """How starved a trainer is, and advice against it.

    ``str()`` is a table for people, `to_json` the same for machines.

    Attributes:
      t_up_s: Mean seconds per fresh batch of the loader alone.
      t_down_s: Mean seconds per update with one batch held, without slow steps that
        do not recur.
      t_up_together_s: The same as t_up_s while the step runs, which may take longer.
      contention: Part of it by which a fresh batch delays the step, from 0 to 1,
        because both want the same cores or take turns.
      observed_s: Mean seconds per update of both together, without an echo.
      ratio_low: Lower end of the interval of R.
      ratio_high: Upper end. The interval is Student's 95 % interval over the rounds. It
        also spans R with and without slow steps that do not recur.
      rounds: How often each was measured, in turns.
      steps_timed: Updates with one batch held.
      slow_steps: Those of them that took more than twice the median; None if there were
        none.
      batch_size: Examples in a batch; 0 if its arrays have no first axis.
      batch_bytes: Size of a batch in bytes.
      stages: The loader's stages, if they are known.
      runs: Short real runs: without an echo, and with one.
      advised_factor: The echo factor to begin with; 1 means do not echo.
      advice: Advice in short paragraphs, the most useful first.
      how: The code or option that switches the advised echo on; "" if none is advised.
      seconds: How long the probe took.
    """

    t_up_s: float
    t_down_s: float
    t_up_together_s: float
    contention: float
    observed_s: float
    ratio_low: float
    ratio_high: float
    rounds: int
    steps_timed: int
    slow_steps: SlowSteps | None
    batch_size: int
    batch_bytes: int
    stages: tuple[StageTime, ...]
    runs: tuple[MeasuredRun, ...]
    advised_factor: float
    advice: tuple[str, ...]
    how: str
    seconds: float

    @property
    def ratio(self) -> float:
        """R: how many updates take as long as a fresh batch."""
        return self.t_up_s / self.t_down_s

    @property
    def is_starved(self) -> bool:
        """Whether the loader is slower than the step."""
        return self.ratio > FED_RATIO

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval of R agrees with `is_starved`."""
        return (self.ratio_low > FED_RATIO) == (self.ratio_high > FED_RATIO)

    @property
    def idle_fraction(self) -> float:
        """The share of time in which the accelerator waits or is slowed down."""
        return 1 - self.t_down_s / self.observed_s

    def predicted(self, factor: float) -> float:
        """Returns the seconds per update with an echo that has no overhead.

        Args:
          factor: Factor of the echo, at least 1.
        """
        together_s = self.t_up_together_s, self.t_down_s
        return seconds_per_update(*together_s, factor, self.contention)

    def to_json(self) -> str:
        """Returns the report as JSON, with R, the idle fraction and predictions."""
        content: dict[str, Any] = asdict(self)
        content["ratio"] = self.ratio
        content["idle_fraction"] = self.idle_fraction
        content["predicted"] = self._rows()
        return json.dumps(content, indent=2)

    def _rows(self) -> list[dict[str, Any]]:
        measured = {run.factor: run.seconds_per_update for run in self.runs}
        return [
            {
                "factor": factor,
                "seconds_per_update": self.predicted(factor),
                "seconds_per_fresh_batch": factor * self.predicted(factor),
                "measured_seconds_per_update": measured.get(factor),
            }
            for factor in sorted({*_PREDICTED_FACTORS, *measured})
        ]

    def waits(self, update_s: float) -> str:
        """Says for which share of an update the accelerator waits."""
        word = "idle or slowed down" if self.contention else "idle"
        # A step may run faster together than alone; idle is not negative then.
        return f"{word} {max(1 - self.t_down_s / update_s, 0):.0%} of the time"

    def __str__(self) -> str:
        examples = f" of {self.batch_size} examples" if self.batch_size else ""
        delays = f"{self.contention:9.2f} of a fresh batch's time delays the step"
        blocks = [
            [
                f"Loader alone  {duration(self.t_up_s):>9} per fresh batch{examples}",
                f"Step alone    {duration(self.t_down_s):>9} per update: "
                f"{self._step_words()}",
                *self._slow_step_lines(),
                f"Together      {duration(self.observed_s):>9} per update: the "
                f"accelerator is {self.waits(self.observed_s)}",
                *([f"Contention    {delays}"] if self.contention else []),
                f"R             {self.ratio:9.2f} ({self.ratio_low:.2f} to "
                f"{self.ratio_high:.2f}: 95 % interval over {self.rounds} rounds)",
            ],
            self._stage_lines(),
            self._factor_lines(),
            ["Advice", *map(_LINES.fill, (f"- {each}" for each in self.advice))],
            [f"  {self.how}"] if self.how else [],
        ]
        return "\n\n".join("\n".join(lines) for lines in blocks if lines)

    def _step_words(self) -> str:
        slow, timed = self.slow_steps, f"{self.steps_timed} updates"
        if slow is None:
            return f"mean of {timed}"
        if slow.period:
            return f"means, with periodic slow steps; {timed}"
        how = "with" if slow.recur else "without"
        return f"mean of {timed}, {how} slow steps"

    def _slow_step_lines(self) -> list[str]:
        slow = self.slow_steps
        if slow is None:
            return []
        share = f"{slow.count} of {self.steps_timed}"
        if slow.period:
            share = f"1 step in every {slow.period}"
        return [
            f"{'':14}{share} took {duration(slow.mean_s)}, the others "
            f"{duration(slow.others_s)}"
        ]

    def _stage_lines(self) -> list[str]:
        lines = [
            f"  {stage.name:<12}{duration(stage.wall_s):>9}"
            f"   of it computing {duration(stage.cpu_s):>9}"
            for stage in self.stages
        ]
        return ["Stages, per batch in one thread", *lines] if lines else []

    def _factor_lines(self) -> list[str]:
        unit = "example" if self.batch_size else "batch"
        lines = [
            f"{'Echo factor':<12}{'per update':>12}{f'per fresh {unit}':>20}"
            f"{'measured per update':>22}"
        ]
        for factor, update_s, fresh_s, measured_s in map(dict.values, self._rows()):
            fresh = duration(fresh_s / max(self.batch_size, 1))
            seen = "" if measured_s is None else duration(measured_s)
            times = f"{duration(update_s):>12}{fresh:>20}{seen:>22}"
            lines.append(f"{factor:<12g}{times}".rstrip())
        return lines


def duration(seconds: float) -> str:
    """Returns a time with three digits and the unit that suits it.

    Example:
      >>> duration(0.0123), duration(2.5), duration(4.2e-05)
      ('12.3 ms', '2.50 s', '42.0 us')
    """
    unit, scale = next(
        (unit, scale) for unit, scale in _UNITS if seconds >= scale or unit == "us"
    )
    value = seconds / scale
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


@dataclass(frozen=True)
class OptionNames:
    """Names of a trainer's settings, for the advice.

    Attributes:
      worth: Measures how much a repeat is worth.
      device: Where a buffer on the accelerator is.
      placements: The stages that an echo can follow; empty for all that are timed.
      echo: Switches an echo on; a format string with ``{factor}``, ``{buffer}``
        (examples), ``{batch_size}`` and ``{after}`` (a stage).
      min_uses: Bounds the uses of an adaptive echo: ``{factor}`` to ``{most}``.
    """

    threads: str = "the loader's threads"
    workers: str = "the loader's worker processes"
    prefetch: str = "the loader's prefetching"
    seconds: str = "seconds"
    worth: str = "ej.worth_of_repeats"
    min_uses: str = "ej.AdaptiveSpec(min_uses={factor}, max_uses={most})"
    device: str = "on the accelerator"
    placements: tuple[str, ...] = ()
    echo: str = (
        'ej.echo_batches(loader, ej.EchoSpec(factor={factor}, order="spread", '
        "buffer={buffer}, batch_size={batch_size}))"
    )


def advise(report: ProbeReport, options: OptionNames, *, cores: int) -> tuple[str, ...]:
    """Returns advice, the most useful first; "Do not echo" leads if not starved."""
    sentences = []
    is_echoed = report.advised_factor > 1
    if not is_echoed:
        why = (
            f"a fresh batch takes {duration(report.t_up_s)} and a step "
            f"{duration(report.t_down_s)}, so there is no time to win, and a repeat is "
            "worth less than a fresh example."
        )
        if report.contention:
            why = (
                f"an update takes {duration(report.predicted(1))}, and echoed twice "
                f"{duration(report.predicted(2))}. {_saves_time(report, 2)}."
            )
        sentences.append(f"Do not echo: {why}")
    if not report.is_certain and not report.contention:
        sentences.append(
            f"R may lie anywhere from {report.ratio_low:.2f} to "
            f"{report.ratio_high:.2f}, on either side of 1: measure for longer with "
            f"{options.seconds} before you rely on it."
        )
    sentences += _slow_step_doubt(report, options)
    sentences += _overlap_fix(report, options)
    if report.is_starved:
        sentences += _stage_fix(report, options, cores)
    if is_echoed:
        sentences += _echo(report, options)
    return tuple(sentences)


def how_to_echo(report: ProbeReport, options: OptionNames) -> str:
    """Returns the code or option that switches the echo on; "" if none is advised."""
    if not (report.advised_factor > 1 and report.batch_size):
        return ""
    return options.echo.format(
        factor=report.advised_factor,
        buffer=_GOOD_LAG * report.batch_size,
        batch_size=report.batch_size,
        after=_placement(report, options),
    )


def _slow_step_doubt(report: ProbeReport, options: OptionNames) -> list[str]:
    """Returns advice if too few slow steps were seen to know their effect on R."""
    slow = report.slow_steps
    if slow is None or (slow.recur and not slow.are_few):
        return []
    share = slow.count / report.steps_timed
    counted_s = slow.others_s + share * (slow.mean_s - slow.others_s)
    if counted_s < FED_RATIO * slow.others_s:
        return []
    seen = f"({slow.count} of {report.steps_timed}, {duration(slow.mean_s)} each)"
    if slow.recur:
        return [
            f"Slow steps {seen} were too few to know how often they come, and R with "
            f"it: measure for longer with {options.seconds}, over several periods."
        ]
    return [
        f"Slow steps {seen} did not recur, so R leaves them out. If the step itself "
        f"causes them, R is {report.t_up_s / counted_s:.2f}: measure for longer with "
        f"{options.seconds} to know."
    ]


def _overlap_fix(report: ProbeReport, options: OptionNames) -> list[str]:
    """Returns advice if loading and training hinder each other."""
    both_s = report.t_up_s, report.t_down_s

    def excess(run: MeasuredRun) -> float:
        return run.seconds_per_update / seconds_per_update(*both_s, run.factor)

    worst = max(report.runs, key=excess)
    overlapped_s = seconds_per_update(*both_s, worst.factor)
    in_turns_s = seconds_per_update(*both_s, worst.factor, contention=1.0)
    # If one side is much faster, missing overlap cannot explain the excess.
    if min(excess(worst), in_turns_s / overlapped_s) < _OVERLAP:
        return []
    how = "Without an echo" if worst.factor == 1 else f"Echoed {worst.factor:g} times"
    return [
        f"{how}, an update takes {duration(worst.seconds_per_update)}, not the "
        f"{duration(overlapped_s)} of the slower side alone: loading and training take "
        "turns, or want the same cores, or batches or slow steps come in bursts. More "
        f"of {options.prefetch}, in a thread or process of its own, is the cure, if a "
        "core is free."
    ]


def _stage_fix(report: ProbeReport, options: OptionNames, cores: int) -> list[str]:
    """Returns advice on threads or processes that make the loader fast enough."""
    if not report.stages:
        return [
            "Make the loader faster first, if you can: with more of "
            f"{options.threads}, {options.workers} or {options.prefetch}. Echo what is "
            "left."
        ]
    slowest = max(report.stages, key=lambda stage: stage.wall_s)
    if slowest.cpu_s < slowest.wall_s / 2:
        return _waiting_fix(report, options, slowest)
    return _computing_fix(report, options, slowest, cores)


def _waiting_fix(
    report: ProbeReport, options: OptionNames, slowest: StageTime
) -> list[str]:
    waits_s = sum(stage.wall_s - stage.cpu_s for stage in report.stages)
    at_a_time = max(round(waits_s / report.t_up_s), 1)
    needed = _enough(waits_s, report)
    if needed <= at_a_time:
        return []
    return [
        f"{slowest.name} waits {duration(slowest.wall_s - slowest.cpu_s)} per batch "
        f"and computes {duration(slowest.cpu_s)}; now about {at_a_time} at a time. "
        f"If the storage answers more at a time, {options.threads}={needed} would hide "
        "the waiting: try that first, and echo only if it cannot."
    ]


def _computing_fix(
    report: ProbeReport, options: OptionNames, slowest: StageTime, cores: int
) -> list[str]:
    computes_s = sum(stage.cpu_s for stage in report.stages)
    busy = max(round(computes_s / report.t_up_s), 1)
    needed = _enough(computes_s, report)
    what = (
        f"{slowest.name} computes {duration(slowest.cpu_s)} per batch, and the "
        f"loader keeps about {busy} of {cores} cores busy"
    )
    # The trainer needs one core.
    free = cores - 1 - busy
    if free < 1:
        return [f"{what}: more processes have no core to run on; echo behind it."]
    workers = min(needed, cores - 1)
    left = computes_s / workers / report.t_down_s
    is_enough = workers == needed
    then = "load as fast as it trains" if is_enough else f"bring R to about {left:.1f}"
    return [f"{what}: {options.workers}={workers} would {then}; try that first."]


def _enough(seconds: float, report: ProbeReport) -> int:
    """Returns how many threads or processes must share work to feed the step."""
    return math.ceil(seconds / (FED_RATIO * report.t_down_s))


def _echo(report: ProbeReport, options: OptionNames) -> list[str]:
    """Returns advice where, how often, and with which buffer to echo."""
    factor = report.advised_factor
    after = _placement(report, options)
    update_s = report.predicted(factor)
    where = f"after {after}" if after else "as early in the pipeline as you can"
    sentences = [
        f"Echo every example {factor:g} times, {where}: an update would take "
        f"{duration(update_s)} instead of {duration(report.observed_s)}, and the "
        f"accelerator be {report.waits(update_s)}."
    ]
    if report.contention:
        sentences.append(f"{_saves_time(report, factor)}.")
        computes_s = sum(stage.cpu_s for stage in report.stages)
        if not report.stages or computes_s > report.t_up_s / 2:
            uses = max(2, round(factor))
            limits = options.min_uses.format(factor=uses, most=2 * uses)
            sentences[-1] += (
                " If the loader takes the step's cores, fresh data is always ready: "
                f"give an adaptive echo {limits}."
            )
    low, high = next(
        (found for most, found in _UPDATES_BESIDE_FRESH.items() if factor <= most),
        _UPDATES_BESIDE_FRESH_ABOVE,
    )
    faster = update_s / report.observed_s
    sentences.append(
        f"If repeats are worth to your model what they were to a small language model, "
        f"tuned, training to the same loss takes {low * faster:.2f} to "
        f"{high * faster:.2f} of the time. {options.worth} shows what they are worth "
        "to yours."
    )
    if report.ratio > 1.1 * factor:
        sentences.append(
            f"R is above {factor:g}. Whether further repeats pay depends on model and "
            "batch size: on LM1B with batches of 1,024 they cost more reads (Choi et "
            "al. 2019), and a small language model still gained up to 16."
        )
    if report.batch_size:
        size = _GOOD_LAG * report.batch_bytes
        # Whole batches are kept where they are made.
        where = "" if after == "batch" else f", {options.device} if its memory allows"
        sentences.append(
            f"Keep {_GOOD_LAG * report.batch_size} examples ({_size(size)}){where}, so "
            f"that uses of one lie about {_GOOD_LAG} updates apart; fewer where the "
            "whole training reads less than some ten times as many."
        )
    return sentences


def _saves_time(report: ProbeReport, factor: float) -> str:
    # An update learns 1 / e + worth (1 - 1 / e) times as much as on fresh examples.
    faster = report.predicted(factor) / report.predicted(1)
    least = (faster - 1 / factor) / (1 - 1 / factor)
    return (
        f"That saves time if a repeat is worth more than {least:.2f} of a fresh "
        f"example; in the studies it was worth {LEAST_WORTH} or more"
    )


def _placement(report: ProbeReport, options: OptionNames) -> str:
    """Returns the earliest stage behind which an echo helps; "" if none is known."""
    # The echo follows the slowest stage. One thread does the later stages for every
    # use, so they must not take longer than a step.
    stages = report.stages
    if not stages:
        return ""
    slowest = max(range(len(stages)), key=lambda at: stages[at].wall_s)
    for at in range(slowest, len(stages)):
        is_possible = not options.placements or stages[at].name in options.placements
        if is_possible and sum(s.wall_s for s in stages[at + 1 :]) <= report.t_down_s:
            return stages[at].name
    return stages[-1].name


def _size(num_bytes: int) -> str:
    """Returns a size in a suitable unit, such as '52.4 MB'."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"
