"""Law 10 of an echo: it makes an output as a whole or not at all."""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from echo_jax.echo.laws.harness import Record, Trial, Use, bits_of, close, uses_of
from echo_jax.echo.laws.interruption import Interruption
from echo_jax.echo.tree import tree_map

__all__ = ["all_or_nothing"]

_END = object()
_NO_STATE = object()
# After this many failures in a row, the echo counts as refusing.
_NUM_ATTEMPTS = 5
# How many runs are interrupted, and within how many lines of an output.
_NUM_RUNS, _NUM_LINES = 3, 90


class _Failing(Sequence[Any]):
    """Items whose reads of some numbers fail; with `dies`, no item follows."""

    def __init__(self, items: list[Any], failing: set[int], *, dies: bool = False):
        self._items, self._failing, self._dies = items, failing, dies
        self._reads = itertools.count()
        self._dead = False

    def __len__(self) -> int:
        return 0 if self._dead else len(self._items)

    def __getitem__(self, index: Any) -> Any:
        if self._dead:
            raise IndexError("the upstream is gone")
        if next(self._reads) in self._failing:
            self._dead = self._dies
            raise OSError("a read of the upstream failed")
        return self._items[index]


def all_or_nothing(trial: Trial, record: Record) -> None:
    """Law 10: after any failure, an echo continues correctly or refuses further use."""
    if not trial.num_items:
        return
    last = trial.num_items - 1
    for failing in ({0}, {last // 2}, {last}, {1, 3, last // 2 + 4}):
        echo, _ = trial.start(wrap=lambda items, at=failing: _Failing(items, at))
        _Attempts(trial, record.outputs, "after a failed read").run(echo)
    for at in {0, last // 2, last}:
        echo, _ = trial.start(
            wrap=lambda items, at=at: _Failing(items, {at}, dies=True)
        )
        what = "after the upstream died"
        _Attempts(trial, record.outputs, what, ends_with_it=True).run(echo)
    for at in {0, last // 2, last}:
        _refuse_an_item(trial, record, at)
    for number in range(_NUM_RUNS):
        lines = random.Random(number)
        echo, _ = trial.start()
        attempts = _Attempts(
            trial,
            record.outputs,
            "after an interruption",
            fault=lambda lines=lines: _interruption(lines),
        )
        attempts.run(echo)


def _interruption(lines: random.Random) -> Any:
    """Returns an interruption for every fourth output on average."""
    if lines.random() < 0.75:
        return contextlib.nullcontext()
    return Interruption(lines.randrange(1, _NUM_LINES))


def _refuse_an_item(trial: Trial, record: Record, at: int) -> None:
    """Gives an echo an item of another shape, which it may take or refuse."""

    def reshaped(items: list[Any]) -> list[Any]:
        items[at] = tree_map(lambda leaf: np.stack([leaf, leaf]), items[at])
        return items

    [item] = reshaped([trial.make_item(at)] * (at + 1))[at:]
    expected = [
        [
            use._replace(bits=bits_of(item)) if use.fresh_index == at else use
            for use in output
        ]
        for output in record.outputs
    ]
    echo, _ = trial.start(wrap=reshaped)
    what = f"after item {at} of another shape"
    _Attempts(trial, expected, what, ends_with_it=True, sound=record.outputs).run(echo)


@dataclass
class _Attempts:
    """Takes outputs from an echo that fails, and compares them with those due."""

    trial: Trial
    due: list[list[Use]]
    what: str
    fault: Callable[[], Any] = contextlib.nullcontext
    ends_with_it: bool = False  # A refusal is the end: no restore helps.
    # The outputs over a sound upstream, if they differ from ``due``.
    sound: list[list[Use]] = field(default_factory=list)

    def run(self, echo: Iterator[Any]) -> None:
        """Runs to the end of the stream, or until the echo refuses for good."""
        done, state, faults = 0, _state_of(echo), 0
        while True:
            output = _attempt(echo, self.fault())
            for _ in range(_NUM_ATTEMPTS):
                if not isinstance(output, BaseException):
                    break
                faults += 1
                self._check_state(echo, done, faults)
                output = _attempt(echo)
            if isinstance(output, BaseException):
                if self.ends_with_it or state is _NO_STATE:
                    break
                echo.set_state(state)  # pyright: ignore[reportAttributeAccessIssue]
                continue
            if output is _END:
                if done < len(self.due):
                    self._fail(done, self.due[done], "the end of the stream")
                break
            uses = uses_of(output)
            if done == len(self.due):
                self._fail(done, "the end of the stream", uses)
            if uses != self.due[done]:
                same = repr(uses) == repr(self.due[done])
                found = f"other content under the tags {uses}" if same else uses
                self._fail(done, self.due[done], found)
            done, state = done + 1, _state_of(echo)
        close(echo)

    def _check_state(self, echo: Any, done: int, faults: int) -> None:
        """Requires that a state, if there is one, follows the last good output."""
        state = _state_of(echo)
        if state is _NO_STATE or faults > 4:
            return  # Further states would not find more, and each takes a run.
        fresh, _ = self.trial.start()
        fresh.set_state(state)
        rest = [uses_of(output) for output in self.trial.limited(fresh)]
        close(fresh)
        due = self.sound or self.due
        what = f"of a state that was saved at output {done} {self.what}"
        self.trial.compare(10, what, due[done:], rest)

    def _fail(self, done: int, expected: object, got: object) -> None:
        self.trial.fail(10, f"at output {done} {self.what}", expected, got)


def _attempt(echo: Iterator[Any], fault: Any = None) -> Any:
    """Returns the next output, the end, or the raised error."""
    try:
        with fault or contextlib.nullcontext():
            return next(echo)
    except StopIteration:
        return _END
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt | AssertionError):
            raise
        return error


def _state_of(echo: Any) -> Any:
    """Returns the echo's state, or `_NO_STATE`."""
    try:
        return echo.get_state()
    except Exception:
        return _NO_STATE
