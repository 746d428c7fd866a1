"""Groups of updates: where they lie, what they compute, and how they are chosen."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_workload import Regression, make_workload, rows_of, run, stop_at, tiny_config

from echo_jax.training import (
    Interrupted,
    NonFiniteLossError,
    decide,
    dispatch,
)
from echo_jax.training.compiled import several_updates
from echo_jax.training.dispatch import (
    LOOP,
    Dispatch,
    best_group_size,
    fastest,
)
from echo_jax.training.feeds.feed import HostFeed, JoinedBatches
from echo_jax.training.feeds.of_config import make_echo_spec
from echo_jax.training.saving.checkpoint import params_sha256
from echo_jax.training.trainer import compile_functions

SCAN = {"dispatch__mode": "scan", "dispatch__steps": 2}
UNROLL = {"dispatch__mode": "unroll", "dispatch__steps": 2}
ECHO = {"echo__factor": 2.5, "echo__after": "batch"}


def counted(row):
    return {name: row[name] for name in ("kind", "updates", "fresh", "repeats")}


def measured(row):
    return {
        name: value
        for name, value in row.items()
        if "loss" in name or name == "learning_rate"
    }


@given(
    size=st.integers(2, 8),
    total=st.integers(1, 60),
    stops=st.lists(st.integers(0, 20), max_size=3),
)
def test_no_stop_lies_inside_a_group(size, total, stops):
    groups = Dispatch("scan", size)
    done = 0
    while done < total:
        n = groups.group(done, total=total, stops=stops)
        assert n in (1, size)
        for every, update in itertools.product(stops, range(done + 1, done + n)):
            assert not every or update % every
        # As large as it may be.
        fits = not done % size and done + size <= total
        inside = range(done + 1, done + size)
        is_free = all(not e or all(u % e for u in inside) for e in stops)
        assert (n == size) == (fits and is_free)
        done += n
    assert done == total


def test_the_group_size_with_the_fewest_dispatches():
    assert best_group_size(1000, [50, 100, 0]) == 5
    assert best_group_size(1000, [16, 32]) == 8
    assert best_group_size(1000, [1, 100]) == 1
    # A group of 8 and a single one.
    assert best_group_size(9, [9]) == 8
    # In [0, 12), with a stop after every 3 and every 4: [0, 2), 2, 3, [4, 6), ...
    assert best_group_size(12, [3, 4]) == 2
    assert best_group_size(1, [50]) == 1


def test_all_strategies_compute_the_same():
    def update(state, batch):
        new = jnp.sin(state + batch["x"].sum())
        return new, {"was": state, "new": new}

    batches = [{"x": jnp.arange(3.0) + k} for k in range(4)]
    looped, report = several_updates(update, jnp.float32(0.5), batches, scan=False)
    scanned, last = several_updates(update, jnp.float32(0.5), batches, scan=True)
    np.testing.assert_allclose(scanned, looped, rtol=1e-6)
    np.testing.assert_allclose(last["was"], report["was"], rtol=1e-6)
    np.testing.assert_allclose(last["new"], looped, rtol=1e-6)


class FakeTime:
    """A clock that runs only while work is done."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(dispatch.time, "perf_counter", lambda: self.now)

    def work(self, *seconds):
        """A function that takes so long at its calls in turn."""
        turns = itertools.cycle(seconds)

        def run(times):
            self.now += times * next(turns)

        return run


@pytest.mark.parametrize(
    ("others", "name"),
    [
        ({"scan": [0.5]}, "scan"),
        ({"scan": [0.5], "unroll": [0.4]}, "unroll"),
        # Not by as much as timings may err.
        ({"scan": [0.5], "unroll": [0.49]}, "scan"),
        ({"scan": [0.98]}, "loop"),
        ({"scan": [1.9], "unroll": [1.2]}, "loop"),
        # Faster as a rule, and slower too often.
        ({"scan": [0.5, 0.5, 1.1]}, "loop"),
    ],
)
def test_only_what_is_clearly_faster_takes_the_place_of_the_loop(
    monkeypatch, others, name
):
    clock = FakeTime(monkeypatch)
    runs = {"loop": clock.work(1.0)}
    runs |= {other: clock.work(*seconds) for other, seconds in others.items()}
    timing = fastest(runs)
    assert timing.name == name
    assert timing.relative["loop"] == 1
    assert list(timing.relative) == list(runs)


def test_short_runs_are_timed_often_enough(monkeypatch):
    clock = FakeTime(monkeypatch)
    most = []

    def run(times):
        most.append(times)
        clock.now += times * 1e-5

    fastest({"loop": run})
    assert most[0] == 1
    assert most[-1] * 1e-5 >= 0.01


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("looped")
    return run(workdir, **ECHO), rows_of(workdir)


@pytest.mark.parametrize("how", [SCAN, UNROLL])
def test_groups_train_and_log_as_the_loop_does(tmp_path, looped, how):
    summary = run(tmp_path, **ECHO, **how)
    assert summary["dispatch"] == {"mode": how["dispatch__mode"], "steps": 2}
    rows = rows_of(tmp_path)
    assert list(map(counted, rows)) == list(map(counted, looped[1]))
    for row, other in zip(rows, looped[1], strict=True):
        assert measured(row) == pytest.approx(measured(other), rel=1e-5)
    assert (summary["fresh"], summary["repeats"]) == (40, 56)


