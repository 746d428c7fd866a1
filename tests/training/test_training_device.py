"""Echo on the devices, in the trainer: as on the host, and resumed bit by bit."""

import dataclasses
import io
import itertools
import re
import signal
import threading
from contextlib import closing

import grain
import jax
import numpy as np
import pytest
from rich.console import Console
from slow_cases import slow_but_for
from tiny_workload import make_workload, rows_of, run, tiny_config

from echo_jax.echo.decision_log import DecisionLog
from echo_jax.training import Interrupted, train
from echo_jax.training.feeds.device_feed import DeviceEchoFeed
from echo_jax.training.feeds.of_config import open_feed
from echo_jax.training.trainer import compile_functions

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
MODES = {
    "fixed": DEVICE,
    "shuffle": {**DEVICE, "echo__order": "shuffle"},
    "shuffle_buffer": {**DEVICE, "echo__order": "shuffle_buffer"},
    "groups": {**DEVICE, "dispatch__mode": "scan", "dispatch__steps": 2},
    "stochastic": STOCHASTIC,
    "random groups": {**STOCHASTIC, "dispatch__mode": "scan", "dispatch__steps": 2},
}


def exact(row):
    """A row without what depends on time, and on what else a program computes."""
    timed = ("_s", "_per_s", "idle_fraction", "flops_per_update")
    return {name: value for name, value in row.items() if not name.endswith(timed)}


def losses(workdir):
    return [row["loss"] for row in rows_of(workdir) if row["kind"] == "train"]


@pytest.fixture
def on_take(monkeypatch):
    """Has functions called before the device feed makes an input, by its number."""
    calls = {}
    original = DeviceEchoFeed.take
    number = [0]

    def take(self, num_updates):
        number[0] += 1
        calls.get(number[0], lambda: None)()
        return original(self, num_updates)

    monkeypatch.setattr(DeviceEchoFeed, "take", take)

    def arrange(new):
        number[0] = 0
        calls.clear()
        calls.update(new)

    return arrange


def stop():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    "order",
    slow_but_for(
        ["shuffle_buffer", "spread"],
        ["consecutive", "shuffle", "shuffle_buffer", "spread"],
    ),
)
def test_the_devices_train_on_the_hosts_batches(tmp_path, order):
    options = {**FIXED, "echo__order": order, "log_every": 1}
    host = run(tmp_path / "host", **options)
    device = run(tmp_path / "device", **options, echo__where="device")
    rows = [list(map(exact, rows_of(tmp_path / name))) for name in ("host", "device")]
    for row, other in zip(*rows, strict=True):
        assert row.pop("kind") == other.pop("kind")
        assert row == pytest.approx(other, rel=1e-6)
    assert (device["fresh"], device["repeats"]) == (host["fresh"], host["repeats"])
    assert device["echo"]["where"] == "device"
    assert device["R"] == device["t_up_s"] / device["t_down_s"]


@pytest.mark.parametrize("mode", slow_but_for(["stochastic"], ["fixed", "stochastic"]))
@pytest.mark.usefixtures("compiled_soon")
def test_as_many_lanes_are_the_same_on_one_device_and_on_eight(tmp_path, mode):
    options = {**MODES[mode], "echo__lanes": 8, "echo__buffer": 80, "log_every": 1}
    one = run(tmp_path / "one", **options)
    eight = run(tmp_path / "eight", **options, mesh__data=8)
    np.testing.assert_allclose(
        losses(tmp_path / "eight"), losses(tmp_path / "one"), rtol=1e-5
    )
    assert (one["fresh"], one["repeats"]) == (eight["fresh"], eight["repeats"])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    runs = {}

    def of(mode):
        if mode not in runs:
            workdir = tmp_path_factory.mktemp("unbroken")
            runs[mode] = run(workdir, **MODES[mode]), rows_of(workdir)
        return runs[mode]

    return of


