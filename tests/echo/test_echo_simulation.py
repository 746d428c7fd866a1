"""The simulated hosts: by hand, against the model, and against each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo.instrument import rates, simulation
from echo_jax.echo.instrument.rates import (
    Adaptive,
    Fixed,
    Outcome,
    service_times,
    simulate,
    simulate_hosts,
)
from echo_jax.echo.plans.adaptive import AdaptivePlan
from echo_jax.echo.plans.base import Need
from echo_jax.echo.spec import AdaptiveSpec

KINDS = ("constant", "exponential", "bursty", "switching", "stalling", "pareto")
POLICIES = st.one_of(
    st.builds(Fixed, st.sampled_from([1, 1.5, 2, 7 / 3, 4])),
    st.builds(Adaptive, st.integers(1, 5), st.integers(1, 40)),
)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: service_times("sometimes", 1.0, 3), "kind='sometimes' is unknown"),
        (lambda: service_times("constant", -1.0, 3), "mean_s=-1.0"),
        (lambda: Fixed(0.5), "factor 0.5"),
        (lambda: Adaptive(cap=0), "cap=0"),
        (lambda: Adaptive(buffer=0), "buffer=0"),
        (lambda: simulate(np.ones(3), 0.0, Fixed(1)), "t_down_s=0.0"),
        (lambda: simulate(np.ones(3), 1.0, Fixed(1), prefetch=0), "prefetch=0"),
        (lambda: simulate_hosts(np.ones((2, 3)), 0.0, Fixed(1)), "t_down_s=0.0"),
        (
            lambda: simulate_hosts(np.ones((2, 3)), 1.0, Fixed(1), prefetch=0),
            "prefetch=0",
        ),
        (lambda: simulate_hosts(np.ones(3), 1.0, Fixed(1)), r"the shape \(3,\)"),
        (lambda: simulate_hosts(np.ones((0, 3)), 1.0, Fixed(1)), r"shape \(0, 3\)"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_producers_have_their_mean(kind):
    times = service_times(kind, 0.3, 128_000, seed=1)
    assert times.shape == (128_000,)
    exact = kind not in ("exponential", "pareto")
    assert times.mean() == pytest.approx(0.3, rel=1e-9 if exact else 0.05)
    assert np.array_equal(times, service_times(kind, 0.3, 128_000, seed=1))


def test_producers_are_what_they_are_said_to_be():
    bursty = service_times("bursty", 1.0, 100_000)
    assert set(bursty.tolist()) == {0.4, 6.4}
    assert (bursty == 6.4).sum() == 10_000
    assert (bursty[:50_000] == 6.4).sum() == pytest.approx(5_000, abs=300)
    switching = service_times("switching", 4.5, 129)
    assert switching.tolist() == [1.0] * 64 + [8.0] * 64 + [1.0]
    assert set(service_times("stalling", 1.0, 10_000).tolist()) == {0.5, 100.5}
    # Of a Pareto distribution of shape 1.5, one in 4^1.5 = 8 is 4 times the least.
    pareto = service_times("pareto", 1.0, 100_000)
    assert pareto.max() < 1000 * pareto.min()
    shares = [(pareto > 4**k * pareto.min()).mean() for k in (1, 2)]
    assert shares == pytest.approx([1 / 8, 1 / 64], rel=0.05)


def test_a_simulation_by_hand():
    """Batches are ready at 2, 3 and 8; a step takes 1; the time ends at 8.

    Fixed at 2 uses them at 2, 3 | 4, 5 and waits. Adaptive at cap 3 uses batch 0 at
    2, batch 1 at 3, then 0, 1, 0, 1, at 8 there is no time left.
    """
    service = np.array([2.0, 1.0, 5.0])
    fixed = simulate(service, 1.0, Fixed(2))
    assert (fixed.seconds, fixed.updates, fixed.busy_fraction) == (8.0, 4, 0.5)
    assert (fixed.produced, fixed.used) == (3, 2)
    assert fixed.uses_by_repeat.tolist() == [2, 2]
    adaptive = simulate(service, 1.0, Adaptive(cap=3, buffer=2))
    assert (adaptive.updates, adaptive.busy_fraction) == (6, 0.75)
    assert adaptive.uses_by_repeat.tolist() == [2, 2, 2]
    capped = simulate(service, 1.0, Adaptive(cap=2, buffer=2))
    assert capped.uses_by_repeat.tolist() == [2, 2]
    # With one slot, batch 0 gives way to batch 1 after its first use.
    small = simulate(service, 1.0, Adaptive(cap=3, buffer=1))
    assert small.uses_by_repeat.tolist() == [2, 1, 1]


def test_a_full_queue_stops_the_producer():
    """Batches take 1, updates 3 for each: the producer is two and one ahead."""
    outcome = simulate(np.ones(30), 1.0, Fixed(3), prefetch=2)
    assert outcome.updates == 29
    assert outcome.used == 10
    # Taken at 1, 4, ..., 28; three more are finished by then.
    assert outcome.produced == 13


def test_a_producer_that_waited_starts_when_a_chunk_is_taken():
    """Steps take 3, and one batch is kept. Batches 0 to 2 are taken at 1, 4, 7.

    The producer has batch 2 in its hands from 3 to 4, so batch 3, which takes 8, is
    ready at 12, too late for a step before 14.5.
    """
    service = np.array([1.0, 1.0, 1.0, 8.0, 3.5])
    assert simulate(service, 3.0, Fixed(1), prefetch=1).updates == 3
    # With more room it does not wait: batch 3 is ready at 11.
    assert simulate(service, 3.0, Fixed(1), prefetch=2).updates == 4


@pytest.mark.parametrize("factor", [1, 1.5, 2, 3, 4, 6])
@pytest.mark.parametrize("r", [0.5, 2.0, 4.0])
def test_at_constant_rates_the_simulation_is_the_model(factor, r):
    outcome = simulate(service_times("constant", r, 4000), 1.0, Fixed(factor))
    per_update = outcome.seconds / outcome.updates
    assert per_update == pytest.approx(
        rates.seconds_per_update(r, 1.0, factor), rel=5e-3
    )
    assert 1 - outcome.busy_fraction == pytest.approx(
        rates.idle_fraction(r, 1.0, factor), abs=5e-3
    )
    assert outcome.updates / outcome.used == pytest.approx(factor, rel=5e-3)


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.floats(0.3, 8.0),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 3),
)
def test_what_every_outcome_obeys(kind, r, cap, buffer, prefetch):
    service = service_times(kind, r, 300)
    for policy in (Adaptive(cap, buffer), Fixed(cap)):
        outcome = simulate(service, 1.0, policy, prefetch=prefetch)
        uses = outcome.uses_by_repeat
        assert uses.sum() == outcome.updates
        assert uses.size <= cap
        assert (np.diff(uses) <= 0).all()
        assert outcome.used == (uses[0] if uses.size else 0)
        assert outcome.used <= outcome.produced <= 300
        assert outcome.updates <= outcome.seconds
    # Data that was made is used: all but what is in the queue at the end.
    adaptive = simulate(service, 1.0, Adaptive(cap, buffer), prefetch=prefetch)
    if r > 2 and kind == "constant":
        assert adaptive.used >= adaptive.produced - 1


@settings(max_examples=150)
@given(st.lists(st.booleans(), max_size=120), st.integers(1, 4), st.integers(1, 4))
def test_the_simulated_rule_is_that_of_the_plan(readiness, cap, buffer):
    """The same decisions give the same repeats, with the same batches."""
    plan = AdaptivePlan(AdaptiveSpec(cap, buffer, batch_size=1))
    rule = simulation._LongestUnused(Adaptive(cap, buffer))
    for ready in readiness:
        need = plan.need(1)
        may_take = rule.may_take and not rule.must_take
        assert need == Need(must=int(rule.must_take), may=int(may_take))
        if need.must or (need.may and ready):
            plan.write(1)
            rule.take()
        batch = plan.next(1)
        # Once the buffer gives way, one queue is closed up at once, the other when
        # its front comes up. (In one of more than 4 the choice is random besides.)
        if plan.counts().fresh > buffer:
            break
        assert batch.repeat.tolist() == [[rule.use()]]


def facts(outcome: Outcome) -> tuple:
    """All of an outcome, to be compared exactly."""
    return (
        outcome.seconds,
        outcome.updates,
        outcome.busy_fraction,
        outcome.produced,
        outcome.used,
        outcome.uses_by_repeat.tolist(),
    )


def traces(kind: str, r: float, num_hosts: int, n: int = 200) -> np.ndarray:
    """Different producers of one kind, ``float64[num_hosts, n]``."""
    return np.stack([service_times(kind, r, n, seed=host) for host in range(num_hosts)])


@settings(max_examples=150)
@given(st.sampled_from(KINDS), st.floats(0.3, 8.0), POLICIES, st.integers(1, 5))
def test_one_of_many_hosts_is_the_one_host(kind, r, policy, prefetch):
    service = service_times(kind, r, 300)
    alone = simulate(service, 1.0, policy, prefetch=prefetch)
    program = simulate_hosts(service[None], 1.0, policy, prefetch=prefetch)
    assert facts(program) == facts(alone)


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.floats(0.3, 8.0), POLICIES, st.integers(2, 5))
def test_hosts_with_the_same_producer_are_one_host(kind, r, policy, num_hosts):
    service = service_times(kind, r, 300)
    alone = simulate(service, 1.0, policy)
    program = simulate_hosts(np.tile(service, (num_hosts, 1)), 1.0, policy)
    assert (program.seconds, program.updates) == (alone.seconds, alone.updates)
    assert program.produced == num_hosts * alone.produced
    assert program.used == num_hosts * alone.used
    expected = num_hosts * alone.uses_by_repeat
    assert program.uses_by_repeat.tolist() == expected.tolist()


def test_two_hosts_by_hand_without_an_echo():
    """Batches are ready at 1, 2, 6 and at 3, 4, 5; a step takes 1; the end is at 9.

    The updates start when both have theirs: at 3, 4, 6, and end at 4, 5, 7. Then the
    fourth batches, which are ready at 9 and 10, come too late.
    """
    service = np.array([[1.0, 1.0, 4.0, 3.0], [3.0, 1.0, 1.0, 5.0]])
    program = simulate_hosts(service, 1.0, Fixed(1), prefetch=4)
    assert (program.seconds, program.updates) == (9.0, 3)
    assert (program.used, program.produced) == (6, 7)
    assert program.busy_fraction == 3 / 9
    assert program.uses_by_repeat.tolist() == [6]


def test_two_hosts_by_hand_with_an_adaptive_echo():
    """Batches are ready at 1, 2, 3, ... and at 2, 8; a step takes 1; the end is at 9.

    The first update starts at 2. Then one host takes fresh data at every update, and
    the other uses its only batch again, at 3 and at 4. With a cap of 3 it then waits
    for its second one, at 8, and so does the first host.
    """
    service = np.array([[1.0] * 9, [2.0, 6.0, 1.0, *[0.0] * 6]])
    program = simulate_hosts(service, 1.0, Adaptive(cap=3, buffer=8), prefetch=20)
    assert program.updates == 4
    assert program.uses_by_repeat.tolist() == [6, 1, 1]
    assert (program.used, program.produced) == (6, 18)
    # A fixed echo waits for it at the second batch of each.
    fixed = simulate_hosts(service, 1.0, Fixed(3), prefetch=20)
    assert fixed.uses_by_repeat.tolist() == [4, 2, 2]


def test_a_host_that_waits_for_others_does_not_stop_its_producer():
    """One batch is kept. Batches take 1 and 5, so that updates end at 6, 11, 16, ...

    Host 0 takes its batch 1 at 6, though the update starts at 10. So batch 3, which
    takes 12, is begun at 6 and ready at 18, before that of host 1, at 20. Were it
    begun at 10, the fourth update would end at 23, too late.
    """
    service = np.array([[1.0, 1.0, 1.0, 12.0, 11.0], [5.0, 5.0, 5.0, 5.0, 2.0]])
    program = simulate_hosts(service, 1.0, Fixed(1), prefetch=1)
    assert (program.seconds, program.updates) == (22.0, 4)


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.floats(0.3, 8.0), POLICIES, st.integers(1, 3))
def test_no_program_is_faster_than_its_slowest_producer(kind, r, policy, prefetch):
    service = traces(kind, r, 5)
    program = simulate_hosts(service, 1.0, policy, prefetch=prefetch)
    made = (np.cumsum(service, axis=1) <= program.seconds).sum(axis=1)
    most = policy.factor if isinstance(policy, Fixed) else policy.cap
    assert program.updates <= min(made) * most
    assert program.produced <= made.sum()
    assert program.updates <= program.seconds
    # What all hosts did adds up.
    uses = program.uses_by_repeat
    assert uses.sum() == 5 * program.updates
    assert program.used == (uses[0] if uses.size else 0)
    assert (np.diff(uses) <= 0).all()


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.floats(0.3, 8.0),
    st.sampled_from([1, 1.5, 2, 4]),
    st.integers(1, 3),
)
def test_with_a_fixed_echo_every_host_more_can_only_slow(kind, r, factor, prefetch):
    """An update starts at a maximum, and its times are maxima and sums of others.

    With an adaptive echo it is no theorem: a host that is slowed finds fresh data
    where it would have repeated, and keeps its repeats for later.
    """
    service = traces(kind, r, 6)
    updates = [
        simulate_hosts(service[:n], 1.0, Fixed(factor), prefetch=prefetch).updates
        for n in range(1, 7)
    ]
    assert updates == sorted(updates, reverse=True)
    # Nor can a longer queue.
    longer = simulate_hosts(service, 1.0, Fixed(factor), prefetch=prefetch + 2)
    assert longer.updates >= updates[-1]


@pytest.mark.parametrize("factor", [1, 2, 6])
def test_at_constant_rates_many_hosts_are_the_model(factor):
    """The host with the slowest producer sets the pace."""
    service = np.array([[r] * 2000 for r in (3.0, 3.5, 4.0)])
    program = simulate_hosts(service, 1.0, Fixed(factor))
    assert program.seconds / program.updates == pytest.approx(
        rates.seconds_per_update(4.0, 1.0, factor), rel=5e-3
    )


@pytest.mark.parametrize("policy", [Fixed(2), Adaptive(3, 4)])
def test_the_order_of_hosts_does_not_matter(policy):
    service = traces("pareto", 1.0, 16)
    assert facts(simulate_hosts(service, 1.0, policy)) == facts(
        simulate_hosts(service[::-1].copy(), 1.0, policy)
    )
