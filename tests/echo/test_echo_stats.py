"""How long a loop waits: what an echo says of loaders whose times are known."""

import logging
import math
import time

import numpy as np
import pytest

import echo_jax as ej
from echo_jax.echo import iterator, stats, upstream

ROWS = 8


class Time:
    """A clock that only moves when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Time()
    monkeypatch.setattr(iterator, "perf_counter", made)
    monkeypatch.setattr(upstream, "perf_counter", made)
    monkeypatch.setattr(stats.time, "perf_counter", made)
    return made


def loader(clock, seconds, stall_at=None):
    for number in range(1000):
        clock.sleep(2.0 if number == stall_at else seconds)
        yield {"x": np.arange(ROWS)}


@pytest.mark.parametrize("fresh_s", [0.005, 0.02, 0.04])
@pytest.mark.parametrize("size", [ROWS, 2 * ROWS])
def test_the_numbers_are_those_of_a_known_loop(clock, fresh_s, size):
    """Each of 100 batches waits for its own fresh rows; a step takes 10 ms."""
    spec = ej.EchoSpec(1, order="consecutive", batch_size=size)
    batches = ej.echo_batches(loader(clock, fresh_s), spec, prefetch=0)
    for _ in range(100):
        next(batches)
        clock.sleep(0.01)
    found, each = batches.stats(), fresh_s * size / ROWS
    assert found["waited_s"] == pytest.approx(100 * each)
    assert found["waited_share"] == pytest.approx(each / (each + 0.01), rel=0.01)
    assert found["fresh_batch_s"] == pytest.approx(each)
    assert found["step_s"] == pytest.approx(0.01)
    assert found["R"] == pytest.approx(each / 0.01)
    assert found["uses_per_fresh"] == 1
    assert "R = " in str(found) and "\n" not in str(found)


def test_a_stall_is_named_by_its_update_and_spans_are_counted_apart(clock):
    spec = ej.EchoSpec(2, order="consecutive", batch_size=ROWS)
    batches = ej.echo_batches(loader(clock, 0.01, stall_at=20), spec, prefetch=0)
    for _ in range(50):
        next(batches)
        clock.sleep(0.01)
    first = batches.stats(since_last=True)
    assert first["longest_wait_s"] == pytest.approx(2.0)
    assert first["longest_wait_at"] == 40
    assert first["waited_s"] == pytest.approx(24 * 0.01 + 2)
    for _ in range(10):
        next(batches)
        clock.sleep(0.01)
    second = batches.stats(since_last=True)
    assert second["longest_wait_s"] == pytest.approx(0.01)
    assert second["waited_s"] == pytest.approx(5 * 0.01)
    assert second["step_s"] == second["fresh_batch_s"] == pytest.approx(0.01)
    assert second["uses_per_fresh"] == 2
    assert batches.stats()["longest_wait_at"] == 40
    assert math.isnan(ej.echo([1], ej.EchoSpec()).stats()["R"])


@pytest.mark.parametrize("fresh_s", [0.002, 0.02])
def test_a_loop_that_waits_is_told_so_now_and_then(clock, fresh_s, caplog):
    spec = ej.EchoSpec(1, order="consecutive", batch_size=ROWS)
    batches = ej.echo_batches(loader(clock, fresh_s), spec, prefetch=0)
    with caplog.at_level(logging.INFO, logger="echo_jax"):
        for _ in range(800):
            next(batches)
            clock.sleep(0.1)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == (2 if fresh_s > 0.01 else 0)
    assert all("waits for data: waited 16" in text for text in told)


def test_a_thread_that_reads_ahead_is_measured_and_nothing_else_changes():
    """The loader sleeps 5 ms, the step 20 ms: nothing waits after the first batch."""

    def slow():
        for number in range(40):
            time.sleep(0.005)
            yield {"x": np.arange(ROWS) + ROWS * number}

    spec = ej.EchoSpec(1, order="consecutive", batch_size=ROWS)
    batches, seen = ej.echo_batches(slow(), spec, prefetch=2), []
    for batch in batches:
        seen.append(batch["x"])
        time.sleep(0.02)
        batches.stats()
    np.testing.assert_array_equal(np.concatenate(seen), np.arange(40 * ROWS))
    found = batches.stats()
    assert found["longest_wait_at"] == 0 and found["ready_batches"] == 0
    assert found["fresh_batch_s"] >= 0.005 and found["waited_s"] > 0
