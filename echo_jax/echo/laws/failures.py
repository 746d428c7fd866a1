"""Laws 10 and 11 of an echo: it may fail or be interrupted, closed and dropped."""

import contextlib
import dis
import gc
import itertools
import os
import random
import sys
import sysconfig
import threading
import time
from collections import UserList
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

from echo_jax.echo.laws.harness import END, Record, Trial, Use, bits_of, close, uses_of
from echo_jax.echo.tree import tree_map

# After this many failures in a row, the echo counts as refusing.
_NUM_ATTEMPTS = 5
# How many runs are interrupted, and within how many lines of an output.
_NUM_RUNS, _NUM_LINES = 3, 90
# Limits for events that take milliseconds if the law holds: an answer to a second
# thread, and the end of an unneeded thread.
_ANSWER_S = _END_S = 10.0

_LAWS = os.path.dirname(__file__) + os.sep
_ECHO = os.path.dirname(os.path.dirname(_LAWS)) + os.sep
_PATHS = sysconfig.get_paths()
# Only the code of an echo is interrupted, not Python's library or packages.
_LEFT_ALONE = (_LAWS, _PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], "<")


class Interrupted(BaseException):
    """Replaces a `KeyboardInterrupt`; no other code raises it."""


@contextlib.contextmanager
def interruption(line: int) -> Iterator[None]:
    """Raises `Interrupted` before some executed line of an echo's code, from 1 on."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        path = frame.f_code.co_filename
        # An installed echo_jax is itself in a folder that is left alone.
        is_own = path.startswith(_ECHO) and not path.startswith(_LAWS)
        if path.startswith(_LEFT_ALONE) and not is_own:
            return None
        if event == "line" and next(lines) >= line and not _is_spared(frame):
            raise Interrupted("in the middle of an echo")
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # No error can be raised where another echo is being collected.
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()


def _is_spared(frame: FrameType) -> bool:
    """Whether a signal could not raise here, or a tracer cannot raise like a signal."""
    code = dis.get_instructions(frame.f_code)
    rest = itertools.dropwhile(lambda each: each.offset < frame.f_lasti, code)
    four = list(itertools.islice(rest, 4))
    # A `with` line is executed a second time to end its block.
    ends_with = [x.argval for x in four if x.opname == "LOAD_CONST"] == [None] * 3
    # An error that a tracer raises at the start of a handler leaves the handled one to
    # the thread. In Python 3.12, one at the next element of a comprehension skips the
    # except clauses of its function.
    return ends_with or four[0].opname in ("PUSH_EXC_INFO", "FOR_ITER")


class _Watched(UserList[Any]):
    """Items that call ``before`` with the items and the read's number before a read."""

    def __init__(self, items: list[Any], before: Callable[[Any, int], None]):
        super().__init__(items)
        self._before, self._reads = before, itertools.count()

    def __getitem__(self, index: Any) -> Any:
        self._before(self.data, next(self._reads))
        return self.data[index]


