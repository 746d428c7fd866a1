"""Echo on the devices and on the host, in the trainer, and batches that grow."""

import itertools
import threading
from contextlib import closing

import grain
import jax
import numpy as np
import pytest
from compilations import counted_compilations
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_workload import ADAPTIVE, STOCHASTIC, make_workload, rows_of, run, tiny_config

import echo_jax as ej
from echo_jax.config import BatchSpec, RunSpec, check_config
from echo_jax.training import next_group
from echo_jax.training.arrays import make_mesh
from echo_jax.training.feeds import check_echo, open_feed

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

FIXED = {
    "echo__stage": "decode",
    "echo__factor": 2.5,
    "echo__order": "spread",
    "echo__buffer": 20,
}
DEVICE = {**FIXED, "echo__buffer_on": "device"}
CAPPED = {**ADAPTIVE, "echo__max_uses": 3}
FALLING = {
    **STOCHASTIC,
    "echo__fetch__schedule": "linear",
    "echo__fetch__end": 0.2,
    "echo__fetch__updates": 12,
}
GROUPS = {"dispatch__steps": 2}
MODES = {
    "window_shuffle": {**DEVICE, "echo__order": "window_shuffle"},
    "stochastic": {**FALLING, **GROUPS},
    "host": {"echo__factor": 2.5, "dispatch__steps": 3},
}


def assert_alike(folder, other, rel):
    """That two runs logged the same losses, and evaluated the same models."""
    found, wanted = (
        [row.get("loss", row.get("eval_loss")) for row in rows_of(each)]
        for each in (folder, other)
    )
    assert found == pytest.approx(wanted, rel=rel)


def test_the_devices_train_on_the_hosts_batches(tmp_path):
    host, device = (
        run(tmp_path / where, **FIXED, echo__buffer_on=where)
        for where in ("host", "device")
    )
    assert_alike(tmp_path / "device", tmp_path / "host", 1e-6)
    assert (device["fresh"], device["repeats"]) == (host["fresh"], host["repeats"])
    assert device["echo"]["buffer_on"] == "device"


@pytest.mark.parametrize("mode", MODES)
def test_a_run_is_resumed_to_the_bit_at_any_phase(tmp_path, mode):
    whole = run(tmp_path / "whole", **MODES[mode])
    for updates in (5, 12):
        parts = run(tmp_path / "parts", **MODES[mode], updates=updates)
    assert parts["params_sha256"] == whole["params_sha256"]
    assert (parts["fresh"], parts["final"]) == (whole["fresh"], whole["final"])


@pytest.mark.parametrize(
    "place",
    [{}, {"echo__buffer_on": "host", "echo__stage": "batch"}],
    ids=["device", "batch"],
)
def test_an_adaptive_run_that_was_stopped_repeats_with_its_decisions(tmp_path, place):
    options = {**CAPPED, **place}
    first, again = tmp_path / "first", tmp_path / "again"
    for updates in (5, 12):
        summary = run(first, **options, updates=updates)
    decisions = ej.DecisionLog.from_text((first / "decisions.json").read_text())
    assert len(decisions) == 12
    assert (summary["fresh"], summary["repeats"]) == (
        8 * sum(decisions),
        96 - 8 * sum(decisions),
    )
    # A replay too may be stopped.
    replay = str(first / "decisions.json")
    for updates in (7, 12):
        replayed = run(again, **options, updates=updates, echo__replay=replay)
    assert replayed["params_sha256"] == summary["params_sha256"]
    assert ej.DecisionLog.from_text((again / "decisions.json").read_text()) == decisions


def test_a_producer_that_stops_leaves_the_run_training_until_all_is_used_up(tmp_path):
    options = {**CAPPED, "updates": 24, "log_every": 1, "eval_every": 10}
    workload = make_workload(tiny_config(**options))
    goes_on, opened, evaluated = threading.Event(), itertools.count(), itertools.count()
    # 5 fresh batches, 3 uses each: 15 updates are possible, and the next must wait. If
    # they came late, some uses are a reserve, and it waits earlier.
    later = threading.Timer(0.5, goes_on.set)

    def fresh_dataset(shard=None):
        items = [*itertools.islice(workload.fresh_dataset(), 40)]
        is_trained_on = next(opened) == 0  # The second one is measured.

        def stall(index, batch):
            if is_trained_on and index >= 5:
                assert goes_on.wait(300), "the trainer waited for the producer"
            return batch

        items = grain.MapDataset.source(items).map_with_index(stall)
        return items.to_iter_dataset(grain.ReadOptions(0, 0))

    def eval_batches(*args, **kwargs):
        if next(evaluated) == 1:
            later.start()
        return workload.eval_batches(*args, **kwargs)

    stalling = {"fresh_dataset": fresh_dataset, "eval_batches": eval_batches}
    run(tmp_path, replaced=stalling, **options)
    names = itertools.chain(*rows_of(tmp_path, "train"))
    seen = {name for name in names if name.startswith("loss_repeat")}
    assert seen == {"loss_repeat_0", "loss_repeat_1", "loss_repeat_2"}
    decisions = ej.DecisionLog.from_text((tmp_path / "decisions.json").read_text())
    assert sum(decisions[:11]) == 5 and sum(decisions[:16]) >= 6
    later.join()


