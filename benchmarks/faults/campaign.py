"""Says what a trial of a fault is given, and how it may end."""

import enum
import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Verdict(enum.Enum):
    """How a trial ends."""

    HELD = "held"  # bit-exact, or refused in a sentence, or the checkpoint before used
    WRONG = "wrong"  # another result
    SILENT = "silent"  # damage was not noticed, and the result differs
    HUNG = "hung"  # over its time limit
    ESCAPED = "escaped"  # a file outside was read or written, or code was run
    TRACEBACK = "traceback"  # a traceback, a crash or memory used up: no sentence


@dataclass(frozen=True)
class Outcome:
    """How a trial ended, and in what circumstances."""

    verdict: Verdict
    note: str = ""


class OverdueError(Exception):
    """A command takes longer than it may."""


class CannotBeginError(Exception):
    """A campaign cannot make what its trials need; no trial has failed."""


class NotHereError(Exception):
    """This machine does not allow a trial; it does not count."""


class Bench:
    """The folder of a trial, its count of kills, and what all trials start from."""

    def __init__(self, root: Path):
        self._root, self._made = root, {}
        self.begin()

    def begin(self) -> None:
        """Makes an empty folder for the next trial."""
        self.folder, self.kills = Path(tempfile.mkdtemp(dir=self._root)), 0

    def once(self, name: str, make: Callable[[Path], Any]) -> Any:
        """Returns the result of ``make(folder)``, which is called once a campaign."""
        if name not in self._made:
            folder = self._root / name
            folder.mkdir()
            self._made[name] = make(folder)
        return self._made[name]


@dataclass(frozen=True)
class Fault:
    """A fault, and a function that tries it for each kind of run or file."""

    name: str
    title: str
    trials: Mapping[str, Callable[[random.Random, Bench], Outcome]]

    def kind(self, number: int) -> str:
        """Returns the kind of a trial; numbers go round all kinds."""
        return [*self.trials][number % len(self.trials)]


def held_if(holds: bool, note: str, verdict: Verdict = Verdict.WRONG) -> Outcome:
    """Returns the outcome HELD, or another one."""
    return Outcome(Verdict.HELD if holds else verdict, note)


def run_trial(fault: Fault, seed: int, number: int, bench: Bench) -> Outcome:
    """Runs one trial, which follows from the seed and its number."""
    rng = random.Random(f"{fault.name} {seed} {number}")
    bench.begin()
    try:
        return fault.trials[fault.kind(number)](rng, bench)
    except OverdueError as error:
        return Outcome(Verdict.HUNG, str(error))
    except (CannotBeginError, NotHereError):
        raise
    except Exception as error:
        return Outcome(Verdict.TRACEBACK, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(bench.folder, ignore_errors=True)