def all_or_nothing(trial: Trial, record: Record) -> None:
    """Law 10: after any failure, an echo continues correctly or refuses further use."""
    if not trial.num_items:
        return
    last = trial.num_items - 1
    attempts = partial(_check_attempts, trial, record)
    for reads in ({0}, {last // 2}, {last}, {1, 3, last // 2 + 4}):
        attempts("after a failed read", partial(_fail, reads))
    for at in {0, last // 2, last}:
        dies = partial(_fail, {at}, dies=True)
        attempts("after the upstream died", dies, refusal_ends=True)
        item = tree_map(lambda leaf: np.stack([leaf, leaf]), trial.make_item(at))
        due = [
            [u._replace(bits=bits_of(item)) if u.fresh_index == at else u for u in uses]
            for uses in record.outputs
        ]
        what, puts = f"after item {at} of another shape", partial(_put, at, item)
        attempts(what, puts, due=due, refusal_ends=True)
    for number in range(_NUM_RUNS):
        attempts("after an interruption", lines=random.Random(number))


def _fail(reads: set[int], items: list[Any], read: int, dies: bool = False) -> None:
    """Fails at some reads; if the upstream dies there, no item follows."""
    if read in reads:
        if dies:
            items.clear()
        raise OSError("a read of the upstream failed")


def _put(at: int, item: Any, items: list[Any], read: int) -> None:
    items[at] = item


def _check_attempts(
    trial: Trial,
    record: Record,
    what: str,
    before: Callable[[list[Any], int], None] = lambda items, read: None,
    *,
    due: list[list[Use]] | None = None,  # the outputs, if the items are others
    lines: random.Random | None = None,  # interrupts every fourth output on average
    refusal_ends: bool = False,  # no restore helps
) -> None:
    """Takes outputs from an echo that fails, and compares them with those due."""
    echo, _ = trial.start(partial(_Watched, before=before))
    due_to_end = [*(due or record.outputs), END]
    outputs, state, failures = [], _state_of(echo), 0
    while len(outputs) < len(due_to_end):
        line = 0
        if lines and not failures and lines.random() >= 0.75:
            line = lines.randrange(1, _NUM_LINES)
        output = _attempt(echo, line)
        if not isinstance(output, BaseException):
            outputs.append(output)
            trial.compare(what, due_to_end[: len(outputs)], outputs)
            state, failures = _state_of(echo), 0
            continue
        failures += 1
        # A state, if there is one, must follow the last good output.
        if (after := _state_of(echo)) is not None:
            where = f"of a state that was saved at output {len(outputs)} {what}"
            rest = record.outputs[len(outputs) :]
            trial.compare(where, rest, trial.run(after).outputs)
        if failures == _NUM_ATTEMPTS:
            if refusal_ends or state is None:
                break
            echo.set_state(state)
            failures = 0
    close(echo)


def _attempt(echo: Any, line: int = 0) -> Any:
    """Returns the uses of the next output, `END` or the raised error."""
    try:
        with interruption(line) if line else contextlib.nullcontext():
            output = next(echo, END)
        return output if output is END else uses_of(output)
    except (KeyboardInterrupt, AssertionError):
        raise
    except BaseException as error:
        return error


def _state_of(echo: Any) -> Any:
    """Returns the echo's state; None if it gives none."""
    with contextlib.suppress(Exception):
        return echo.get_state()


def one_consumer(trial: Trial, record: Record) -> None:
    """Law 11: a second thread is refused, a close is final, no thread stays."""
    if not trial.num_items:
        return
    _check_two_threads(trial, record)
    before = set(threading.enumerate())
    for taken in (0, 1):
        _check_close(trial, taken, before)
    echo, _ = trial.start()
    next(echo)
    del echo
    _check_threads(trial, before, "of an echo that was dropped")


def _check_two_threads(trial: Trial, record: Record) -> None:
    """Requests an output while another thread waits for one."""
    started, released = threading.Event(), threading.Event()

    def wait(items: list[Any], read: int) -> None:
        started.set()
        released.wait(_ANSWER_S)

    echo, _ = trial.start(partial(_Watched, before=wait))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(_attempt, echo)
        if not started.wait(_ANSWER_S):
            trial.fail("at the start", "a read of the upstream", "none")
        # An echo that does not refuse this thread lets it wait, or gives an output.
        answer = _attempt(echo)
        released.set()
        if not isinstance(answer, ValueError):
            where = "where another thread waits for an output"
            trial.fail(where, "a ValueError at once", answer)
    outputs = [first.result(), *map(uses_of, trial.limited(echo))]
    close(echo)
    trial.compare("after another thread was refused", record.outputs, outputs)


def _check_close(trial: Trial, taken: int, before: set[threading.Thread]) -> None:
    """Closes an echo after some outputs, in two ways, and requests more."""
    echo, _ = trial.start()
    names = ("close", "__enter__", "__exit__")
    if missing := [name for name in names if not hasattr(echo, name)]:
        trial.fail("of a new echo", "a context manager with close", missing)
    if echo.__enter__() is not echo:
        trial.fail("at the start of a with", "the echo itself", "another")
    for _ in range(taken):
        next(echo)
    ends = {"close": echo.close, "the with": partial(echo.__exit__, None, None, None)}
    for name in reversed(ends) if taken else ends:
        ends[name]()
        for _ in range(2):
            found = _attempt(echo)
            if not isinstance(found, ValueError):
                trial.fail(f"after {name}", "a ValueError", repr(found))
        _check_threads(trial, before, "of an echo that was closed")


def _check_threads(trial: Trial, before: set[threading.Thread], where: str) -> None:
    """Fails if an echo leaves a thread behind."""
    deadline = time.monotonic() + _END_S
    while left := set(threading.enumerate()) - before:
        if time.monotonic() > deadline:
            trial.fail(where, "no thread left", sorted(map(str, left)))
        gc.collect()
        time.sleep(0.001)
