"""Trials of faults: how one ends, how many are run, and who counts them.

A trial is a function of the seed and its number, so that one that failed is run again
by the command that is printed with it.
"""

import contextlib
import enum
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from echo_jax.terminal.failures import forget, sentence

T = TypeVar("T")


class Verdict(enum.Enum):
    """How a trial ends."""

    HELD = "held"  # equal to the bit, or detected and named, or a fallback used
    WRONG = "wrong"  # another result
    SILENT = "silent"  # damage was not noticed, and the result differs
    HUNG = "hung"  # over its limit of time
    ESCAPED = "escaped"  # a file outside was read or written, or code was run
    TRACEBACK = "traceback"  # a traceback, a crash, or memory used up: no sentence


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and what is to be known about it."""

    verdict: Verdict
    note: str = ""


class Overdue(BaseException):
    """A trial took longer than it may; no ``except Exception`` swallows it."""


class CannotBeginError(Exception):
    """What trials start from cannot be made: the campaign, not a trial, has failed."""


class NotHereError(Exception):
    """What a kind of trial needs is not allowed on this machine: it does not count."""


class Bench:
    """Where trials work: a folder for each, and what several of them start from.

    Attributes:
      folder: Of the trial, empty at its start.
      kills: Of the trial, those that struck a process that was running.
    """

    def __init__(self, root: Path):
        self._root, self._made = root, {}
        self._limit_s = 0.0
        self.folder, self.kills = root, 0

    def once(self, name: str, make: Callable[[Path], T]) -> T:
        """Returns what is made once for all trials; it does not count for their time.

        Args:
          name: Of what is made.
          make: Makes it, in a folder of its own.
        """
        if name not in self._made:
            with _no_alarm():
                folder = self._root / name
                folder.mkdir()
                self._made[name] = make(folder)
            if self._limit_s:
                signal.setitimer(signal.ITIMER_REAL, self._limit_s)
        return self._made[name]

    def place(self, name: str) -> Path:
        """Returns the folder in which a thing was made once."""
        return self._root / name

    @contextlib.contextmanager
    def trial(self, limit_s: float) -> Iterator[None]:
        """Gives a trial its folder, and ends it when its time is over."""

        def end(signum: int, frame: object) -> None:
            raise Overdue

        self.folder, self.kills = Path(tempfile.mkdtemp(dir=self._root)), 0
        before = signal.signal(signal.SIGALRM, end)
        self._limit_s = limit_s
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._limit_s = 0.0
            signal.signal(signal.SIGALRM, before)
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _no_alarm() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_REAL, 0)
    yield


Trial = Callable[[random.Random, Bench], Outcome]


@dataclass(frozen=True)
class Fault:
    """A fault, and a trial of it for each kind of run or file.

    Attributes:
      name: As in ``"F4"``.
      title: What is done.
      holds: What a trial that held has shown.
      trials: By kind; trial ``n`` is of kind ``n`` modulo their number.
      limit_s: What takes longer hangs, however busy the machine is.
    """

    name: str
    title: str
    holds: str
    trials: Mapping[str, Trial]
    limit_s: float = 60.0

    def kind(self, number: int) -> str:
        """The kind of a trial."""
        return [*self.trials][number % len(self.trials)]


@dataclass
class Tally:
    """How the trials of a kind ended.

    Attributes:
      counts: By verdict.
      failures: Number, verdict and note of each trial that did not hold.
      kills: Those that struck a process that was running.
    """

    counts: Counter[Verdict] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0

    @property
    def trials(self) -> int:
        """How many there were."""
        return self.counts.total()

    def add(self, number: int, outcome: Outcome, kills: int) -> None:
        """Counts one more.

        Args:
          number: Of the trial.
          outcome: How it ended.
          kills: See `Bench`.
        """
        self.counts[outcome.verdict] += 1
        self.kills += kills
        if outcome.verdict is not Verdict.HELD:
            verdict = outcome.verdict.value
            failure = {"trial": number, "verdict": verdict, "note": outcome.note}
            self.failures.append(failure)


def held(note: str = "") -> Outcome:
    """A trial that ended as it should."""
    return Outcome(Verdict.HELD, note)


def said(error: Exception) -> Outcome:
    """Whether an error is a sentence of ours: then what is wrong was detected."""
    words = sentence(error)
    forget(error)
    is_ours = not words.startswith("unexpected ") and not isinstance(error, MemoryError)
    return Outcome(Verdict.HELD if is_ours else Verdict.TRACEBACK, words)


def unless_equal(found: object, whole: object, verdict: Verdict, note: str) -> Outcome:
    """HELD if two things are equal, or another verdict."""
    return held(note) if found == whole else Outcome(verdict, note)


def run_trial(fault: Fault, seed: int, number: int, bench: Bench) -> Outcome:
    """Runs one trial.

    Args:
      fault: Of what.
      seed: Of the campaign.
      number: Of the trial.
      bench: Where.

    Raises:
      CannotBeginError: What it starts from cannot be made.
      NotHereError: It cannot be run here.
    """
    rng = random.Random(f"{fault.name} {seed} {number}")
    try:
        with bench.trial(fault.limit_s):
            return fault.trials[fault.kind(number)](rng, bench)
    except Overdue:
        return Outcome(Verdict.HUNG, f"more than {fault.limit_s:g} s")
    except (CannotBeginError, NotHereError):
        raise
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
        forget(error)
        return Outcome(Verdict.TRACEBACK, note)


def run_campaign(
    fault: Fault,
    seed: int,
    bench: Bench,
    *,
    trials: int | None = None,
    seconds: float | None = None,
    on_trial: Callable[[int, str, Outcome], None] = lambda *what: None,
    on_skip: Callable[[str, str], None] = lambda *what: None,
) -> Iterator[dict[str, Tally]]:
    """Runs trials until their number or the time is reached.

    Args:
      fault: Of what.
      seed: Of the campaign.
      bench: Where.
      trials: How many; None for as many as the time allows.
      seconds: How long new ones are begun; None for no limit.
      on_trial: Told the number of each that has ended, its kind, and how it ended.
      on_skip: Told a kind that cannot be run here, once, and why.

    Yields:
      The counts by kind, after each trial: an interrupted campaign has them.
    """
    tallies = {kind: Tally() for kind in fault.trials}
    started, number = time.monotonic(), 0
    skipped: set[str] = set()
    while (trials is None or number < trials) and (
        seconds is None or time.monotonic() - started < seconds
    ):
        kind = fault.kind(number)
        try:
            if kind not in skipped:
                outcome = run_trial(fault, seed, number, bench)
                tallies[kind].add(number, outcome, bench.kills)
                on_trial(number, kind, outcome)
        except NotHereError as error:
            skipped.add(kind)
            on_skip(kind, str(error))
        number += 1
        yield tallies
