"""The instrument measures what a simulated machine does, in simulated time, exactly."""

import dataclasses
import itertools
import json
import os
from collections import deque
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

import echo_jax as ej
from benchmarks.simulation import service_times
from echo_jax.echo.instrument.advice import OptionNames

# The echo factors that are measured.
EACH = (1, 2, 3, 4)
BATCH = {"x": np.zeros((32, 10), np.uint8), "y": np.zeros(32, np.int32)}


class Machine:
    """A clock, and a device that works through a queue of steps."""

    def __init__(self, step_s=1.0, is_synchronous=False):
        self.time = self.device_free = 0.0
        self.step_s = step_s if callable(step_s) else lambda: step_s
        self.is_synchronous = is_synchronous
        self.phase = ""

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def step(self, batch):
        assert batch is not None
        self.device_free = max(self.device_free, self.time) + self.step_s()
        output = Output(self, self.device_free)
        if self.is_synchronous:
            output.block_until_ready()
        return output


@dataclasses.dataclass
class Output:
    """What a step returns: there from some time on."""

    machine: Machine
    ready: float

    def block_until_ready(self):
        self.machine.time = max(self.machine.time, self.ready)


class SleepingLoader:
    """Makes a batch when it is asked for one."""

    opened = closed = 0

    def __init__(self, machine, load_s, length=50):
        self.machine, self.length = machine, length
        self.load_s = load_s if callable(load_s) else lambda: load_s
        self.kept = []  # Python closes a generator that nobody holds.

    def __iter__(self):
        self.kept.append(self.batches())
        return self.kept[-1]

    def batches(self):
        self.opened += 1
        try:
            for _ in range(self.length):
                self.machine.sleep(self.load_s())
                yield BATCH
        finally:
            self.closed += 1


class PrefetchingLoader:
    """Makes batches on its own, until so many are ready and not taken."""

    def __init__(self, machine, service_s, capacity):
        self.machine, self.service_s = machine, iter(service_s)
        self.taken_at = deque([machine.time] * capacity)
        self.made_at = machine.time

    def __iter__(self):
        return self

    def __next__(self):
        # A batch is begun when the one before is made and there is room for it.
        begun = max(self.made_at, self.taken_at.popleft())
        self.made_at = begun + next(self.service_s)
        self.machine.time = max(self.machine.time, self.made_at)
        self.taken_at.append(self.machine.time)
        return BATCH


def run(machine, loader, *, step=None, thread_time=float, **options):
    """Probes by the machine's clock; the thread's says for how long it computed."""
    done = []

    def on_progress(what, part):
        machine.phase = what
        done.append(part)
        assert done == sorted(done) and part <= 1

    options = {"seconds": 1000.0, "on_progress": on_progress, **options}
    clock = SimpleNamespace(perf_counter=machine.now, thread_time=thread_time)
    with mock.patch("echo_jax.echo.instrument.measure.time", clock):
        return ej.probe(loader, step or machine.step, **options)


def run_prefetching(load_s, step_s=1.0, capacity=4, **options):
    machine = Machine(step_s)
    service = itertools.repeat(load_s) if isinstance(load_s, float) else load_s
    return run(machine, PrefetchingLoader(machine, service, capacity), **options)


def exactly(value):
    return pytest.approx(value, rel=1e-9)


def words(report):
    return " ".join(str(report).split())


@pytest.mark.parametrize("load_s", [0.25, 1.0, 4.0])
def test_a_loader_without_prefetching_is_measured_exactly(load_s):
    machine = Machine(step_s=1.0)
    # An iterable that ends starts again, and every iterator is closed.
    loader = SleepingLoader(machine, load_s, length=3)
    report = run(machine, loader)
    assert (report.t_up_s, report.t_down_s) == (exactly(load_s), exactly(1.0))
    assert (report.ratio_low, report.ratio_high) == (exactly(load_s),) * 2
    # The device works while the next batch is loaded.
    assert report.measured_s[1] == exactly(max(load_s, 1.0))
    assert report.idle_fraction == pytest.approx(1 - 1 / max(load_s, 1.0), abs=1e-9)
    assert report.seconds == exactly(machine.time)
    assert loader.opened == loader.closed > 2


