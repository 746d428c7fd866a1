"""States of plans: which ones are refused, and that this changes nothing."""

import dataclasses
import json
import re

import numpy as np
import pytest
from echo_cases import ORDERS, spec_of

import echo_jax as ej
from echo_jax.echo.orders import rounds_of
from echo_jax.echo.plans import make_plan
from echo_jax.echo.plans.lanes import Lanes, joined_state

LOAD = ej.FetchSchedule(start=0.5, end=0.5)
SPECS = {order: spec_of(order, "7.3") for order in ORDERS} | {
    "adaptive": ej.AdaptiveSpec(max_uses=2, buffer=8, batch_size=4),
    "stochastic": ej.StochasticSpec(LOAD, buffer=8, batch_size=4),
}
LANES = {"lanes": Lanes(4, 2)}


def drawn_from(plan):
    decision = plan.decide(plan.batch, plan.need(plan.batch).must)
    uses = decision.uses[:, : plan.batch]
    plan.settle(uses.size, int(decision.rows[uses.size - 1]))
    return uses


def drawn(spec, batches=1, rows=10**9, **options):
    plan = make_plan(spec, **options)
    for _ in range(batches):
        if rows < plan.need(plan.batch).must:
            plan.end(rows)
        drawn_from(plan)
    return plan


def log(*decisions):
    return ej.DecisionLog(decisions).to_json()


@pytest.mark.parametrize("options", [{}, LANES], ids=["alone", "lanes"])
@pytest.mark.parametrize("name", SPECS)
def test_a_state_with_any_other_value_is_refused_and_changes_nothing(name, options):
    spec = dataclasses.replace(SPECS[name], buffer=2 * SPECS[name].buffer)
    plan, untouched = drawn(spec, **options), drawn(spec, **options)
    state = plan.get_state()
    assert json.loads(json.dumps(state)) == state
    plan.check_state(state)
    drawn(spec, 0, **options).check_state(state)
    refusal = "integer of at least|damaged|another spec|lanes, this echo|decision log"
    for key in state:
        for value in (-2, "1", None, 2.0, True, np.int64(0), 1 << 60):
            if key not in ("end", "uses") or value != 1 << 60:  # It may be as long.
                with pytest.raises(ValueError, match=refusal):
                    plan.set_state(state | {key: value})
        with pytest.raises(ValueError, match="give what get_state returned"):
            plan.set_state({k: v for k, v in state.items() if k != key})
    for other in (None, [3], {}, {"next_item": 3}, state | {"more": 0}):
        with pytest.raises(ValueError, match=r"is not the state of .* give what"):
            plan.set_state(other)
    assert plan.get_state() == state
    found, expected = (drawn_from(each) for each in (plan, untouched))
    assert np.array_equal(found.fresh_index, expected.fresh_index)


