"""What is measured of a run: its time, its loader, and what its repeats are worth."""

import itertools
import time
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_workload import ON_DEVICE, make_workload, rows_of, run, tiny_config

from echo_jax.studies import read_runs, study_report
from echo_jax.training import Clock, DeviceTime, train

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

ECHOES = {
    "host": {"echo__factor": 2.0, "echo__order": "window_shuffle", "echo__buffer": 4},
    "device": {
        **ON_DEVICE,
        "echo__factor": 2.0,
        "echo__order": "spread",
        "echo__buffer": 16,
    },
}


def branched(workdir, *, every=6, changed=lambda batch: batch, seeds=None, **overrides):
    """Trains with branches; returns the summary, and the evaluations by update."""

    def made(**fields):
        workload = make_workload(tiny_config(**{**overrides, **fields}))
        train, fresh = workload.train_dataset, workload.fresh_dataset
        return replace(
            workload,
            metadata={"data": {"synthetic": True}},
            train_dataset=lambda *args: train(*args).map(changed),
            fresh_dataset=lambda *args: fresh(*args).map(changed),
        )

    def with_seed(seed):
        if seeds is not None:
            seeds.append(seed)
        return made(seed=seed % 2**31)

    config = tiny_config(eval_every=3, probe_repeats=every, **overrides)
    summary = train(config, replace(made(), with_seed=with_seed), workdir)
    return summary, {row["updates"]: row for row in rows_of(workdir, "eval")}


def alike(batch):
    return {k: np.ones_like(x) if k in "xy" else x for k, x in batch.items()}


@pytest.mark.parametrize("echo", ECHOES)
def test_a_branch_trains_on_other_data_and_changes_nothing_of_the_run(tmp_path, echo):
    one, rows = branched(tmp_path / "a", **ECHOES[echo])
    other, without = branched(tmp_path / "b", every=0, **ECHOES[echo])
    assert one["params_sha256"] == other["params_sha256"]
    # Neither before the first update nor where no evaluation follows.
    assert [update for update in rows if "after_fresh" in rows[update]] == [6]
    assert rows[6]["after_fresh"] != rows[9]["eval_loss"]
    for update, row in rows.items():
        assert row["eval_loss"] == without[update]["eval_loss"]
    # On the same data it ends where the run does.
    _, rows = branched(tmp_path / "c", changed=alike, **ECHOES[echo])
    assert rows[6]["after_fresh"] == rows[9]["eval_loss"] != rows[6]["eval_loss"]


def test_every_branch_has_an_order_of_its_own_also_in_a_run_that_was_stopped(tmp_path):
    seeds, fields = [], ECHOES["host"]
    _, rows = branched(tmp_path / "whole", updates=18, seeds=seeds, **fields)
    branched(tmp_path / "cut", updates=8, **fields)
    _, again = branched(tmp_path / "cut", updates=18, **fields)
    branches = {update: row.get("after_fresh") for update, row in rows.items()}
    assert branches[6] and branches[12]
    for update in (9, 12, 15, 18):
        assert again[update].get("after_fresh") == branches[update]
    branched(tmp_path / "other", updates=18, seeds=seeds, seed=1)
    assert len(seeds) == len({0, 1, *seeds}) - 2 == 4
    # A report says what repeats were worth.
    study = read_runs([tmp_path / "whole"])
    notes = study_report(study).notes
    assert any("by 2 branches on fresh data" in note for note in notes)


def test_the_longest_wait_of_a_row_is_named_by_its_update(tmp_path):
    def stall(batch):
        if batch == 20:
            time.sleep(1.0)

    run(tmp_path, on_batch=stall, updates=27, log_every=3, **ECHOES["host"])
    rows = {row["updates"]: row for row in rows_of(tmp_path, "train")}
    assert rows[21]["longest_wait_at"] == 19 and rows[21]["longest_wait_s"] > 0.5
    assert max(rows, key=lambda k: rows[k]["longest_wait_s"]) == 21
    assert all(k - 3 <= r["longest_wait_at"] < k for k, r in rows.items())


def test_every_second_is_in_one_phase():
    now = [100.0]
    clock = Clock(now=lambda: now[0])
    now[0] += 5  # Start-up is a pause.
    with clock.phase("train"):
        now[0] += 1
        with clock.phase("wait"):
            now[0] += 20
        now[0] += 2
        # An error leaves its phase.
        with pytest.raises(KeyError), clock.phase("pause"):
            now[0] += 40
            raise KeyError
    now[0] += 7
    # The seconds before a resumption.
    clock.add({"wall_s": 5.0, "train_s": 3.0, "wait_s": 2.0, "pause_s": 1.0})
    expected = {"wall_s": 28, "train_s": 6, "wait_s": 22, "pause_s": 53}
    assert clock.seconds() == expected


