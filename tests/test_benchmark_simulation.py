"""The simulated hosts: by hand, against the model, and the real rule."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import echo_jax as ej
from benchmarks import simulation
from benchmarks.simulation import Adaptive, Fixed, simulate, simulate_hosts
from echo_jax.echo.plans import make_plan


def test_a_simulation_by_hand():
    """Batches are ready at 2, 3 and 8; a step takes 1; the time ends at 8.

    Fixed at 2 uses them at 2, 3 | 4, 5 and waits. Adaptive at cap 3 uses batch 0 at
    2, batch 1 at 3, then 0, 1, 0, 1, at 8 there is no time left.
    """
    service = np.array([2.0, 1.0, 5.0])
    fixed = simulate(service, 1.0, Fixed(2))
    assert (fixed.seconds, fixed.updates, fixed.busy_fraction) == (8.0, 4, 0.5)
    assert (fixed.produced, fixed.used) == (3, 2)
    for policy, uses in (
        (Fixed(2), [2, 2]),
        (Adaptive(cap=3, buffer=2), [2, 2, 2]),
        (Adaptive(cap=2, buffer=2), [2, 2]),
        # With one slot, batch 0 gives way to batch 1 after its first use.
        (Adaptive(cap=3, buffer=1), [2, 1, 1]),
    ):
        assert simulate(service, 1.0, policy).uses_by_repeat.tolist() == uses


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=120), st.integers(1, 4), st.integers(1, 4))
def test_the_simulated_rule_is_that_of_the_plan(readiness, cap, buffer):
    """The same decisions give the same repeats, with the same batches."""
    plan = make_plan(ej.AdaptiveSpec(cap, buffer, batch_size=1))
    rule = simulation._AdaptiveRule(Adaptive(cap, buffer), num_hosts=1)
    for ready in readiness:
        need = plan.need(1)
        (must,) = rule.takes(np.array([False]))
        assert (need.must, need.may) == (int(must), int(not must))
        takes = rule.takes(np.array([ready]))
        batch = plan.decide(1, int(takes[0])).uses
        # Once the buffer gives way, the two queues are closed up at other times.
        if plan.counts(1).fresh > buffer:
            break
        assert batch.repeat.tolist() == [rule.use(takes).tolist()]


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
