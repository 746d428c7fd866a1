"""An echo that is interrupted anywhere never gives an item under another's tags."""

import contextlib
import json
import random
import weakref
from dataclasses import replace

import numpy as np
import pytest
from echo_cases import MODES, Stacked, grain_source, mesh_of, spec_of

import echo_jax as ej
from echo_jax.echo.laws import CountingUpstream, Interrupted, Interruption, log_of

SPECS = {"fixed": spec_of("spread", "1.5"), **MODES}
NUM_ITEMS = 16  # a multiple of the batch, which the devices need


class Failed(Exception):
    """What no part of an echo raises."""


def uses_of(output):
    """The fresh index, repeat and content of every use in an output."""
    item, (index, repeat) = output
    x = np.reshape(item["x"], (-1, 2)).tolist()
    return [*zip(np.ravel(index).tolist(), np.ravel(repeat).tolist(), x, strict=True)]


ITEMS = [{"x": np.array([k, -k], np.int32)} for k in range(NUM_ITEMS)]


def stacked(size):
    return Stacked(CountingUpstream(ITEMS), size)


STORES = {
    "items": lambda spec: ej.echo(CountingUpstream(ITEMS), spec, tags=True),
    "batches": lambda spec: ej.echo(
        CountingUpstream(ITEMS), spec, batch=True, tags=True
    ),
    "unbatch": lambda spec: ej.echo_batches(stacked(5), spec, tags=True),
    "grain": lambda spec: iter(ej.grain.echo(grain_source(ITEMS), spec, tags=True)),
    "device": lambda spec: ej.device.echo_batches(
        stacked(spec.batch_size), spec, mesh=mesh_of(1), tags=True
    ),
}


def attempt(call, fault):
    """Calls under an interruption; returns whether it struck, and the result."""
    try:
        with fault:
            return False, call()
    except (Interrupted, Failed):
        return True, None


class Run:
    """Runs of one echo, interrupted again and again, beside an unbroken one."""

    def __init__(self, make_echo, spec, seed):
        self.make_echo, self.spec = make_echo, spec
        self.random = random.Random(seed)
        self.struck = self.refused = 0
        echo = make_echo(spec)
        self.due = [uses_of(output) for output in echo]
        echo.close()

    def fault(self):
        # Most of what is done for an output, and often the end of it.
        line = self.random.randrange(1, self.random.choice([12, 60, 200]))
        return Interruption(line, self.random.choice([Interrupted, Failed]))

    def go(self):
        """Runs once, from start to end."""
        echo = self.make_echo(self.spec)
        done, state = 0, echo.get_state()
        while True:
            try:
                struck, output = attempt(lambda: next(echo), self.fault())
                self.struck += struck
                if struck:
                    output = next(echo)
            except RuntimeError:
                state = self.restore(echo, state)
                continue
            except StopIteration:
                break
            assert uses_of(output) == self.due[done]
            done, state = done + 1, echo.get_state()
        assert done == len(self.due)
        echo.close()

    def restore(self, echo, state):
        """Goes back to the last good state, with an echo that refuses all else."""
        self.refused += 1
        with pytest.raises(RuntimeError):
            next(echo)
        try:
            found = echo.get_state()
        except RuntimeError:
            found = state
        assert found["plan"] == state["plan"]
        found = json.loads(json.dumps(found))
        if self.random.random() < 0.3:
            struck, _ = attempt(lambda: echo.set_state(found), self.fault())
            self.struck += struck
        echo.set_state(found)
        return found


def run_of(store, mode, seed=0):
    spec = SPECS[mode]
    if isinstance(spec, ej.AdaptiveSpec):
        spec = replace(spec, replay=log_of(spec, NUM_ITEMS))
    return Run(STORES[store], spec, seed)


@pytest.mark.parametrize("mode", SPECS)
@pytest.mark.parametrize("store", STORES)
def test_an_interruption_gives_no_wrong_item(store, mode):
    run = run_of(store, mode, seed=1)
    while run.struck < 20:
        run.go()
    assert run.refused


@pytest.mark.parametrize(
    "store", ["items", pytest.param("batches", marks=pytest.mark.slow)]
)
def test_an_interruption_anywhere_in_the_first_output_gives_no_wrong_item(store):
    make_echo, spec = STORES[store], SPECS["fixed"]
    with make_echo(spec) as echo:
        due = [uses_of(output) for output in echo]
    line, struck = 0, True
    while struck:
        line += 1
        with make_echo(spec) as echo:
            state, fault = echo.get_state(), Interruption(line, Interrupted)
            struck, output = attempt(lambda echo=echo: next(echo), fault)
            found = [] if struck else [uses_of(output)]
            try:
                found += [uses_of(output) for output in echo]
            except RuntimeError:
                echo.set_state(state)
                found = [uses_of(output) for output in echo]
            assert found == due
    assert line > 100


@pytest.mark.slow
@pytest.mark.parametrize("store", STORES)
def test_thousands_of_interruptions_give_no_wrong_item(store):
    runs = [run_of(store, mode) for mode in SPECS]
    while sum(run.struck for run in runs) < 1500:
        for run in runs:
            run.go()
    assert sum(run.refused for run in runs) > 150


class Held:
    """What is collected, or ended by hand."""


@pytest.mark.parametrize("by_hand", [False, True])
def test_nothing_is_raised_where_an_echo_is_collected(by_hand):
    ended, struck = [], 0

    def end():
        ended.append(1)
        ended.append(2)

    for line in range(1, 8):
        ended.clear()
        held = [Held()]
        finalizer = weakref.finalize(held[0], end)
        with contextlib.suppress(Interrupted), Interruption(line) as interruption:
            if by_hand:
                finalizer()
            held.clear()
        held.clear()
        struck += interruption.struck and ended == [1]
        if not by_hand:
            assert ended == [1, 2]
    assert struck == by_hand