@pytest.mark.parametrize(
    ("load_s", "capacity"), [(0.5, 64), (1.0, 64), (2.5, 4), (4.0, 1), (4.0, 64)]
)
def test_what_a_loader_has_prefetched_is_not_mistaken_for_its_speed(load_s, capacity):
    machine = Machine(step_s=1.0)
    loader = PrefetchingLoader(machine, itertools.repeat(load_s), capacity)
    machine.sleep(10_000)  # Long since full.
    report = run(machine, loader)
    assert (report.t_up_s, report.t_down_s) == (exactly(load_s), exactly(1.0))
    assert report.measured_s[1] == exactly(max(load_s, 1.0))
    assert report.measured_s == {e: exactly(max(load_s / e, 1.0)) for e in EACH}


def test_a_bursty_loader_is_measured_in_its_mean_and_its_interval_contains_it():
    ratios, covered = [], 0
    for seed in range(40):
        service = service_times("bursty", 4.0, 5000, seed).tolist()
        report = run_prefetching(service, capacity=1 + 7 * (seed % 2), seconds=4000.0)
        ratios.append(report.ratio)
        covered += report.ratio_low <= 4.0 <= report.ratio_high
    # The median of this storage is 1.6.
    assert np.mean(ratios) == pytest.approx(4.0, rel=0.05)
    # An interval of 95 %; rounds are few, and bursts are no normal distribution.
    assert covered >= 35


def test_loading_and_training_in_turns_is_seen_and_cured_first():
    machine = Machine(step_s=1.0, is_synchronous=True)
    report = run(machine, SleepingLoader(machine, 2.0))
    assert report.measured_s[1] == exactly(3.0)
    assert report.idle_fraction == exactly(2 / 3)
    assert report.contention == pytest.approx(1, abs=0.02)
    assert "take turns" in report.advice[0] and "prefetching" in report.advice[0]


def test_what_a_fast_loader_cannot_explain_is_not_blamed_on_it():
    machine = Machine(step_s=1.0)

    def load_s():
        # Something else disturbs the device whenever both are together.
        if machine.phase.startswith("both"):
            machine.device_free += 1.0
        return 0.05

    report = run(machine, SleepingLoader(machine, load_s, 10**9))
    assert report.idle_fraction > 0.4
    (sentence,) = report.advice
    assert sentence.startswith("Do not echo")
    assert (report.is_starved, report.advised_factor, report.how) == (False, 1.0, "")


@pytest.mark.parametrize(
    ("load_s", "delay", "says"),
    [
        (1.2, 0.6, "0.58 of a fresh|1.17 s instead of 1.72|down 15%|0.57 of|uses=8)"),
        # Slower than the step by itself, but a repeat is worth too little.
        (0.8, 0.4, "Do not echo: echoed twice|1.16 s instead of 1.32 s|0.75"),
        # Less than 5 % may be noise; the slower side hides a delay, too.
        (0.8, 0.06, "Do not echo: echoed twice|takes 1.00 s|than 1.00|is idle 5%"),
        (2.0, 0.01, "Echo every example 2 times|1.00 s instead of 2.00 s|is idle 50%"),
    ],
)
def test_where_loader_and_step_share_cores_the_advice_goes_by_both_together(
    load_s, delay, says
):
    def load():
        if machine.phase.startswith("both"):
            started = max(machine.device_free, machine.time)
            machine.device_free = started + delay * load_s
        return load_s

    machine = Machine(step_s=1.0)
    report = run(machine, SleepingLoader(machine, load, 10**9))
    assert all(said in words(report) for said in says.split("|")), report
    for factor, update_s in report.measured_s.items():
        assert update_s == pytest.approx(report.predicted(factor), rel=0.05)
    # A loader that only waits takes no cores.
    loader, stages = SleepingLoader(machine, load, 10**9), {"read": lambda: None}
    assert "min_uses" not in words(run(machine, loader, stages=stages))


def test_two_steps_are_in_flight_at_most_and_none_while_the_loader_is_alone():
    machine, queued_s = Machine(step_s=1.0), {}

    def load_s():
        ahead_s = machine.device_free - machine.time
        queued_s[machine.phase] = max(queued_s.get(machine.phase, 0.0), ahead_s)
        return 0.01

    batches = iter(SleepingLoader(machine, load_s, 10**9))
    run(machine, batches, seconds=100.0)
    assert next(batches) is BATCH, "the user's own iterator was closed"
    assert queued_s["loader alone"] == 0
    assert [queued_s[f"both, echo factor {e}"] for e in EACH] == [exactly(2.0)] * 4