@pytest.mark.parametrize("stopped_at", [3, 4, 7])
def test_groups_resume_bit_by_bit(tmp_path, stopped_at):
    # With 3 updates in a group, and a stop after every 4, most run one by one.
    how = {"dispatch__mode": "scan", "dispatch__steps": 3, **ECHO}
    whole = run(tmp_path / "whole", **how)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", on_batch=stop_at(stopped_at), **how)
    resumed = run(tmp_path / "stopped", **how)
    assert resumed["params_sha256"] == whole["params_sha256"]


def test_the_first_bad_update_is_found_inside_a_group(tmp_path):
    # Batch placement, factor 2: fresh batch 3 is used by updates 7 and 8.
    with pytest.raises(NonFiniteLossError) as caught:
        run(tmp_path, nan_at_fresh=3, echo__factor=2.0, updates=40, log_every=8,
            eval_every=40, dispatch__mode="scan", dispatch__steps=4)  # fmt: skip
    assert caught.value.update == 7


def test_what_was_chosen_is_chosen_again(tmp_path, monkeypatch):
    """A resumed run times nothing: its numbers would depend on the moment."""
    chosen = iter([Dispatch("scan", 2)])
    monkeypatch.setattr(
        "echo_jax.training.decide.choose_dispatch",
        lambda *args, **kw: (next(chosen), ""),
    )
    options = {**ECHO, "dispatch__mode": "auto"}
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(4), **options)
    summary = run(tmp_path, **options)
    assert summary["dispatch"] == {"mode": "scan", "steps": 2}
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["chosen"]["dispatch"] == summary["dispatch"]


def choose(monkeypatch, *, step_s=1e-4, data_s=0.0, **overrides):
    """Returns the choice, what was timed, and the line that says why."""
    timed = []
    monkeypatch.setattr(dispatch, "_CHOSEN", {})

    def fake_fastest(runs):
        timed.extend(runs)
        for run_groups in runs.values():
            run_groups(1)
        return dispatch.Timing("scan", dict.fromkeys(runs, 0.5))

    monkeypatch.setattr(dispatch, "fastest", fake_fastest)
    config = tiny_config(**{"dispatch__mode": "auto", **overrides})
    workload = make_workload(config, task=Regression(width=20))
    compiled = compile_functions(config, workload)
    state = compiled.init(compiled.init_key)
    before = params_sha256(state.params)
    dataset = workload.train_dataset(make_echo_spec(config))
    feed = HostFeed(JoinedBatches([dataset]), compiled.mesh, sample=next(iter(dataset)))
    chosen, why = dispatch.choose_dispatch(
        config, compiled, state, feed, step_s=step_s, data_s=data_s
    )
    assert params_sha256(state.params) == before
    return chosen, timed, why


def test_auto_times_what_may_be_worth_it(monkeypatch):
    chosen, timed, why = choose(monkeypatch)
    assert chosen == Dispatch("scan", 2)
    assert timed == ["loop", "scan", "unroll"]
    assert why.startswith("dispatch: scan; updates in groups of 2, ")
    chosen, timed, why = choose(monkeypatch, step_s=0.03)
    assert (chosen, timed) == (LOOP, [])
    assert "a step takes 30 ms" in why
    chosen, timed, why = choose(monkeypatch, data_s=0.98e-4)
    assert (chosen, timed) == (LOOP, [])
    assert "updates wait for data" in why
    assert choose(monkeypatch, data_s=0.9e-4)[0] == Dispatch("scan", 2)
    for fixed in ({"dispatch__mode": "loop"}, {"log_every": 1}):
        assert choose(monkeypatch, **fixed) == (LOOP, [], "")
    fixed = {"dispatch__mode": "unroll", "dispatch__steps": 6}
    assert choose(monkeypatch, **fixed) == (Dispatch("unroll", 6), [], "")


def test_the_arms_of_a_study_are_dispatched_alike(tmp_path, monkeypatch):
    answers = iter([dispatch.Timing("scan", {"loop": 1.0}), None])
    monkeypatch.setattr(dispatch, "_CHOSEN", {})
    monkeypatch.setattr(dispatch, "fastest", lambda runs: next(answers))
    # The tiny pipeline is slow beside the tiny step.
    original = decide.measure_loader
    monkeypatch.setattr(
        decide,
        "measure_loader",
        lambda *a, **kw: replace(original(*a, **kw), t_up_s=1e-9),
    )
    for arm, factor in (("a", 1.0), ("b", 2.5)):
        summary = run(tmp_path / arm, echo__factor=factor, dispatch__mode="auto")
        assert summary["dispatch"] == {"mode": "scan", "steps": 2}


def test_what_takes_long_to_compile_is_not_tried(monkeypatch):
    monkeypatch.setattr(dispatch, "_num_operations", lambda jaxpr: 100)
    for most, names in [(200, ["loop", "scan", "unroll"]), (199, ["loop", "scan"])]:
        monkeypatch.setattr(dispatch, "_MOST_OPERATIONS", most)
        assert choose(monkeypatch)[1] == names
    monkeypatch.setattr(dispatch, "_MOST_OPERATIONS", 10)
    chosen, timed, why = choose(monkeypatch)
    assert (chosen, timed) == (LOOP, [])
    assert "operations takes too long to compile" in why


def test_counts_the_operations_inside_of_functions():
    traced = jax.jit(lambda x: jax.jit(lambda y: jnp.sin(y) + 1)(x) * 2).trace(1.0)
    assert dispatch._num_operations(traced.jaxpr.jaxpr) == 3
