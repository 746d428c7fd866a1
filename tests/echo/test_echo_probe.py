"""The instrument measures what a simulated machine does, exactly.

Time is simulated: loader, device and clock are objects that agree on it. So the
numbers are known, and no real time is asserted.
"""

import dataclasses
import importlib
import itertools
import json
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.simulation import service_times
from echo_jax.echo.instrument.advice import OptionNames
from echo_jax.echo.instrument.probe import probe
from echo_jax.echo.instrument.stopwatch import BoundedSteps, time_calls, wait_for

BATCH = {"x": np.zeros((32, 10), np.uint8), "y": np.zeros(32, np.int32)}


class Machine:
    """A clock, and a device that works through a queue of steps."""

    def __init__(self, step_s=1.0, is_synchronous=False):
        self.time = 0.0
        self.step_s = step_s if callable(step_s) else lambda: step_s
        self.is_synchronous = is_synchronous
        self.device_free = 0.0
        self.steps = 0

    def now(self):
        return self.time

    def sleep(self, seconds):
        self.time += seconds

    def step(self, batch):
        assert batch is not None
        self.steps += 1
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
    """As of torch without workers: makes a batch when it is asked for one."""

    def __init__(self, machine, load_s, length=50):
        self.machine, self.load_s, self.length = machine, load_s, length

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            self.machine.sleep(self.load_s)
            yield BATCH


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


def run(machine, loader, *, seconds=1000.0, **options):
    options = {"now": machine.now, "cpu_now": lambda: 0.0, **options}
    return probe(loader, machine.step, seconds=seconds, **options)


def exactly(value):
    return pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize("load_s", [0.25, 1.0, 4.0])
def test_a_loader_without_prefetching_is_measured_exactly(load_s):
    machine = Machine(step_s=1.0)
    report = run(machine, SleepingLoader(machine, load_s))
    assert (report.t_up_s, report.t_down_s) == (exactly(load_s), exactly(1.0))
    assert (report.ratio_low, report.ratio_high) == (exactly(load_s),) * 2
    # The device works while the next batch is loaded.
    assert report.observed_s == exactly(max(load_s, 1.0))
    assert report.idle_fraction == pytest.approx(1 - 1 / max(load_s, 1.0), abs=1e-9)


@pytest.mark.parametrize("capacity", [1, 4, 64])
@pytest.mark.parametrize("load_s", [0.5, 1.0, 4.0])
def test_what_a_loader_has_prefetched_is_not_mistaken_for_its_speed(load_s, capacity):
    machine = Machine(step_s=1.0)
    loader = PrefetchingLoader(machine, itertools.repeat(load_s), capacity)
    machine.sleep(10_000)  # Long since full.
    report = run(machine, loader)
    assert (report.t_up_s, report.t_down_s) == (exactly(load_s), exactly(1.0))
    assert report.observed_s == exactly(max(load_s, 1.0))
    for measured in report.runs:
        assert measured.seconds_per_update == exactly(
            max(load_s / measured.factor, 1.0)
        )


def test_a_fractional_echo_runs_as_fast_as_predicted():
    machine = Machine(step_s=1.0)
    loader = PrefetchingLoader(machine, itertools.repeat(2.5), 4)
    report = run(machine, loader)
    assert report.advised_factor == 2.5
    assert [run.factor for run in report.runs] == [1.0, 2.5]
    assert report.runs[1].seconds_per_update == exactly(1.0)


@pytest.mark.parametrize("capacity", [1, 8])
def test_the_interval_of_a_bursty_loader_contains_the_true_ratio(capacity):
    covered = 0
    for seed in range(100):
        machine = Machine(step_s=1.0)
        service = service_times("bursty", 4.0, 5000, seed).tolist()
        report = run(machine, PrefetchingLoader(machine, service, capacity))
        covered += report.ratio_low <= 4.0 <= report.ratio_high
    # An interval of 95 %; rounds are few, and bursts are no normal distribution.
    assert covered >= 88