def shifted(batch, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
    return {**batch, "x": batch["x"] + 0.5 * noise}


def test_what_was_augmented_before_the_echo_is_not_augmented_again(tmp_path):
    losses = []
    for after in ("augment", "decode"):
        options = {**DEVICE, "echo__stage": after, "log_every": 1, "updates": 4}
        run(tmp_path / after, replaced={"augment_on_device": shifted}, **options)
        losses.append([row["loss"] for row in rows_of(tmp_path / after, "train")])
    assert losses[0] != losses[1]


def test_groups_begin_at_multiples_of_their_size_and_hold_no_stop():
    def groups(total, stops):
        done = [0]
        while done[-1] < total:
            done.append(done[-1] + next_group(done[-1], 2, total=total, stops=stops))
        return done

    # With a stop after every 3 and every 4.
    assert groups(13, [3, 4, 0]) == [0, 2, 3, 4, 6, 8, 9, 10, 12, 13]
    assert groups(6, [50]) == [0, 2, 4, 6]


def test_groups_train_and_log_as_the_loop_does(tmp_path):
    flops = set()
    for steps in (1, 2):
        folder = tmp_path / str(steps)
        summary = run(folder, echo__factor=2.5, dispatch__steps=steps)
        assert summary["dispatch"] == {"steps": steps}
        assert (summary["fresh"], summary["repeats"]) == (40, 56)
        assert_alike(folder, tmp_path / "1", 1e-5)
        flops.add(summary["flops_per_update"])
    assert len(flops) == 1


# Batches of 2, of 4 and of 8.
GROWS = {"batch__boundaries": (8, 12), "batch__factors": (2, 2)}
PARTS = [4] * 8 + [2] * 4 + [1] * 2
HOST = {**FIXED, "echo__buffer": 24}
LANES = {**DEVICE, "echo__buffer": 24, "echo__lanes": 2}


def feed_of(**options):
    config = tiny_config(updates=20, **options)
    check_config(config)
    workload, mesh = make_workload(config), make_mesh(1, 1, 8)
    check_echo(RunSpec.of(config), workload, mesh)
    sample = next(iter(workload.fresh_dataset()))
    if config.echo.buffer_on == "host":
        sample |= {"repeat": np.zeros(8, np.int32)}
    return open_feed(RunSpec.of(config), workload, mesh, sample=sample)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(2, 4)), max_size=3))
def test_every_part_of_every_batch_is_used_once(stages):
    factors = tuple(factor for _, factor in stages)
    parts = [int(np.prod(factors[k:], dtype=int)) for k in range(len(factors))]
    lengths = [batches * p for (batches, _), p in zip(stages, parts, strict=True)]
    growth = BatchSpec(boundaries=tuple(itertools.accumulate(lengths)), factors=factors)
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
    assert [8 // each["repeat"].shape[1] for each in inputs] == PARTS
    jax.tree.map(
        lambda *leaves: np.testing.assert_array_equal(
            np.concatenate(leaves[:14], axis=1), np.concatenate(leaves[14:], axis=1)
        ),
        *inputs,
        *batches,
    )


def test_on_the_devices_a_part_has_as_many_uses_of_every_lane():
    with (
        closing(feed_of(**LANES)) as whole,
        closing(feed_of(**LANES, **GROWS)) as grown,
    ):
        parts = [grown.take(1) for _ in range(4)]
        batch = whole.take(1)
    lanes = np.stack([each.reshape(1, 2, 2, 1) for each in parts], axis=3)
    np.testing.assert_array_equal(lanes.reshape(1, 2, 8), batch)


def test_the_devices_hold_the_sample_before_anything_is_taken():
    with closing(feed_of(**LANES)) as feed:
        held = feed.hold(1)
        (batch,) = jax.device_get(jax.jit(feed.batching)(feed.arrays, held))
    sample = next(iter(make_workload(tiny_config()).fresh_dataset()))
    assert sample["x"].any()
    np.testing.assert_array_equal(batch["x"], sample["x"])


@pytest.mark.parametrize("where", [HOST, LANES], ids=["host", "device"])
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
            held = feed.batching.send(feed.hold(1))
            (held,) = batching(feed, feed.arrays, held)
            batches.append(batch_of(feed))
            assert held["repeat"].shape == batches[-1]["repeat"].shape
    for start in (0, 3, 9, 12):
        with closing(feed_of(**where, **GROWS)) as feed:
            feed.set_state(states[start])
            for expected in batches[start:]:
                jax.tree.map(np.testing.assert_array_equal, batch_of(feed), expected)


def test_a_run_that_grows_counts_examples_and_is_resumed_to_the_bit(tmp_path):
    options = {**LANES, **GROWS, "log_every": 2}
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
