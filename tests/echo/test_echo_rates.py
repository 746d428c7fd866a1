"""The timing model by hand, and the simulation against it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_jax.echo import rates
from echo_jax.echo.adaptive import AdaptiveDraws
from echo_jax.echo.draws import Need
from echo_jax.echo.rates import Adaptive, Fixed, service_times, simulate

KINDS = ("constant", "exponential", "bursty", "switching", "stalling")


def test_the_model_by_hand():
    """t_up 6, t_down 1: the setting of the paper's wall-clock study, R = 6."""
    assert rates.ratio(6.0, 1.0) == 6
    assert [rates.seconds_per_update(6.0, 1.0, e) for e in (1, 2, 3, 6, 8)] == [
        6,
        3,
        2,
        1,
        1,
    ]
    assert [rates.seconds_per_fresh(6.0, 1.0, e) for e in (1, 6, 8)] == [6, 6, 8]
    assert rates.idle_fraction(2.0, 1.0) == 0.5
    assert rates.idle_fraction(2.0, 1.0, 2) == 0
    assert rates.idle_fraction(0.5, 1.0) == 0


def test_the_advice_is_the_ratio_within_one_and_the_cap():
    assert [rates.advised_factor(r) for r in (0.3, 1.0, 3.7, 8.0)] == [1, 1, 3.7, 4]
    assert rates.advised_factor(8.0, cap=16) == 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rates.ratio(1.0, 0.0), "t_down_s=0.0 must be positive"),
        (lambda: rates.seconds_per_update(float("nan"), 1.0, 2), "t_up_s=nan"),
        (lambda: rates.seconds_per_fresh(1.0, 1.0, 0.5), "factor=0.5"),
        (lambda: rates.advised_factor(2.0, cap=0.5), "cap=0.5"),
        (lambda: rates.advised_factor(-1.0), "ratio=-1.0"),
        (lambda: service_times("sometimes", 1.0, 3), "kind='sometimes' is unknown"),
        (lambda: service_times("constant", -1.0, 3), "mean_s=-1.0"),
        (lambda: Fixed(0.5), "factor=0.5"),
        (lambda: Adaptive(cap=0), "cap=0"),
        (lambda: Adaptive(buffer=0), "buffer=0"),
        (lambda: simulate(np.ones(3), 0.0, Fixed(1)), "t_down_s=0.0"),
        (lambda: simulate(np.ones(3), 1.0, Fixed(1), prefetch=0), "prefetch=0"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("kind", KINDS)
def test_producers_have_their_mean(kind):
    times = service_times(kind, 0.3, 128_000, seed=1)
    assert times.shape == (128_000,)
    exact = kind != "exponential"
    assert times.mean() == pytest.approx(0.3, rel=1e-9 if exact else 0.02)
    assert np.array_equal(times, service_times(kind, 0.3, 128_000, seed=1))


def test_producers_are_what_they_are_said_to_be():
    bursty = service_times("bursty", 1.0, 100_000)
    assert set(bursty.tolist()) == {0.4, 6.4}
    assert (bursty == 6.4).sum() == 10_000
    assert (bursty[:50_000] == 6.4).sum() == pytest.approx(5_000, abs=300)
    switching = service_times("switching", 4.5, 129)
    assert switching.tolist() == [1.0] * 64 + [8.0] * 64 + [1.0]
    assert set(service_times("stalling", 1.0, 10_000).tolist()) == {0.5, 100.5}


def test_a_simulation_by_hand():
    """Chunks are ready at 2, 3 and 8; a step takes 1; the time ends at 8.

    Fixed at 2 uses them at 2, 3 | 4, 5 and waits. Adaptive at cap 3 uses chunk 0 at
    2, chunk 1 at 3, then 0, 1, 0, 1, at 8 there is no time left.
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
    # With one slot, chunk 0 gives way to chunk 1 after its first use.
    small = simulate(service, 1.0, Adaptive(cap=3, buffer=1))
    assert small.uses_by_repeat.tolist() == [2, 1, 1]


def test_a_full_queue_stops_the_producer():
    """Chunks take 1, updates 3 for each: the producer is two and one ahead."""
    outcome = simulate(np.ones(30), 1.0, Fixed(3), prefetch=2)
    assert outcome.updates == 29
    assert outcome.used == 10
    # Taken at 1, 4, ..., 28; three more are finished by then.
    assert outcome.produced == 13


def test_a_producer_that_waited_starts_when_a_chunk_is_taken():
    """Steps take 3, and one chunk is kept. Chunks 0 to 2 are taken at 1, 4, 7.

    The producer has chunk 2 in its hands from 3 to 4, so chunk 3, which takes 8, is
    ready at 12, too late for a step before 14.5.
    """
    service = np.array([1.0, 1.0, 1.0, 8.0, 3.5])
    assert simulate(service, 3.0, Fixed(1), prefetch=1).updates == 3
    # With more room it does not wait: chunk 3 is ready at 11.
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


@settings(max_examples=40, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(st.lists(st.booleans(), max_size=120), st.integers(1, 4), st.integers(1, 4))
def test_the_simulated_rule_is_that_of_the_draws(readiness, cap, buffer):
    """The same decisions give the same repeats, with a chunk that is a batch."""
    draws = AdaptiveDraws(buffer=buffer, batch_size=1, chunk_items=1, cap=cap)
    rule = rates._LongestUnused(Adaptive(cap, buffer))
    for ready in readiness:
        need = draws.need()
        assert (need is Need.MUST) == rule.must_take
        assert (need is Need.MAY) == (rule.may_take and not rule.must_take)
        if need is Need.MUST or (need is Need.MAY and ready):
            draws.write()
            rule.take()
        draw = draws.draw()
        # Once the buffer gives way, one queue is closed up at once, the other when
        # its front comes up. (In one of more than 4 the choice is random besides.)
        if draws.num_chunks > buffer:
            break
        assert draw.repeat.tolist() == [[rule.use()]]