def test_a_bursty_loader_is_measured_in_its_mean():
    ratios = []
    for seed in range(100):
        machine = Machine(step_s=1.0)
        service = service_times("bursty", 4.0, 5000, seed).tolist()
        loader = PrefetchingLoader(machine, service, 8)
        ratios.append(run(machine, loader, seconds=4000.0).ratio)
    # The median of this storage is 1.6; a mean of 100 probes varies by 1 %.
    assert np.mean(ratios) == pytest.approx(4.0, rel=0.03)


def test_a_step_that_something_disturbs_does_not_count():
    phases, alone = [], itertools.count()

    def step_s():
        is_disturbed = phases[-1] == "step alone" and next(alone) == 20
        return 30.0 if is_disturbed else 1.0

    machine = Machine(step_s=step_s)
    report = run(
        machine,
        SleepingLoader(machine, 4.0),
        on_progress=lambda what, done: phases.append(what),
    )
    assert report.slow_steps.count == 1
    assert report.t_down_s == exactly(1.0)


def test_a_machine_that_slows_down_keeps_its_ratio():
    def slowness():
        return 1.0 + machine.time / 2000

    class Loader(SleepingLoader):
        def __iter__(self):
            while True:
                self.machine.sleep(3.0 * slowness())
                yield BATCH

    machine = Machine(step_s=slowness)
    report = run(machine, Loader(machine, 0))
    assert report.t_down_s > 1.15
    # By half as the probe goes on; what is measured only once would be off by that.
    assert slowness() > 1.5
    assert report.ratio == pytest.approx(3.0, rel=0.05)
    assert report.ratio_low < 3.0 < report.ratio_high


def test_loading_and_training_in_turns_is_seen_and_cured_first():
    machine = Machine(step_s=1.0, is_synchronous=True)
    report = run(machine, SleepingLoader(machine, 2.0))
    assert report.observed_s == exactly(3.0)
    assert report.idle_fraction == exactly(2 / 3)
    assert "Echoed 2 times, an update takes 2.00 s, not the 1.00 s" in report.advice[0]
    assert "prefetching" in report.advice[0]


def test_what_a_fast_loader_cannot_explain_is_not_blamed_on_it():
    machine = Machine(step_s=1.0)

    class Loader(SleepingLoader):
        def __iter__(self):
            while True:
                # Something else disturbs the device whenever both are together.
                if phases[-1] in ("both together", "echo factor 2"):
                    self.machine.device_free += 1.0
                self.machine.sleep(0.05)
                yield BATCH

    phases = []
    report = run(
        machine,
        Loader(machine, 0),
        on_progress=lambda what, done: phases.append(what),
    )
    assert report.idle_fraction > 0.4
    (sentence,) = report.advice
    assert sentence.startswith("Do not echo")


def test_a_step_is_never_asked_for_with_more_than_two_in_flight():
    machine = Machine(step_s=1.0)

    class Loader(SleepingLoader):
        def __iter__(self):
            while True:
                # What is queued on the device while a batch is asked for.
                queued.append(self.machine.device_free - self.machine.time)
                self.machine.sleep(self.load_s)
                yield BATCH

    queued = []
    run(machine, Loader(machine, 0.01), seconds=100.0)
    assert max(queued) == exactly(2.0)


def test_nothing_is_in_flight_while_the_loader_is_alone():
    machine = Machine(step_s=1.0)
    phases, in_flight_s = [], []

    class Loader(SleepingLoader):
        def __iter__(self):
            while True:
                if phases[-1] == "loader alone":
                    in_flight_s.append(self.machine.device_free - self.machine.time)
                self.machine.sleep(self.load_s)
                yield BATCH

    run(
        machine,
        Loader(machine, 0.5),
        on_progress=lambda what, done: phases.append(what),
    )
    assert in_flight_s and max(in_flight_s) <= 0


def test_a_fed_trainer_is_seen_with_the_full_buffers_that_it_has():
    machine = Machine(step_s=1.0)
    # Every fifth batch takes as long as five others; many are ready in between.
    service = itertools.cycle([0.4, 0.4, 0.4, 0.4, 2.8])
    report = run(machine, PrefetchingLoader(machine, service, 64), seconds=10_000.0)
    assert report.t_up_s == pytest.approx(0.88, rel=0.01)
    assert report.observed_s == exactly(1.0)


