"""Echo on the devices and on the host, in the trainer: alike, and resumed."""

import dataclasses
import io
import itertools
import re
import threading
from contextlib import closing

import grain
import jax
import numpy as np
import pytest
from rich.console import Console
from slow_cases import slow_but_for
from tiny_workload import functions_of, make_workload, rows_of, run, tiny_config

import echo_jax as ej
from echo_jax.echo import SINGLE, DataShard
from echo_jax.training import NonFiniteLossError, next_group, train
from echo_jax.training.feeds import JoinedBatches, open_feed

pytestmark = pytest.mark.usefixtures("all_compiled_soon")

FIXED = {
    "echo__after": "decode",
    "echo__factor": 2.5,
    "echo__order": "spread",
    "echo__buffer": 20,
}
DEVICE = {**FIXED, "echo__where": "device"}
ADAPTIVE = {
    "echo__after": "decode",
    "echo__where": "device",
    "echo__mode": "adaptive",
    "echo__buffer": 40,
    "echo__cap": 3,
}
STOCHASTIC = {
    "echo__after": "decode",
    "echo__where": "device",
    "echo__mode": "stochastic",
    "echo__buffer": 24,
    "echo__load__schedule": "linear",
    "echo__load__start": 0.8,
    "echo__load__end": 0.2,
    "echo__load__updates": 12,
}
GROUPS = {"dispatch__steps": 2}
MODES = {
    "spread": DEVICE,
    "shuffle": {**DEVICE, "echo__order": "shuffle"},
    "shuffle_buffer": {**DEVICE, "echo__order": "shuffle_buffer", **GROUPS},
    "stochastic": {**STOCHASTIC, **GROUPS},
    "host": {"echo__factor": 2.5, "dispatch__steps": 3},
}


def exact(row):
    """A row without what depends on time, and on what else a program computes."""
    timed = ("_s", "_per_s", "idle_fraction", "flops_per_update")
    return {name: value for name, value in row.items() if not name.endswith(timed)}


def assert_rows_close(workdir, other, rel=1e-6):
    for row, wanted in zip(rows_of(workdir), rows_of(other), strict=True):
        row, wanted = exact(row), exact(wanted)
        assert row.pop("kind") == wanted.pop("kind")
        assert row == pytest.approx(wanted, rel=rel)


def losses(workdir):
    return [row["loss"] for row in rows_of(workdir) if row["kind"] == "train"]


@pytest.mark.parametrize(
    "mode", slow_but_for(["spread"], ["spread", "consecutive", "stochastic"])
)
def test_the_devices_train_on_the_hosts_batches(tmp_path, mode):
    options = STOCHASTIC if mode == "stochastic" else {**FIXED, "echo__order": mode}
    host = run(tmp_path / "host", **options | {"echo__where": "host"})
    device = run(tmp_path / "device", **options | {"echo__where": "device"})
    assert_rows_close(tmp_path / "device", tmp_path / "host")
    assert (device["fresh"], device["repeats"]) == (host["fresh"], host["repeats"])
    assert device["echo"]["where"] == "device"
    assert device["R"] == device["t_up_s"] / device["t_down_s"]


def test_as_many_lanes_are_the_same_on_one_device_and_on_eight(tmp_path):
    options = {**STOCHASTIC, "echo__lanes": 8, "echo__buffer": 80, "log_every": 1}
    one = run(tmp_path / "one", **options)
    eight = run(tmp_path / "eight", **options, mesh__data=8)
    np.testing.assert_allclose(
        losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-5
    )
    assert (one["fresh"], one["repeats"]) == (eight["fresh"], eight["repeats"])


@pytest.mark.parametrize(
    "mode", slow_but_for(["shuffle_buffer", "stochastic", "host"], MODES)
)
def test_a_run_is_resumed_to_the_bit_at_any_phase(tmp_path, mode):
    whole = run(tmp_path / "whole", **MODES[mode])
    for updates in (2, 5, 12):
        parts = run(tmp_path / "parts", **MODES[mode], updates=updates)
    assert parts["params_sha256"] == whole["params_sha256"]
    assert (parts["fresh"], parts["final"]) == (whole["fresh"], whole["final"])