@pytest.mark.parametrize(
    ("mode", "take"),
    slow_but_for(
        [("fixed", 2), ("fixed", 5), *((mode, 3) for mode in MODES)],
        [("fixed", 2), ("fixed", 6), *itertools.product(MODES, [3, 5])],
    ),
)
def test_resumes_bit_by_bit_at_any_phase(tmp_path, unbroken, on_take, mode, take):
    on_take({take: stop})
    with pytest.raises(Interrupted):
        run(tmp_path, **MODES[mode])
    summary = run(tmp_path, **MODES[mode])
    whole, rows = unbroken(mode)
    assert summary["params_sha256"] == whole["params_sha256"]
    assert list(map(exact, rows_of(tmp_path))) == list(map(exact, rows))


def test_an_adaptive_run_that_was_stopped_repeats_with_its_tape(tmp_path, on_take):
    first = tmp_path / "first"
    for take in (3, 4):
        on_take({take: stop})
        with pytest.raises(Interrupted):
            run(first, **ADAPTIVE)
    on_take({})
    summary = run(first, **ADAPTIVE)
    tape = DecisionLog.load(first / "tape.json")
    assert len(tape) == 12
    assert summary["fresh"] == 8 * sum(tape)

    again = tmp_path / "again"
    replayed = run(again, **ADAPTIVE, echo__replay=str(first / "tape.json"))
    assert replayed["params_sha256"] == summary["params_sha256"]
    assert list(map(exact, rows_of(again))) == list(map(exact, rows_of(first)))
    assert DecisionLog.load(again / "tape.json") == tape


def test_a_replay_too_may_be_stopped(tmp_path, on_take):
    tape = DecisionLog([True, False, True, True, False, False, True, False, True, True])
    tape.save(tmp_path / "given.json")
    options = {
        **ADAPTIVE,
        "updates": 10,
        "echo__replay": str(tmp_path / "given.json"),
    }
    whole = run(tmp_path / "whole", **options)
    assert DecisionLog.load(tmp_path / "whole" / "tape.json") == tape
    on_take({6: stop})
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", **options)
    resumed = run(tmp_path / "stopped", **options)
    assert resumed["params_sha256"] == whole["params_sha256"]


def test_a_producer_that_stops_leaves_the_run_training_until_the_cap(tmp_path, on_take):
    """Five fresh batches come, then none until fifteen updates were made of them."""
    config = tiny_config(**ADAPTIVE, updates=24, log_every=1)
    workload = make_workload(config)
    is_training, goes_on = threading.Event(), threading.Event()

    def stall(index, batch):
        if is_training.is_set() and index >= 5:
            assert goes_on.wait(300), "the trainer waited for the producer"
        return batch

    def fresh_dataset(shard=None):
        del shard
        items = grain.MapDataset.source(_some_batches(workload, 40))
        return items.map_with_index(stall).to_iter_dataset(grain.ReadOptions(0, 0))

    stalling = dataclasses.replace(workload, fresh_dataset=fresh_dataset)
    # 5 fresh batches, 3 uses each: 15 updates are possible, and the next one must wait.
    # Would it not, it had all the time to use something a fourth time.
    later = threading.Timer(0.5, goes_on.set)
    on_take({1: is_training.set, 16: later.start})
    summary = train(config, stalling, tmp_path)
    assert summary["updates"] == 24
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    seen = {name for row in rows for name in row if name.startswith("loss_repeat")}
    assert seen == {"loss_repeat_0", "loss_repeat_1", "loss_repeat_2"}
    assert sum(DecisionLog.load(tmp_path / "tape.json")[:16]) == 6
    later.join()

    replayed = run(
        tmp_path / "again",
        **ADAPTIVE,
        updates=24,
        log_every=1,
        echo__replay=str(tmp_path / "tape.json"),
    )
    assert replayed["params_sha256"] == summary["params_sha256"]