def test_a_slow_loader_gets_the_fewest_rounds():
    machine = Machine(step_s=1.0)
    report = run(machine, SleepingLoader(machine, 100.0), seconds=20.0)
    assert report.rounds == 3
    assert report.ratio == exactly(100.0)
    assert report.seconds == exactly(machine.time)


def test_a_fed_trainer_is_told_not_to_echo():
    machine = Machine(step_s=1.0)
    report = run(machine, PrefetchingLoader(machine, itertools.repeat(0.5), 4))
    assert not report.is_starved
    assert report.advised_factor == 1.0
    (sentence,) = report.advice
    assert sentence.startswith("Do not echo")
    assert report.how == ""
    # A run with an echo shows that nothing is won.
    echoed = report.runs[1]
    assert (echoed.factor, echoed.seconds_per_update) == (2.0, exactly(1.0))


def test_a_starved_trainer_is_told_how_to_echo():
    machine = Machine(step_s=1.0)
    loader = PrefetchingLoader(machine, itertools.repeat(8.0), 4)
    report = run(machine, loader, cap=4)
    assert report.is_starved and report.is_certain
    assert report.advised_factor == 4.0
    text = " ".join(report.advice)
    assert "take turns" not in text
    # Where the loader sets the pace, calls differ, and windows hold whole cycles.
    assert report.runs[1].seconds_per_update == exactly(2.0)
    assert "Echo every example 4 times" in text
    assert "2.00 s instead of 8.00 s" in text
    assert "idle 50% of the time" in text
    # A quarter of the time for an update, and as many updates as in the studies.
    assert "to the same loss takes 0.21 to 0.29 of the time" in text
    assert "ej.worth_of_repeats shows" in text
    # A hundred batches of 32.
    assert "Keep 3200 examples (44.8 kB)" in text
    assert report.how == (
        'ej.echo_batches(loader, ej.EchoSpec(factor=4.0, order="spread", buffer=3200, '
        "batch_size=32))"
    )
    assert report.how in str(report)
    assert "R is above 4" in text


def test_an_uncertain_ratio_is_called_so():
    machine = Machine(step_s=1.0)
    service = service_times("bursty", 1.2, 5000, 0).tolist()
    loader = PrefetchingLoader(machine, service, 1)
    report = run(machine, loader, seconds=200.0)
    assert not report.is_certain
    assert any("measure for longer" in sentence for sentence in report.advice)


class Stages:
    """Stages that wait and compute for known times."""

    def __init__(self, machine, **times):
        self.machine, self.computed = machine, 0.0
        self.calls = {name: self._stage(*both) for name, both in times.items()}

    def _stage(self, waits_s, computes_s):
        def call():
            self.machine.sleep(waits_s + computes_s)
            self.computed += computes_s

        return call


def with_stages(machine, load_s, options=None, **times):
    stages = Stages(machine, **times)
    return run(
        machine,
        PrefetchingLoader(machine, itertools.repeat(load_s), 4),
        stages=stages.calls,
        cpu_now=lambda: stages.computed,
        options=options,
    )


def test_stages_are_split_into_waiting_and_computing():
    report = with_stages(Machine(), 4.0, read=(3.5, 0.25), decode=(0.0, 0.25))
    read, decode = report.stages
    assert (read.name, read.wall_s, read.cpu_s) == ("read", 3.75, 0.25)
    assert (decode.name, decode.wall_s, decode.cpu_s) == ("decode", 0.25, 0.25)


def test_reads_that_wait_one_by_one_are_sent_to_threads_first():
    report = with_stages(Machine(), 4.0, read=(3.5, 0.25), decode=(0.0, 0.25))
    assert "the loader's threads=4 would hide" in report.advice[0]
    assert "after read" in report.advice[1]


def test_reads_that_wait_together_already_are_left_alone():
    report = with_stages(Machine(), 4.0, read=(16.0, 0.25), decode=(0.0, 0.25))
    assert "threads=16" in report.advice[0]
    report = with_stages(Machine(), 4.0, read=(2.0, 0.25), augment=(0.0, 1.0))
    assert "threads=2" in report.advice[0]
    report = with_stages(Machine(), 4.0, read=(0.9, 0.1), decode=(0.0, 0.25))
    assert report.advice[0].startswith("Echo")