@pytest.mark.parametrize(
    "place",
    [{}, {"echo__where": "host"}, {"echo__where": "host", "echo__after": "batch"}],
    ids=["device", "host", "batch"],
)
def test_an_adaptive_run_that_was_stopped_repeats_with_its_tape(tmp_path, place):
    options = {**ADAPTIVE, **place}
    first, again = tmp_path / "first", tmp_path / "again"
    for updates in (3, 5, 12):
        summary = run(first, **options, updates=updates)
    tape = ej.DecisionLog.load(first / "tape.json")
    assert len(tape) == 12
    assert summary["fresh"] == 8 * sum(tape)
    assert summary["fresh"] + summary["repeats"] == 8 * 12
    # A replay too may be stopped.
    for updates in (7, 12):
        replayed = run(
            again, **options, updates=updates, echo__replay=str(first / "tape.json")
        )
    assert replayed["params_sha256"] == summary["params_sha256"]
    assert ej.DecisionLog.load(again / "tape.json") == tape


def test_an_adaptive_run_takes_fresh_data_by_a_pattern(tmp_path):
    summary = run(tmp_path, **ADAPTIVE, echo__replay="pattern:10110000")
    log = ej.DecisionLog.load(tmp_path / "tape.json")
    assert [*log] == [bool(int(each)) for each in "101100001011"]
    assert (summary["fresh"], summary["repeats"]) == (8 * 6, 8 * 6)


def test_a_producer_that_stops_leaves_the_run_training_until_the_cap(tmp_path):
    """Five fresh batches come, then none until fifteen updates were made of them."""
    config = tiny_config(**ADAPTIVE, updates=24, log_every=1, eval_every=15)
    workload = make_workload(config)
    is_training, goes_on = threading.Event(), threading.Event()
    # 5 fresh batches, 3 uses each: 15 updates are possible, and the next one must wait.
    # Would it not, it had all the time to use something a fourth time.
    later = threading.Timer(0.5, goes_on.set)

    def stall(index, batch):
        if is_training.is_set() and index >= 5:
            assert goes_on.wait(300), "the trainer waited for the producer"
        return batch

    def fresh_dataset(shard=None):
        del shard
        items = [*itertools.islice(workload.fresh_dataset(), 40)]
        items = grain.MapDataset.source(items).map_with_index(stall)
        return items.to_iter_dataset(grain.ReadOptions(0, 0))

    evaluations = itertools.count()

    def eval_batches(*args, **kwargs):
        [is_training.set, later.start, list][next(evaluations)]()
        return workload.eval_batches(*args, **kwargs)

    stalling = dataclasses.replace(
        workload, fresh_dataset=fresh_dataset, eval_batches=eval_batches
    )
    summary = train(config, stalling, tmp_path)
    assert summary["updates"] == 24
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    seen = {name for row in rows for name in row if name.startswith("loss_repeat")}
    assert seen == {"loss_repeat_0", "loss_repeat_1", "loss_repeat_2"}
    assert sum(ej.DecisionLog.load(tmp_path / "tape.json")[:16]) == 6
    later.join()


def test_a_buffer_by_bytes_holds_as_much_as_fits_and_its_size_is_printed(tmp_path):
    options = {**DEVICE, "echo__buffer": 1, "echo__buffer_bytes": 2000}
    text, config = io.StringIO(), tiny_config(**options, updates=1)
    console = Console(file=text, width=200)
    train(config, make_workload(config), tmp_path, console=console)
    # Four float32 features, and a target.
    found = re.search(r"echo buffer: (\d+) items of 20 bytes", text.getvalue())
    assert found and 90 <= int(found[1]) <= 100


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({**DEVICE, "echo__buffer": 1}, r"buffer"),
        ({**ADAPTIVE, "echo__buffer": 4}, r"buffer=4 is too small .* at least 8"),
        ({**STOCHASTIC, "echo__buffer": 4}, r"buffer=4 holds less than a batch"),
        ({**DEVICE, "echo__lanes": 4, "mesh__data": 8}, r"lanes=4 is not a multiple"),
        (
            {**ADAPTIVE, "echo__replay": "nowhere.json"},
            r"no log of decisions 'nowhere\.json'",
        ),
    ],
)
def test_an_impossible_echo_is_refused_before_anything_is_written(
    tmp_path, overrides, message
):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Shifted:
    """Adds a random number to every feature of an example."""

    scale: float

    def __call__(self, batch, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (4,)))(keys)
        return {**batch, "x": batch["x"] + self.scale * noise}


