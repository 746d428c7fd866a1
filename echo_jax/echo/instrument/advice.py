"""Advice from a probe's numbers, in plain words.

An echo is the last resort, because a fresh example is worth more than a repeated one.
So the advice first names changes that would make the loader fast enough, then the echo.
"""

import math
from dataclasses import dataclass

from echo_jax.echo.instrument.probe_report import (
    FED_RATIO,
    MeasuredRun,
    ProbeReport,
    StageTime,
    duration,
)

__all__ = ["OptionNames", "advise", "how_to_echo"]

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

# Slow steps are reported if they would make the mean longer by this factor.
_MATTERS = 1.05


@dataclass(frozen=True)
class OptionNames:
    """Names of a trainer's settings, for the advice.

    Attributes:
      worth: Measures how much a repeat is worth.
      device: Where a buffer on the accelerator is.
      placements: The stages that an echo can follow; empty for all that are timed.
      echo: Switches an echo on; a format string with ``{factor}``, ``{buffer}``
        (examples), ``{batch_size}`` and ``{after}`` (a stage).
    """

    threads: str = "the loader's threads"
    workers: str = "the loader's worker processes"
    prefetch: str = "the loader's prefetching"
    seconds: str = "seconds"
    worth: str = "ej.worth_of_repeats"
    device: str = "on the accelerator"
    placements: tuple[str, ...] = ()
    echo: str = (
        'ej.echo_batches(loader, ej.EchoSpec(factor={factor}, order="spread", '
        "buffer={buffer}, batch_size={batch_size}))"
    )


def advise(report: ProbeReport, options: OptionNames, *, cores: int) -> tuple[str, ...]:
    """Returns advice, the most useful first; "Do not echo" leads if not starved."""
    up, down = duration(report.t_up_s), duration(report.t_down_s)
    sentences = []
    if not report.is_starved:
        sentences.append(
            f"Do not echo: a fresh batch takes {up} and a step {down}, so there is "
            "no time to win, and a repeat is worth less than a fresh example."
        )
    if not report.is_certain:
        sentences.append(
            f"R may lie anywhere from {report.ratio_low:.2f} to "
            f"{report.ratio_high:.2f}, on either side of 1: measure for longer with "
            f"{options.seconds} before you rely on it."
        )
    sentences += _slow_step_doubt(report, options)
    sentences += _overlap_fix(report, options)
    if report.is_starved:
        sentences += _stage_fix(report, options, cores)
        sentences += _echo(report, options)
    return tuple(sentences)


def how_to_echo(report: ProbeReport, options: OptionNames) -> str:
    """Returns the code or option that switches the echo on; "" if none is advised."""
    if not (report.is_starved and report.batch_size):
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
    if counted_s < _MATTERS * slow.others_s:
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

    def excess(run: MeasuredRun) -> float:
        return run.seconds_per_update / report.predicted(run.factor)

    def could_be(run: MeasuredRun) -> bool:
        in_turns_s = report.t_up_s / run.factor + report.t_down_s
        return in_turns_s >= _OVERLAP * report.predicted(run.factor)

    worst = max(report.runs, key=excess)
    # If one side is much faster, missing overlap cannot explain the excess.
    if excess(worst) < _OVERLAP or not could_be(worst):
        return []
    how = "Without an echo" if worst.factor == 1 else f"Echoed {worst.factor:g} times"
    return [
        f"{how}, an update takes {duration(worst.seconds_per_update)}, not the "
        f"{duration(report.predicted(worst.factor))} of the slower side alone: loading "
        "and training take turns, or want the same cores, or batches or slow steps "
        f"come in bursts. More of {options.prefetch}, in a thread or process of its "
        "own, is the cure."
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
    idle = 1 - report.t_down_s / update_s
    where = f"after {after}" if after else "as early in the pipeline as you can"
    sentences = [
        f"Echo every example {factor:g} times, {where}: an update would take "
        f"{duration(update_s)} instead of {duration(report.observed_s)}, and the "
        f"accelerator be idle {idle:.0%} of the time."
    ]
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