@pytest.mark.parametrize("order", ORDERS)
def test_numbers_that_do_not_fit_together_are_refused(order):
    plan = drawn(SPECS[order], 8)
    state = plan.get_state()
    denominator = SPECS[order].schedule.denominator
    for damage in (
        {"anchor": state["fresh"] + 1},
        {"anchor": state["anchor"] + 1},
        {"fresh": state["anchor"] - 1},
        {"carry": denominator * (rounds_of(SPECS[order]).max_departed + 1)},
        {"end": state["fresh"] - 1},
        {"position": state["uses"] + 1},
        {"position": state["uses"], "end": state["fresh"]},  # so many never come
        {"repeats": state["uses"] + 1},
        {"round": -1},
        {"uses": state["repeats"] - 1},
    ):
        with pytest.raises(ValueError, match="damaged"):
            plan.set_state(state | damage)
        assert plan.get_state() == state


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("adaptive", {"fresh": 5}, "'fresh': 5"),
        ("adaptive", {"fresh": 0}, "'fresh': 0"),
        ("adaptive", {"pending": 4}, "'pending': 4"),
        ("adaptive", {"log": log(True, False) | {"bits": "?"}}, "decoded"),
        ("adaptive", {"log": log(False), "fresh": 0}, "'fresh': 0"),
        ("adaptive", {"log": log(), "fresh": 0, "pending": 1}, "'pending': 1"),
        ("stochastic", {"batches": -1, "fresh": 0}, "it is damaged"),
        ("stochastic", {"batches": 0, "fresh": 0, "pending": 1}, "it is damaged"),
        ("stochastic", {"fresh": 0}, "it is damaged"),
        ("stochastic", {"fresh": 1, "pending": 1}, "it is damaged"),
        ("stochastic", {"repeats": 1}, "it is damaged"),
        ("lanes", {"lanes": []}, "has 0 lanes, this echo has 2"),
        ("lanes", {"lanes": [{}, {}]}, "is not the state of an echo plan"),
        ("lanes", {"written": -1}, "'written': -1"),
    ],
)
def test_a_damaged_state_says_what_is_wrong(name, damage, message):
    is_fixed = name == "lanes"
    spec = ej.EchoSpec(2, batch_size=4) if is_fixed else SPECS[name]
    plan = drawn(spec, **(LANES if is_fixed else {}))
    with pytest.raises(ValueError, match=re.escape(message)):
        plan.set_state(plan.get_state() | damage)


def test_one_damaged_lane_is_enough():
    state = drawn(ej.EchoSpec(2, batch_size=4), 3, **LANES).get_state()
    torn = [state["lanes"][0], state["lanes"][1] | {"carry": 99}]
    with pytest.raises(ValueError, match="it is damaged"):
        drawn(ej.EchoSpec(2, batch_size=4), **LANES).set_state(state | {"lanes": torn})
    with pytest.raises(ValueError, match="not of the same place"):
        joined_state([state, {**state, "written": 99}])


@pytest.mark.parametrize(
    ("rows", "damage"),
    [
        (1, {"pending": 1}),
        (4, {"log": log(True, False, False)}),
        # It is not replayed beyond the first batch that cannot be.
        (1, {"log": log(True, *[False] * 100_000)}),
    ],
)
def test_a_state_that_only_its_batches_show_as_damaged_changes_nothing(rows, damage):
    plan = drawn(SPECS["adaptive"])
    state = plan.get_state()
    with pytest.raises(ValueError, match="it is damaged"):
        plan.set_state(drawn(SPECS["adaptive"], rows=rows).get_state() | damage)
    assert plan.get_state() == state
    assert plan.decide(4, 0).uses.repeat.tolist() == [[1] * 4]


CHANGES = {
    "factor": 3,
    "order": "window_shuffle",
    "max_uses": 3,
    "min_uses": 2,
    "fetch": ej.FetchSchedule(start=0.25, end=0.25),
    "buffer": 80,
    "batch_size": 2,
    "seed": 9,
}


@pytest.mark.parametrize("name", SPECS)
def test_a_state_of_another_echo_is_refused(name):
    spec, state = SPECS[name], drawn(SPECS[name]).get_state()
    fields = {field.name for field in dataclasses.fields(spec)} & {*CHANGES}
    changed = {
        key: CHANGES[key] for key in fields if getattr(spec, key) != CHANGES[key]
    }
    others = [make_plan(dataclasses.replace(spec, **{k: changed[k]})) for k in changed]
    others.append(make_plan(spec, options=("batch",)))
    others.append(make_plan(spec, lanes=Lanes(4, 1 if name in ORDERS else 2)))
    assert len(others) >= 6
    for other in others:
        with pytest.raises(ValueError, match=r"restore it with what|give what"):
            other.check_state(state)


def test_a_state_beside_the_log_that_is_replayed_is_refused():
    state = drawn(SPECS["adaptive"]).get_state()
    for replay in ([True, False, True], [False]):
        plan = make_plan(dataclasses.replace(SPECS["adaptive"], replay=replay))
        if replay[0]:
            plan.check_state(state)
        else:
            with pytest.raises(ValueError, match="not on the way of the log"):
                plan.check_state(state)