def opened(config, workload, sample):
    """A feed to be closed, and a function that draws from it."""
    mesh = functions_of().mesh
    feed = open_feed(config, workload, mesh, sample=sample)
    draw = jax.jit(feed.batching)
    return closing(feed), lambda inputs: draw(feed.arrays, inputs)


def test_a_key_belongs_to_a_use_and_not_to_a_place():
    options = {"echo__factor": 2.0, "echo__order": "consecutive", "seed": 3}
    config = tiny_config(**{**DEVICE, **options, "dispatch__steps": 2})
    workload = dataclasses.replace(
        make_workload(config), augment_on_device=Shifted(0.5)
    )
    sample = next(iter(workload.fresh_dataset()))

    def drawn(*takes):
        """All examples of some inputs, with so many updates in each."""
        feed, draw = opened(config, workload, sample)
        with feed as feed:
            found = [batch["x"] for take in takes for batch in draw(feed.take(take))]
        return np.concatenate(found)

    noise = drawn(2) - np.repeat(sample["x"], 2, axis=0)
    assert np.abs(noise).min() > 0
    assert len(np.unique(noise.round(6), axis=0)) == 16
    np.testing.assert_array_equal(drawn(1, 1), drawn(2))


def test_an_input_that_is_held_loses_nothing():
    config = tiny_config(**STOCHASTIC)
    workload = make_workload(config)
    # Not what is in the slots anyway.
    sample = jax.tree.map(np.ones_like, next(iter(workload.fresh_dataset())))

    def drawn(holds):
        feed, draw = opened(config, workload, sample)
        with feed as feed:
            for _ in range(8):
                if holds:
                    (held,) = draw(feed.hold(1))
                    assert np.isfinite(held["x"]).all() and held["x"].any()
                yield np.asarray(draw(feed.take(1))[0]["x"])

    np.testing.assert_array_equal(list(drawn(holds=True)), list(drawn(holds=False)))


def test_every_use_is_augmented_anew_if_the_echo_follows_decoding(tmp_path):
    def train_with(scale, name, **overrides):
        options = {**DEVICE, "log_every": 1, "updates": 4, "eval_every": 4}
        config = tiny_config(**options | overrides)
        workload = dataclasses.replace(
            make_workload(config), augment_on_device=Shifted(scale)
        )
        train(config, workload, tmp_path / name)
        return losses(tmp_path / name)

    plain, shifted = train_with(0.0, "plain"), train_with(0.5, "shifted")
    assert shifted != plain
    assert train_with(0.5, "other", seed=1) != shifted
    # Augmented before the echo, they are not augmented again.
    assert train_with(0.5, "before", echo__after="augment") == plain


def test_shards_make_the_rows_of_the_whole_and_go_on_from_their_states():
    workload, spec = make_workload(tiny_config()), ej.EchoSpec(2, 4, "consecutive", 1)

    def joined(*shards):
        datasets = [workload.train_dataset(spec, shard) for shard in shards]
        return closing(JoinedBatches(datasets))

    halves = [DataShard(0, count=2), DataShard(1, count=2)]
    with joined(SINGLE) as whole, joined(*halves) as parts, joined(halves[1]) as own:
        wanted = [next(whole) for _ in range(6)]
        found = [next(parts)]
        state = parts.get_state()
        found += itertools.islice(parts, 5)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        # A process for each of them goes on as well.
        own.set_state(state[1:])
        second = {name: x[4:] for name, x in wanted[1].items()}
        jax.tree.map(np.testing.assert_array_equal, next(own), second)


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
    """And their updates are counted alike: XLA counts the body of a scan once."""
    flops = set()
    for steps in (1, 2):
        folder = tmp_path / str(steps)
        summary = run(folder, echo__factor=2.5, dispatch__steps=steps)
        assert summary["dispatch"] == {"steps": steps}
        assert (summary["fresh"], summary["repeats"]) == (40, 56)
        assert_rows_close(folder, tmp_path / "1", rel=1e-5)
        flops.add(summary["flops_per_update"])
    assert len(flops) == 1


def test_the_first_bad_update_is_found_inside_a_group(tmp_path):
    # Batch placement, factor 2: fresh batch 3 is used by updates 7 and 8.
    options = {"echo__factor": 2.0, "updates": 40, "log_every": 8, "eval_every": 40}
    with pytest.raises(NonFiniteLossError) as caught:
        run(tmp_path, nan_at_fresh=3, **options, **GROUPS)
    assert caught.value.update == 7