@pytest.mark.parametrize(
    ("cores", "words"),
    [
        (2, "about 1 of 2 cores busy: more processes have no core"),
        (3, "processes=2 would bring R to about 2.0"),
        (8, "processes=4 would load as fast as it trains"),
    ],
)
def test_computing_is_sent_to_free_cores_first(cores, words, monkeypatch):
    # `echo_jax.echo`, as an attribute, is the function.
    module = importlib.import_module("echo_jax.echo.instrument.probe")
    monkeypatch.setattr(module, "_cores", lambda: cores)
    report = with_stages(Machine(), 4.0, read=(0.0, 0.1), decode=(0.0, 3.9))
    assert words in report.advice[0]


def test_the_placement_is_the_earliest_that_leaves_no_slow_stage_below_it():
    times = {"read": (3.0, 0.0), "decode": (0.0, 0.3), "augment": (0.0, 0.5)}
    report = with_stages(Machine(), 4.0, **times)
    assert "after read" in report.advice[1]
    options = OptionNames(placements=("decode", "augment"), echo="after={after}")
    report = with_stages(Machine(), 4.0, options, **times)
    assert report.how == "after=decode"
    fast = {"read": (0.1, 0.0), "decode": (0.5, 0.0), "batch": (0.1, 0.0)}
    report = with_stages(Machine(), 4.0, OptionNames(echo="{after}"), **fast)
    assert report.how == "decode"
    times["augment"] = (0.0, 1.5)
    report = with_stages(Machine(), 4.0, options, **times)
    assert report.how == "after=augment"


def test_an_iterable_that_ends_starts_again():
    machine = Machine()
    report = run(machine, SleepingLoader(machine, 2.0, length=3))
    assert report.t_up_s == exactly(2.0)


def test_an_iterator_that_ends_is_refused():
    machine = Machine()
    with pytest.raises(ValueError, match="an iterator, ended after 3 batches; give"):
        run(machine, iter(SleepingLoader(machine, 2.0, length=3)))


def test_an_empty_upstream_is_refused():
    with pytest.raises(ValueError, match="the upstream is empty"):
        run(Machine(), [])


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_no_time_is_refused(seconds):
    with pytest.raises(ValueError, match="must be above 0"):
        run(Machine(), [BATCH], seconds=seconds)


class Closing:
    """An iterator that counts those of its kind that are open."""

    opened = closed = 0

    def __init__(self, machine, length):
        self.machine, self.left = machine, length
        Closing.opened += 1

    def __iter__(self):
        return self

    def __next__(self):
        self.left -= 1
        if self.left < 0:
            raise StopIteration
        self.machine.sleep(1.0)
        return BATCH

    def close(self):
        Closing.closed += 1


@pytest.fixture
def closing(monkeypatch):
    monkeypatch.setattr(Closing, "opened", 0)
    monkeypatch.setattr(Closing, "closed", 0)
    return Closing


def test_iterators_of_our_own_are_closed(closing):
    class Batches:
        def __iter__(self):
            return closing(machine, length=10)

    machine = Machine()
    run(machine, Batches())
    assert closing.opened > 2
    assert closing.closed == closing.opened


def test_an_iterator_of_the_users_stays_open(closing):
    machine = Machine()
    run(machine, closing(machine, length=10_000))
    assert (closing.opened, closing.closed) == (1, 0)


def test_a_step_whose_end_cannot_be_seen_is_refused():
    with pytest.raises(TypeError, match="returned a NoneType, which says nothing"):
        probe([BATCH], lambda batch: None)
    with pytest.raises(TypeError, match="returned a object, which says nothing"):
        probe([BATCH], lambda batch: object())
    with pytest.raises(TypeError, match="must return \\(state, output\\)"):
        probe([BATCH], lambda state, batch: state, state=1)


