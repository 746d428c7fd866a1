"""The report of a probe, for people and for machines."""

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from echo_jax.echo.instrument.rates import seconds_per_update
from echo_jax.echo.instrument.stopwatch import SlowSteps

__all__ = [
    "FED_RATIO",
    "MeasuredRun",
    "ProbeReport",
    "StageTime",
    "duration",
    "is_starved",
]

_PREDICTED_FACTORS = range(1, 9)

# R up to here counts as fed: machines vary by a few per cent, and an echo could gain
# no more than that.
FED_RATIO = 1.05

_LINES = textwrap.TextWrapper(80, subsequent_indent="  ", break_on_hyphens=False)
_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))


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
        return is_starved(self.ratio)

    @property
    def is_certain(self) -> bool:
        """Whether the whole interval of R agrees with `is_starved`."""
        return is_starved(self.ratio_low) == is_starved(self.ratio_high)

    @property
    def idle_fraction(self) -> float:
        """The share of time in which the accelerator waits, without an echo."""
        return 1 - self.t_down_s / self.observed_s

    def predicted(self, factor: float) -> float:
        """Returns the seconds per update with an echo that has no overhead.

        Args:
          factor: Factor of the echo, at least 1.
        """
        return seconds_per_update(self.t_up_s, self.t_down_s, factor)

    def to_json(self) -> str:
        """Returns the report as JSON, with R, the idle fraction and predictions."""
        content: dict[str, Any] = asdict(self)
        content["ratio"] = self.ratio
        content["idle_fraction"] = self.idle_fraction
        content["predicted"] = [
            {
                "factor": factor,
                "seconds_per_update": self.predicted(factor),
                "seconds_per_fresh_batch": factor * self.predicted(factor),
            }
            for factor in _PREDICTED_FACTORS
        ]
        return json.dumps(content, indent=2)

    def __str__(self) -> str:
        examples = f" of {self.batch_size} examples" if self.batch_size else ""
        # A step may run faster together than alone; idle is not negative then.
        idle = max(self.idle_fraction, 0)
        blocks = [
            [
                f"Loader alone  {duration(self.t_up_s):>9} per fresh batch{examples}",
                f"Step alone    {duration(self.t_down_s):>9} per update: "
                f"{self._step_words()}",
                *self._slow_step_lines(),
                f"Together      {duration(self.observed_s):>9} per update: the "
                f"accelerator is idle {idle:.0%} of the time",
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
        """Returns the table of factors: all predictions and measurements."""
        unit = "example" if self.batch_size else "batch"
        lines = [
            f"{'Echo factor':<12}{'per update':>12}{f'per fresh {unit}':>20}"
            f"{'measured per update':>22}"
        ]
        measured = {run.factor: run for run in self.runs}
        for factor in sorted({*_PREDICTED_FACTORS, *measured}):
            update_s = self.predicted(factor)
            fresh_s = update_s * factor / max(self.batch_size, 1)
            run = measured.get(factor)
            seen = duration(run.seconds_per_update) if run else ""
            times = f"{duration(update_s):>12}{duration(fresh_s):>20}{seen:>22}"
            lines.append(f"{factor:<12g}{times}".rstrip())
        return lines


def is_starved(ratio: float) -> bool:
    """Returns whether a trainer with this R waits for its input."""
    return ratio > FED_RATIO


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
