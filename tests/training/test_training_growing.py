"""Batches that grow: the same data in parts, one compilation a stage, and resumed."""

import itertools
from contextlib import closing

import jax
import numpy as np
import pytest
from compilations import counted_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import slow_but_for
from tiny_workload import make_workload, rows_of, run, tiny_config

from echo_jax.config import BatchGrowth, check_config
from echo_jax.training.feeds import check_echo, open_feed
from echo_jax.training.processes import make_mesh

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

# Batches of 2, of 4 and of 8.
GROWS = {"batch__boundaries": (8, 12), "batch__factors": (2, 2)}
PARTS = [4] * 8 + [2] * 4 + [1] * 2
HOST = {
    "echo__after": "decode",
    "echo__factor": 2.5,
    "echo__buffer": 24,
    "echo__order": "spread",
}
DEVICE = {**HOST, "echo__where": "device", "echo__lanes": 2}


def feed_of(**options):
    config = tiny_config(updates=20, **options)
    check_config(config)
    workload, mesh = make_workload(config), make_mesh(1, 1, 8)
    check_echo(config, workload, mesh)
    sample = next(iter(workload.fresh_dataset()))
    if config.echo.where == "host":
        sample |= {"repeat": np.zeros(8, np.int32)}
    return open_feed(config, workload, mesh, sample=sample)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 4)), max_size=3))
def test_every_part_of_every_batch_is_used_once(stages):
    factors = tuple(factor for _, factor in stages)
    parts = [int(np.prod(factors[k:], dtype=int)) for k in range(len(factors))]
    lengths = [batches * p for (batches, _), p in zip(stages, parts, strict=True)]
    growth = BatchGrowth(tuple(itertools.accumulate(lengths)), factors)
    assert growth.first_split() is None
    seen = [(growth.parts(u), growth.number(u)) for u in range(sum(lengths) + 2)]
    expected = [
        (p, number)
        for (batches, _), p in zip(stages, parts, strict=True)
        for _ in range(batches)
        for number in range(p)
    ]
    assert seen == [*expected, (1, 0), (1, 0)]


def test_on_the_host_its_parts_are_the_batches_of_a_run_that_does_not_grow():
    with closing(feed_of(**HOST)) as whole, closing(feed_of(**HOST, **GROWS)) as grown:
        inputs = [grown.take(1) for _ in PARTS]
        batches = [whole.take(1) for _ in range(6)]
    assert [8 // each.repeat.shape[1] for each in inputs] == PARTS
    jax.tree.map(
        lambda *leaves: np.testing.assert_array_equal(
            np.concatenate(leaves[:14], axis=1), np.concatenate(leaves[14:], axis=1)
        ),
        *inputs,
        *batches,
    )


def test_on_the_devices_a_part_has_as_many_uses_of_every_lane():
    with (
        closing(feed_of(**DEVICE)) as whole,
        closing(feed_of(**DEVICE, **GROWS)) as grown,
    ):
        parts = [grown.take(1).uses for _ in range(4)]
        batch = whole.take(1).uses
    lanes = np.stack([each.reshape(1, 2, 2, 1) for each in parts], axis=3)
    np.testing.assert_array_equal(lanes.reshape(1, 2, 8), batch)


@pytest.mark.parametrize("where", [HOST, DEVICE], ids=["host", "device"])
def test_a_feed_goes_on_from_any_part(where):
    batching = jax.jit(lambda feed, *args: feed.batching(*args), static_argnums=0)

    def batch_of(feed):
        inputs = feed.take(1)
        (batch,) = batching(feed, feed.arrays, feed.batching.send(inputs))
        return jax.device_get(batch)

    with closing(feed_of(**where, **GROWS)) as feed:
        states, batches = [], []
        for _ in PARTS:
            states.append(feed.get_state())
            held = feed.hold(1).repeat.shape
            batches.append(batch_of(feed))
            assert held == (1, len(batches[-1]["repeat"]))
    for start in (0, 3, 9, 12):
        with closing(feed_of(**where, **GROWS)) as feed:
            feed.set_state(states[start])
            for expected in batches[start:]:
                jax.tree.map(np.testing.assert_array_equal, batch_of(feed), expected)


@pytest.mark.parametrize("where", slow_but_for(["device"], ["host", "device"]))
def test_a_run_counts_examples_and_is_resumed_to_the_bit(tmp_path, where):
    options = {**(DEVICE if where == "device" else HOST), **GROWS, "log_every": 2}
    options |= {"optim__scale": "linear", "optim__reference_batch": 8}
    whole = run(tmp_path / "whole", **options, updates=14)
    assert whole["fresh"] + whole["repeats"] == 8 * 2 + 4 * 4 + 2 * 8
    run(tmp_path / "stopped", **options, updates=6)
    resumed = run(tmp_path / "stopped", **options, updates=14)
    assert resumed["params_sha256"] == whole["params_sha256"]
    # The rate grows with the batch.
    rows = [row for row in rows_of(tmp_path / "whole") if "learning_rate" in row]
    rates = {row["updates"]: row["learning_rate"] for row in rows}
    expected = {2: 0.0025, 8: 0.0025, 10: 0.005, 12: 0.005, 14: 0.01}
    assert {each: rates[each] for each in expected} == pytest.approx(expected)
    # What an update computes is not one number.
    assert "flops_per_update" not in whole


def test_all_sizes_are_compiled_before_the_first_update(tmp_path):
    taken = []

    def on_batch(number):
        taken.append(len(compiled))

    jax.clear_caches()
    with counted_compilations() as compiled:
        run(tmp_path, **HOST, **GROWS, updates=14, eval_every=14, on_batch=on_batch)
    # What is compiled after the last batch is read ends the run.
    assert taken[0] == taken[-1] > 3