def test_a_starved_trainer_is_told_how_to_echo():
    report = run_prefetching(8.0, max_uses=4)
    assert report.is_starved
    assert report.advised_factor == 4.0
    # Where the loader sets the pace, calls differ, and windows hold whole cycles.
    assert report.measured_s[4] == exactly(2.0)
    text = words(report)
    assert "take turns" not in text
    for said in (
        "R 8.00 (8.00 to 8.00: 95 % interval over 5 rounds)",
        "the accelerator is idle 88% of the time",
        "Echo every example 4 times",
        "2.00 s instead of 8.00 s, and the accelerator be idle 50% of the time",
        # A quarter of the time for an update, and as many updates as in the studies.
        "to the same loss takes 0.21 to 0.29 of the time",
        # A hundred batches of 32.
        "Keep 3200 examples (44.8 kB), on the accelerator if its memory allows",
        'ej.echo_batches(loader, ej.EchoSpec(factor=4.0, order="spread", buffer=3200, '
        "batch_size=32))",
    ):
        assert said in text
    assert report.how in text
    table = str(report).split("\n\nAdvice")[0]
    assert max(map(len, table.splitlines())) <= 88
    found = json.loads(report.to_json())
    assert (found["ratio"], found["batch_size"]) == (exactly(8.0), 32)
    predicted_s = {f"{e}": exactly(max(8 / e, 1.0)) for e in range(1, 9)}
    assert found["predicted_s"] == predicted_s
    assert found["measured_s"]["4"] == exactly(2.0)
    # A slow loader gets the fewest rounds.
    assert len(run_prefetching(100.0, seconds=20.0).steps.round_means_s) == 3


def with_stages(options=None, **times):
    """Probes stages that wait and compute for known times, at R = 4."""
    machine, clock = Machine(), {"computed": 0.0}

    def stage(waits_s, computes_s):
        def call():
            machine.sleep(waits_s + computes_s)
            clock["computed"] += computes_s

        return call

    return run(
        machine,
        PrefetchingLoader(machine, itertools.repeat(4.0), 4),
        stages={name: stage(*both) for name, both in times.items()},
        thread_time=lambda: clock["computed"],
        options=options,
    )


@pytest.mark.parametrize(
    ("read", "later", "words"),
    [
        ((3.5, 0.25), (0.0, 0.25), ["the loader's threads=4 would hide", "after read"]),
        # Reads that wait together already are left alone.
        ((0.9, 0.1), (0.0, 0.25), ["1 at a time: more would not help", "Echo every"]),
    ],
)
def test_reads_that_wait_one_by_one_are_sent_to_threads_first(read, later, words):
    report = with_stages(read=read, decode=later)
    found = [(stage.name, stage.wall_s, stage.cpu_s) for stage in report.stages]
    assert found == [
        ("read", exactly(sum(read)), exactly(read[1])),
        ("decode", exactly(later[1]), exactly(later[1])),
    ]
    assert all(word in said for word, said in zip(words, report.advice, strict=False))


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (2, "about 1 of 2 cores busy: more would not help"),
        (3, "processes=2 would bring R to 2.0"),
        (8, "processes=4 would bring R to 1.0"),
    ],
)
def test_computing_is_sent_to_free_cores_first(cores, words, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores), raising=False)
    # Two clocks, of which one may say that a stage computed for longer than it took.
    report = with_stages(read=(0.0, 0.1), decode=(-1e-6, 3.9))
    assert words in report.advice[0]
    assert "decode waits 0.00 us" in report.advice[0]


@pytest.mark.parametrize(
    ("placements", "times", "after"),
    [
        ((), {"read": (3.0, 0.0), "decode": (0.0, 0.3), "augment": (0, 0.5)}, "read"),
        (("decode", "augment"), {"read": (3, 0), "decode": (0, 0.3)}, "decode"),
        ((), {"read": (3, 0), "decode": (0, 0.3), "augment": (0, 1.5)}, "augment"),
        ((), {"read": (0.1, 0), "decode": (0, 0.8), "augment": (0, 0.1)}, "decode"),
    ],
)
def test_the_placement_is_the_earliest_that_leaves_no_slow_stage_below_it(
    placements, times, after
):
    options = OptionNames(placements=placements, echo="{after}")
    assert with_stages(options, **times).how == after


@pytest.mark.parametrize(
    ("upstream", "seconds", "message"),
    [
        (iter([BATCH] * 3), 1000.0, "an iterator, ended after 3 batches; give"),
        ([], 1000.0, "the upstream is empty"),
        ([BATCH], float("nan"), "must be above 0"),
    ],
    ids=["iterator", "empty", "nan"],
)
def test_what_cannot_be_measured_is_refused(upstream, seconds, message):
    with pytest.raises(ValueError, match=message):
        run(Machine(), upstream, seconds=seconds)