def test_a_state_is_handed_on_and_never_waited_for():
    machine = Machine()

    class Donated:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            raise AssertionError("donated to the next step")

    def step(state, batch):
        assert state.step == machine.steps
        return Donated(machine.steps + 1), {"loss": machine.step(batch)}

    loader = SleepingLoader(machine, 2.0)
    report = probe(
        loader, step, state=Donated(0), seconds=1000.0, now=machine.now, cpu_now=float
    )
    assert (report.t_up_s, report.t_down_s) == (exactly(2.0), exactly(1.0))


def test_waiting_finds_arrays_in_dataclasses():
    @dataclasses.dataclass
    class Report:
        name: str
        losses: list

    machine = Machine()
    wait_for((Report("x", [Output(machine, 3.0), {"y": Output(machine, 2.0)}]), 0.0))
    assert machine.time == 3.0


def test_a_wait_of_the_users_own_is_used():
    machine = Machine()
    report = run(
        machine,
        SleepingLoader(machine, 2.0),
        wait=lambda output: output.block_until_ready(),
    )
    assert report.t_down_s == exactly(1.0)


def test_windows_hold_whole_cycles():
    machine = Machine()
    calls = itertools.cycle([3.0, 0.0, 0.0])
    timed = time_calls(
        lambda: machine.sleep(next(calls)), window_s=7.0, stride=3, now=machine.now
    )
    assert timed == [3.0, 0.0, 0.0] * 3


def test_settling_is_not_counted():
    machine = Machine()
    calls = itertools.chain([9.0, 9.0, 9.0], itertools.repeat(1.0))
    timed = time_calls(
        lambda: machine.sleep(next(calls)),
        settle_s=20.0,
        window_s=3.5,
        now=machine.now,
    )
    assert timed == [1.0] * 4


def test_a_window_has_bounds_in_calls():
    for limits, calls in (({"least": 5}, 5), ({"most": 2, "least": 1}, 2)):
        machine = Machine()
        window_s = 0.0 if "most" not in limits else 100.0
        timed = time_calls(
            lambda: machine.sleep(1.0),  # noqa: B023
            window_s=window_s,
            now=machine.now,
            **limits,
        )
        assert len(timed) == calls


def test_steps_finish():
    machine = Machine(step_s=1.0)
    steps = BoundedSteps(machine.step)
    for _ in range(4):
        steps(BATCH)
    assert machine.time == 2.0
    steps.finish()
    assert machine.time == 4.0


def test_a_report_is_json_and_a_table():
    machine = Machine(step_s=0.01)
    report = run(machine, SleepingLoader(machine, 0.04), seconds=10.0)
    found = json.loads(report.to_json())
    assert found["ratio"] == exactly(4.0)
    assert found["predicted"][1]["seconds_per_update"] == exactly(0.02)
    assert found["predicted"][7]["seconds_per_fresh_batch"] == exactly(0.08)
    assert found["runs"][1]["factor"] == 4.0
    assert found["batch_size"] == 32
    text = str(report)
    assert "R                  4.00 (4.00 to 4.00: 95 % interval over 5 rounds)" in text
    assert "the accelerator is idle 75% of the time" in text
    assert max(map(len, text.split("\n\nAdvice")[0].splitlines())) <= 88


def test_progress_goes_from_nothing_to_nearly_everything():
    machine, seen = Machine(), []
    run(
        machine,
        SleepingLoader(machine, 2.0),
        on_progress=lambda what, done: seen.append((what, done)),
    )
    parts = [done for _, done in seen]
    assert parts == sorted(parts)
    assert 0.9 < parts[-1] <= 1
    assert {what for what, _ in seen} == {
        "first step",
        "loader alone",
        "step alone",
        "both together",
        "echo factor 2",
    }


def test_a_plain_jax_loop_is_probed_in_one_line():
    @jax.jit
    def train_step(params, batch):
        loss, grads = jax.value_and_grad(
            lambda params: jnp.mean((batch["x"].astype(jnp.float32) @ params) ** 2)
        )(params)
        return params - 0.1 * grads, loss

    report = probe([BATCH] * 5, train_step, state=jnp.ones(10), seconds=0.05)
    assert report.t_up_s > 0 and report.t_down_s > 0
    assert report.batch_size == 32