class FakeLoop:
    """A training loop and its device, on a clock of its own."""

    def __init__(self, *, guessed_s):
        self.now = 0.0
        self.work_s = []
        self.in_flight = deque()
        self.device_time = DeviceTime(guessed_s, steps=1, now=lambda: self.now)

    def update(self, *, wait_s, step_s):
        """Waits for data, dispatches, and reads the update before the last one."""
        self.now += wait_s
        self.device_time.look()
        begin_s = max(self.now, self.work_s[-1][1] if self.work_s else 0.0)
        end_s = begin_s + step_s
        self.work_s.append((begin_s, end_s))
        work = self.device_time.sent(self.now, 1, lambda: self.now >= end_s)
        self.in_flight.append((work, end_s))
        if self.device_time.is_due:
            self.wait_for(*self.in_flight[-1])
        while len(self.in_flight) > 2:
            self.wait_for(*self.in_flight.popleft())

    def wait_for(self, work, end_s):
        self.device_time.look()
        self.now = max(self.now, end_s)
        self.device_time.finished(work)

    def true_seconds(self):
        """How long the device worked until now."""
        return sum(max(min(end, self.now) - begin, 0) for begin, end in self.work_s)


@pytest.mark.parametrize(
    ("guessed_s", "wait_s", "share"),
    # A device that never waits is never idle; one that waits works a third of the time.
    [(0.005, 0.0, 1), (0.02, 0.0, 1), (0.028, 0.03, 1 / 3)],
)
def test_a_device_is_measured_whatever_was_guessed(guessed_s, wait_s, share):
    loop = FakeLoop(guessed_s=guessed_s)
    for _ in range(40):
        loop.update(wait_s=wait_s, step_s=0.01)
    assert loop.device_time.step_s == pytest.approx(0.01)
    begin, busy_s = loop.now, loop.device_time.seconds()
    for _ in range(20):
        loop.update(wait_s=wait_s, step_s=0.01)
    worked_s = loop.device_time.seconds() - busy_s
    assert worked_s == pytest.approx(share * (loop.now - begin))
    # A slower step is noticed while the run goes on.
    for _ in range(70):
        loop.update(wait_s=wait_s, step_s=0.02)
    assert loop.device_time.step_s == pytest.approx(0.02)


def test_a_program_that_is_done_when_its_call_returns_is_measured():
    now = [0.0]
    device_time = DeviceTime(1.0, steps=2, now=lambda: now[0])
    now[0] += 5.0
    device_time.look()
    # A dispatch of another size is work, and no measurement.
    for updates, took_s, total_s in ((2, 0.4, 0.4), (1, 0.3, 0.7)):
        sent_s, now[0] = now[0], now[0] + took_s
        device_time.sent(sent_s, updates, lambda: True)
        assert device_time.seconds() == pytest.approx(total_s)
        assert device_time.step_s == pytest.approx(0.2)


WAITS = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.007, 0.03, 0.2]), min_size=1)
STEPS = st.just([0.01]) | st.lists(st.floats(1e-4, 0.1), min_size=1)


@settings(max_examples=40)
@example(waits=[0.0, 0.004, 0.007, 0.0, 0.0], steps=[0.01], guessed_s=0.01)
@given(waits=WAITS, steps=STEPS, guessed_s=st.just(0.01) | st.floats(1e-4, 0.1))
def test_no_stretch_holds_more_work_than_time(waits, steps, guessed_s):
    """Steady steps are exact, and measured or as they were guessed."""
    loop = FakeLoop(guessed_s=guessed_s)
    before_s, busy_s = 0.0, 0.0
    pairs = zip(itertools.cycle(waits), itertools.cycle(steps), strict=False)
    for wait_s, step_s in itertools.islice(pairs, 60):
        loop.update(wait_s=wait_s, step_s=step_s)
        now_busy_s = loop.device_time.seconds()
        assert -1e-9 <= now_busy_s - busy_s <= loop.now - before_s + 1e-9
        before_s, busy_s = loop.now, now_busy_s
        if steps == [0.01]:
            found = loop.device_time.step_s
            assert found == pytest.approx(0.01) or found == guessed_s
            if guessed_s == 0.01:
                assert now_busy_s == pytest.approx(loop.true_seconds())