def test_a_step_whose_end_cannot_be_seen_is_refused():
    for output in (None, object()):
        said = f"returned a {type(output).__name__}, which says nothing"
        with pytest.raises(TypeError, match=said):
            ej.probe([BATCH], lambda batch, output=output: output)
    with pytest.raises(TypeError, match=r"must return \(state, output\)"):
        ej.probe([BATCH], lambda state, batch: state, state=1)


def test_a_state_is_handed_on_and_never_waited_for():
    machine, steps = Machine(), itertools.count()

    class Donated:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            raise AssertionError("donated to the next step")

    def step(state, batch):
        assert state.step == next(steps)
        return Donated(state.step + 1), {"loss": machine.step(batch)}

    report = run(machine, SleepingLoader(machine, 2.0), step=step, state=Donated(0))
    assert (report.t_up_s, report.t_down_s) == (exactly(2.0), exactly(1.0))


# --- A step that is slow now and then.

FAST_S, SLOW_S, LOAD_S = 0.002, 0.030, 0.010


def probed(steps, *, load_s=LOAD_S, seconds=10.0):
    """Probes steps of these times, which are thousands."""
    step_s = iter(steps).__next__
    # To look for arrays in each output would take a quarter of the time.
    options = {"seconds": seconds, "wait": Output.block_until_ready}
    return run_prefetching(load_s, step_s, capacity=16, **options)


def every(period, slow_s=SLOW_S):
    return itertools.cycle([FAST_S] * (period - 1) + [slow_s])


def test_slow_steps_that_recur_are_counted_and_the_advice_follows():
    report = probed(every(4))
    # Three of 2 ms and one of 30 ms; the median says 2 ms, and R = 5.
    assert report.t_down_s == pytest.approx(0.009, rel=0.03)
    assert report.ratio_low < 10 / 9 < report.ratio_high
    said = "took 30.0 ms, the others 2.00 ms (again and again: counted)"
    assert said in words(report)
    assert report.advised_factor == 1.1
    # At 8 ms a batch the loader is the faster side, which by the median it is not.
    assert probed(every(4), load_s=0.008).advised_factor == 1.0


@pytest.mark.parametrize(("period", "slow_s"), [(100, 0.2), (1000, 1.0)])
def test_slow_steps_that_are_rare_leave_the_ratio_open(period, slow_s):
    """At 0.4 s a window of the shortest length holds one slow step, or none."""
    report = probed(every(period, slow_s), seconds=20.0)
    true = LOAD_S / (FAST_S + (slow_s - FAST_S) / period)
    assert report.ratio_low <= true <= report.ratio_high


def test_a_ratio_that_may_be_on_either_side_of_one_is_to_be_measured_for_longer():
    report = probed(every(100, 0.2), load_s=0.004, seconds=20.0)
    assert "on either side of 1: measure for longer with seconds" in words(report)


def test_a_disturbance_of_one_step_is_left_out_but_not_concealed():
    # The 800th step is made while the step is alone.
    steps = itertools.chain([FAST_S] * 800, [1.5], itertools.repeat(FAST_S))
    report = probed(steps, seconds=20.0)
    assert report.steps.slow == 1
    assert report.t_down_s == exactly(FAST_S)
    assert report.advised_factor == 4.0
    assert "1 took 1.50 s, the others 2.00 ms (rarely: left out" in words(report)
    # If it is the step's own it counts, and the interval holds that too.
    counted_s = FAST_S + 1.498 / report.steps.timed
    assert report.ratio_low < LOAD_S / counted_s < 5 <= report.ratio_high


def test_irregular_slow_steps_are_counted_and_the_interval_holds_the_true_ratio():
    """Of 20 intervals that hold it 95 times in 100, less than 17 do once in 60."""
    covered = 0
    for seed in range(20):
        is_slow = np.random.default_rng(seed).random(10_000) < 0.2
        report = probed(np.where(is_slow, SLOW_S, FAST_S).tolist())
        assert report.steps.recur
        covered += report.ratio_low < LOAD_S / 0.0076 < report.ratio_high
    assert covered >= 17


def test_a_machine_that_slows_down_does_not_change_the_ratio():
    machine = Machine()
    machine.step_s = lambda: 1 + machine.time / 1000
    report = run(machine, SleepingLoader(machine, lambda: 2 * machine.step_s()))
    assert report.ratio_low < 2 < report.ratio_high
