"""A step that is slow now and then: what counts, and how sure the instrument is.

Time is simulated, and seeds are fixed, so counts of covered intervals are exact.
"""

import itertools
import json

import numpy as np
import pytest
from test_echo_probe import Machine, Output, PrefetchingLoader, exactly, run

from echo_jax.echo.instrument.ratio_interval import ratio_interval
from echo_jax.echo.instrument.step_times import step_times

FAST_S, SLOW_S, LOAD_S = 0.002, 0.030, 0.010


def probed(steps, *, load_s=LOAD_S):
    """Probes a loader of even speed and steps of these times."""
    steps = iter(steps)
    machine = Machine(step_s=lambda: next(steps))
    return probed_on(machine, itertools.repeat(load_s))


def probed_on(machine, service_s):
    """Probes a machine for 20 s, which is many thousands of steps."""
    loader = PrefetchingLoader(machine, service_s, 16)
    # To look for arrays in each output would take a quarter of the time.
    return run(machine, loader, seconds=20.0, wait=Output.block_until_ready)


def every(period, slow_s=SLOW_S):
    return itertools.cycle([FAST_S] * (period - 1) + [slow_s])


def words(report):
    return " ".join(str(report).split())


def test_slow_steps_at_equal_gaps_are_counted_in_means():
    report = probed(every(4))
    # Three of 2 ms and one of 30 ms; the median says 2 ms, and R = 5.
    assert report.t_down_s == exactly(0.009)
    assert report.ratio == exactly(10 / 9)
    assert (report.ratio_low, report.ratio_high) == (exactly(10 / 9),) * 2
    assert report.slow_steps.period == 4
    assert "9.00 ms per update: means, with periodic slow steps" in words(report)
    assert "1 step in every 4 took 30.0 ms, the others 2.00 ms" in words(report)


def test_the_advice_follows_the_mean():
    report = probed(every(4))
    assert report.advised_factor == 1.1
    assert "an update would take 9.09 ms instead of 9.87 ms" in words(report)
    # At 8 ms a batch the loader is the faster side, which by the median it is not.
    fed = probed(every(4), load_s=0.008)
    assert fed.advised_factor == 1.0
    assert [sentence[:11] for sentence in fed.advice] == ["Do not echo"]


@pytest.mark.parametrize("period", [2, 3, 5, 12, 40, 100])
def test_a_period_is_found_and_its_mean_exact(period):
    report = probed(every(period))
    assert report.slow_steps.period == period
    mean_s = (FAST_S * (period - 1) + SLOW_S) / period
    assert report.t_down_s == exactly(mean_s)
    assert report.ratio_low == exactly(LOAD_S / mean_s)
    assert report.ratio_high == exactly(LOAD_S / mean_s)


def test_the_steps_are_timed_for_longer_until_a_period_is_known():
    # 0.4 s, of which a window of the shortest length holds one.
    report = probed(every(100, slow_s=0.2))
    assert report.slow_steps.period == 100
    assert report.ratio == exactly(LOAD_S / 0.00398)
    # Periods of 3 s are too long for 20 s: it says so, and its interval is wide.
    report = probed(every(1000, slow_s=1.0))
    assert report.slow_steps.period == 0
    assert report.ratio_low <= LOAD_S / 0.002998 <= report.ratio_high
    assert "measure for longer" in words(report)


def test_slow_steps_at_no_equal_gaps_are_counted_too():
    rng = np.random.default_rng(0)
    report = probed(np.where(rng.random(10_000) < 0.2, SLOW_S, FAST_S).tolist())
    assert report.slow_steps.period == 0
    assert report.ratio_low < LOAD_S / 0.0076 < report.ratio_high
    assert "per update: mean of" in words(report)
    assert "updates, with slow steps" in words(report)


def test_what_disturbs_a_step_once_is_left_out_but_not_concealed():
    # The 500th step is made while the step is alone.
    steps = itertools.chain([FAST_S] * 500, [1.0], itertools.repeat(FAST_S))
    report = probed(steps)
    assert report.slow_steps.count == 1
    assert report.t_down_s == exactly(FAST_S)
    assert report.advised_factor == 4.0
    assert "without slow steps" in words(report)
    assert f"1 of {report.steps_timed} took 1.00 s, the others 2.00" in words(report)
    # If it is the step's own it counts, and the interval holds that too.
    counted_s = FAST_S + 0.998 / report.steps_timed
    assert report.ratio_low < LOAD_S / counted_s < 5 <= report.ratio_high
    doubt = f"If the step itself causes them, R is {LOAD_S / counted_s:.2f}"
    assert doubt in words(report)


def test_what_disturbs_a_periodic_step_does_not_hide_its_period():
    steps = [FAST_S, FAST_S, FAST_S, SLOW_S] * 2000
    steps[401] = 0.05
    report = probed(steps)
    assert report.slow_steps.period == 4
    assert report.ratio == pytest.approx(10 / 9, rel=0.02)


def test_a_report_with_slow_steps_is_json():
    found = json.loads(probed(every(4)).to_json())
    assert found["slow_steps"]["period"] == 4
    assert found["steps_timed"] > 100


# --- The mean of a step, by hand.


