from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_jax.training.clock import Clock, DeviceTime


def test_every_second_is_in_one_phase():
    time = [100.0]
    clock = Clock(now=lambda: time[0])
    time[0] += 5  # Start-up is a pause.
    with clock.phase("train"):
        time[0] += 1
        with clock.phase("wait"):
            time[0] += 20
            assert clock.seconds()["wait_s"] == 20
        time[0] += 2
        with clock.phase("pause"):
            time[0] += 40
    time[0] += 7
    assert clock.seconds() == {
        "wall_s": 23,
        "train_s": 3,
        "wait_s": 20,
        "pause_s": 52,
    }


def test_an_error_leaves_its_phase():
    time = [0.0]
    clock = Clock(now=lambda: time[0])
    with pytest.raises(KeyError), clock.phase("wait"):
        raise KeyError
    time[0] += 3
    assert clock.seconds()["pause_s"] == 3


def test_adds_the_seconds_before_a_resumption():
    time = [0.0]
    clock = Clock(now=lambda: time[0])
    clock.add({"wall_s": 5.0, "train_s": 3.0, "wait_s": 2.0, "pause_s": 1.0})
    with clock.phase("train"):
        time[0] += 4
    assert clock.seconds() == {
        "wall_s": 9,
        "train_s": 7,
        "wait_s": 2,
        "pause_s": 1,
    }


class FakeLoop:
    """A training loop and its device, on a clock that is made up."""

    def __init__(self, *, guessed_s):
        self.now = 0.0
        self.ends = []
        self.work_s = []
        self.in_flight = deque()
        self.device_time = DeviceTime(guessed_s, steps=1, now=lambda: self.now)

    def update(self, *, wait_s, step_s):
        """Waits for data, dispatches, and reads the update before the last one."""
        self.now += wait_s
        self.device_time.look()
        begin_s = max(self.now, self.ends[-1] if self.ends else 0.0)
        end_s = begin_s + step_s
        self.ends.append(end_s)
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


def test_a_device_that_never_waits_is_never_idle():
    """Also if the step was measured as half of what it is in the run, or double."""
    for guessed_s in (0.005, 0.02):
        loop = FakeLoop(guessed_s=guessed_s)
        for _ in range(10):
            loop.update(wait_s=0.0, step_s=0.01)
        assert loop.device_time.step_s == pytest.approx(0.01)
        assert loop.device_time.seconds() == pytest.approx(loop.now)


def test_a_starved_device_is_measured_now_and_then():
    loop = FakeLoop(guessed_s=0.028)
    for _ in range(40):
        loop.update(wait_s=0.03, step_s=0.01)
    assert loop.device_time.step_s == pytest.approx(0.01)
    begin, busy_s = loop.now, loop.device_time.seconds()
    for _ in range(20):
        loop.update(wait_s=0.03, step_s=0.01)
    # A third of the time: 10 ms of every 30 ms.
    elapsed_s = loop.now - begin
    assert elapsed_s == pytest.approx(20 * 0.03)
    assert loop.device_time.seconds() - busy_s == pytest.approx(elapsed_s / 3)


def test_a_slower_step_is_noticed_while_the_run_goes_on():
    loop = FakeLoop(guessed_s=0.01)
    for step_s in (0.01, 0.02):
        for _ in range(40):
            loop.update(wait_s=0.0, step_s=step_s)
        assert loop.device_time.step_s == pytest.approx(step_s)


def test_a_program_that_is_done_when_its_call_returns_is_measured():
    time = [0.0]
    device_time = DeviceTime(1.0, steps=2, now=lambda: time[0])
    time[0] += 5.0
    device_time.look()
    sent_s, time[0] = time[0], time[0] + 0.4
    device_time.sent(sent_s, 2, lambda: True)
    assert device_time.seconds() == pytest.approx(0.4)
    assert device_time.step_s == pytest.approx(0.2)
    # A dispatch of another size is work, and no measurement.
    sent_s, time[0] = time[0], time[0] + 0.3
    device_time.sent(sent_s, 1, lambda: True)
    assert device_time.seconds() == pytest.approx(0.7)
    assert device_time.step_s == pytest.approx(0.2)


WAITS = st.lists(st.sampled_from([0.0, 0.001, 0.004, 0.03, 0.2]), min_size=1)


@given(waits=WAITS)
def test_of_steady_steps_the_time_at_work_is_exact(waits):
    loop = FakeLoop(guessed_s=0.01)
    for wait_s in waits:
        loop.update(wait_s=wait_s, step_s=0.01)
        assert loop.device_time.seconds() == pytest.approx(loop.true_seconds())


@given(
    waits=WAITS,
    steps=st.lists(st.floats(1e-4, 0.1), min_size=1),
    guessed_s=st.floats(1e-4, 0.1),
)
def test_no_stretch_holds_more_work_than_time(waits, steps, guessed_s):
    """Whatever was guessed, and however steps vary."""
    loop = FakeLoop(guessed_s=guessed_s)
    before_s, busy_s = 0.0, 0.0
    for number in range(60):
        loop.update(
            wait_s=waits[number % len(waits)], step_s=steps[number % len(steps)]
        )
        now_busy_s = loop.device_time.seconds()
        assert -1e-9 <= now_busy_s - busy_s <= loop.now - before_s + 1e-9
        before_s, busy_s = loop.now, now_busy_s