def _some_batches(workload, count):
    dataset = iter(workload.fresh_dataset())
    return [next(dataset) for _ in range(count)]


def shown(workdir, **overrides):
    text = io.StringIO()
    config = tiny_config(**overrides)
    train(config, make_workload(config), workdir, console=Console(file=text, width=200))
    return text.getvalue()


def test_says_how_large_the_buffer_is_before_it_trains(tmp_path):
    _, _, first, second, *_ = shown(tmp_path, **DEVICE).splitlines()
    # Four float32 features, and a target.
    assert re.search(r"echo buffer: \d+ items of 20 bytes", first)
    assert "update 0" in second


def test_a_buffer_by_bytes_holds_as_much_as_fits(tmp_path):
    options = {**DEVICE, "echo__buffer": 1, "echo__buffer_bytes": 2000}
    line = shown(tmp_path, **options).splitlines()[2]
    found = re.search(r"echo buffer: (\d+) items of 20 bytes", line)
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


def test_a_key_belongs_to_a_use_and_not_to_a_place():
    options = {"echo__factor": 2.0, "echo__order": "consecutive", "seed": 3}
    config = tiny_config(**{**DEVICE, **options, "dispatch__mode": "scan"})
    workload = dataclasses.replace(
        make_workload(config), augment_on_device=Shifted(0.5)
    )
    mesh = compile_functions(config, workload).mesh
    batches = _some_batches(workload, 1)

    def drawn(*takes):
        """All examples of some inputs, with so many updates in each."""
        feed = open_feed(config, workload, mesh, factor=2.0, sample=batches[0])
        with closing(feed):
            rows = []
            for take in takes:
                inputs = feed.take(take)
                found = jax.jit(feed.batching)(feed.arrays, inputs)
                rows += [np.asarray(batch["x"]) for batch in found]
        return np.concatenate(rows)

    noise = drawn(2) - np.repeat(batches[0]["x"], 2, axis=0)
    assert np.abs(noise).min() > 0
    assert len(np.unique(noise.round(6), axis=0)) == 16
    np.testing.assert_array_equal(drawn(1, 1), drawn(2))


def test_an_input_that_is_held_loses_nothing():
    config = tiny_config(**STOCHASTIC)
    workload = make_workload(config)
    mesh = compile_functions(config, workload).mesh
    (first,) = _some_batches(workload, 1)
    sample = jax.tree.map(np.ones_like, first)  # Not what is in the slots anyway.

    def drawn(holds):
        feed = open_feed(config, workload, mesh, factor=None, sample=sample)
        draw = jax.jit(feed.batching)
        with closing(feed):
            for _ in range(8):
                if holds:
                    inputs = feed.hold(1)
                    (held,) = draw(feed.arrays, inputs)
                    assert np.isfinite(held["x"]).all() and held["x"].any()
                inputs = feed.take(1)
                yield np.asarray(draw(feed.arrays, inputs)[0]["x"])

    np.testing.assert_array_equal(list(drawn(holds=True)), list(drawn(holds=False)))


def test_every_use_is_augmented_anew_if_the_echo_follows_decoding(tmp_path):
    def train_with(scale, name, **overrides):
        config = tiny_config(**{**DEVICE, "log_every": 1, **overrides})
        workload = dataclasses.replace(
            make_workload(config), augment_on_device=Shifted(scale)
        )
        train(config, workload, tmp_path / name)
        return losses(tmp_path / name)

    plain = train_with(0.0, "plain")
    shifted = train_with(0.5, "shifted")
    assert shifted != plain
    assert train_with(0.5, "again") == shifted
    assert train_with(0.5, "other", seed=1) != shifted
    groups = train_with(0.5, "groups", dispatch__mode="scan", dispatch__steps=1)
    np.testing.assert_allclose(groups, shifted, rtol=1e-5)
    # Augmented before the echo, they are not augmented again.
    assert train_with(0.5, "before", echo__after="augment") == plain