def test_noise_is_not_mistaken_for_slow_steps():
    times = step_times([[2.0, 5.0, 2.0, 30.0], [2.0, 2.0, 2.0, 30.0] * 4])
    assert (times.slow.count, times.slow.period) == (5, 4)
    assert times.slow.others_s == 2.2
    assert times.mean_s == exactly((3 * 2.2 + 30) / 4)


def test_windows_count_whole_periods_wherever_they_begin():
    windows = [[30.0, 2.0, 2.0, 2.0, 30.0], [2.0, 2.0, 30.0] + [2.0] * 3 + [30.0]]
    windows += [[2.0, 2.0], [2.0, 30.0, 2.0, 2.0, 2.0, 30.0]]
    times = step_times(windows)
    assert times.slow.period == 4
    assert times.mean_s == 9.0
    assert times.window_means_s == (9.0,) * 4
    assert times.unseen_s == 0


def test_few_slow_steps_leave_the_mean_open():
    windows = [[2.0] * 5 + [12.0] + [2.0] * 4] * 5
    times = step_times(windows)
    assert (times.slow.count, times.slow.period, times.slow.are_few) == (5, 0, True)
    assert times.mean_s == 3.0
    # One slow step more or less for each window of ten: 10 s in 10 steps.
    assert times.unseen_s == 1.0
    assert ratio_interval([[12.0]] * 5, windows) == (3.0, 6.0)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5])
def test_slow_steps_recur_if_most_parts_have_one(parts):
    steps = ([1.0] * 19 + [9.0]) * parts + [1.0] * 20 * (5 - parts)
    assert step_times([steps]).slow.recur == (parts >= 3)


def test_slow_steps_that_are_many_are_no_disturbance():
    assert not step_times([[9.0] * 10 + [1.0] * 90]).slow.recur
    assert step_times([[9.0] * 11 + [1.0] * 89]).slow.recur


def test_a_window_on_a_slower_machine_has_no_slow_steps():
    times = step_times([[1.0] * 10] * 3 + [[3.0] * 10])
    assert times.slow is None
    assert times.mean_s == 1.5


def test_a_period_that_stops_is_not_one():
    times = step_times([[1.0, 1.0, 9.0] * 20, [1.0] * 60])
    assert (times.slow.recur, times.slow.period) == (True, 0)
    assert times.mean_s == exactly((100 + 20 * 9) / 120)


# --- How often the interval of R holds the true value.

# Of 40 intervals that hold it 95 times in 100, fewer than 34 do once in 300 times.
SEEDS, LEAST = 40, 34


def noise(rng, size):
    return 1 + 0.05 * rng.standard_normal(size)


def constant(rng, size):
    return FAST_S * noise(rng, size), FAST_S


def periodic(period):
    def steps(rng, size):
        slow_s = max(SLOW_S, period * FAST_S / 2)
        times = FAST_S * noise(rng, size)
        times[rng.integers(period) :: period] = slow_s
        return times, (FAST_S * (period - 1) + slow_s) / period

    return steps


def bimodal(share):
    def steps(rng, size):
        times = np.where(rng.random(size) < share, SLOW_S, FAST_S) * noise(rng, size)
        return times, FAST_S + share * (SLOW_S - FAST_S)

    return steps


def lognormal(rng, size):
    return FAST_S * rng.lognormal(0, 1, size), FAST_S * np.exp(0.5)


def autocorrelated(rng, size):
    level, logs = 0.0, []
    for shock in rng.standard_normal(size):
        level = 0.9 * level + 0.1 * shock
        logs.append(level)
    variance = 0.01 / (1 - 0.81)
    return FAST_S * np.exp(logs), FAST_S * np.exp(variance / 2)


@pytest.mark.parametrize(
    "steps",
    [
        constant,
        *map(periodic, (2, 500)),
        # On a machine that slows down, as below, it is harder.
        *(pytest.param(periodic(n), marks=pytest.mark.slow) for n in (4, 50)),
        bimodal(0.003),
        *(pytest.param(bimodal(part), marks=pytest.mark.slow) for part in (0.5, 0.1)),
        pytest.param(lognormal, marks=pytest.mark.slow),
        autocorrelated,
    ],
)
def test_the_interval_holds_the_true_ratio(steps):
    covered = 0
    for seed in range(SEEDS):
        times, mean_s = steps(np.random.default_rng(seed), 30_000)
        report = probed(times.tolist())
        covered += report.ratio_low <= LOAD_S / mean_s <= report.ratio_high
    assert covered >= LEAST


def test_the_interval_holds_the_true_ratio_on_a_machine_that_slows_down():
    covered = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        machine = Machine()
        pattern = itertools.cycle([FAST_S, FAST_S, FAST_S, SLOW_S])

        def slowness(machine=machine):
            return 1 + machine.time / 40

        def step_s(pattern=pattern, rng=rng, slowness=slowness):
            return next(pattern) * noise(rng, None) * slowness()

        machine.step_s = step_s
        report = probed_on(machine, (LOAD_S * slowness() for _ in itertools.count()))
        covered += report.ratio_low <= 10 / 9 <= report.ratio_high
    assert covered >= LEAST
