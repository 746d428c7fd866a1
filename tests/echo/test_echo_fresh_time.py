"""How long a fresh batch takes, on clocks that are made up."""

import math
import random
from collections import deque

import pytest

from echo_jax.echo.instrument.fresh_time import UNSEEN, FreshTime


class Pipeline:
    """Makes elements one after another, ahead of whoever takes them."""

    def __init__(self, seconds, *, holds):
        self.now = 0.0
        self._seconds, self._holds = seconds, holds
        self._done_s = deque()  # when each element that waits was, or will be, done
        self._last_s = 0.0

    def _make(self, began_s):
        self._last_s = max(self._last_s, began_s) + self._seconds
        self._done_s.append(self._last_s)

    def take(self):
        while len(self._done_s) < max(self._holds, 1):
            self._make(self.now)
        self.now = max(self.now, self._done_s.popleft())
        if self._holds:
            self._make(self.now)


def watched(pipeline, gaps, *, holds, per_batch=1):
    """Takes an element, and is then busy for so long, for each gap."""
    time = FreshTime(elements_per_batch=per_batch, held=holds, now=lambda: pipeline.now)
    for gap in gaps:
        began_s = time.now()
        pipeline.take()
        time.took(began_s)
        pipeline.now += gap
    return time


def test_who_waits_all_the_time_sees_what_a_batch_takes():
    time = watched(Pipeline(2.0, holds=0), [0.0] * 101, holds=0)
    assert time.bounds() == (2.0, 2.0)
    items = watched(Pipeline(2.0, holds=0), [0.0] * 101, holds=0, per_batch=8)
    assert items.bounds() == (16.0, 16.0)


def test_a_pipeline_that_holds_elements_is_seen_the_better_the_longer():
    pipeline = Pipeline(2.0, holds=4)
    time = watched(pipeline, [0.5] * 5, holds=4)
    # All four may have been there when the first was taken.
    assert time.bounds()[1] == math.inf
    time = watched(Pipeline(2.0, holds=4), [0.5] * 401, holds=4)
    low, high = time.bounds()
    assert (low, high) == pytest.approx((400 * 1.5 / 404, 400 * 2 / 396))


def test_who_never_waits_sees_only_that_it_is_fast_enough():
    low, high = watched(Pipeline(2.0, holds=4), [5.0] * 401, holds=4).bounds()
    assert (low, high) == pytest.approx((0.0, 5.0 * 400 / 396))


@pytest.mark.parametrize("seed", range(40))
def test_what_a_batch_takes_lies_within_the_bounds(seed):
    chance = random.Random(seed)
    holds, taken = chance.choice([0, 1, 3, 8]), chance.choice([3, 20, 300])
    pipeline = Pipeline(1.0, holds=holds)
    longest = chance.choice([0.0, 1.0, 2.0, 10.0])
    gaps = [chance.choice([0.0, chance.uniform(0, longest)]) for _ in range(taken)]
    low, high = watched(pipeline, gaps, holds=holds).bounds()
    assert low <= 1 + 1e-9 and high >= 1 - 1e-9


def test_nothing_is_known_before_the_second_element_nor_across_a_restart():
    now = [0.0]
    time = FreshTime(elements_per_batch=1, held=0, now=lambda: now[0])
    assert time.bounds() == UNSEEN
    now[0] = 100.0
    time.took(0.0)
    assert time.bounds() == UNSEEN
    now[0] = 103.0
    time.took(101.0)
    assert time.bounds() == (2.0, 3.0)
    time.restart()
    now[0] = 200.0
    time.took(150.0)
    assert time.bounds() == (2.0, 3.0)
