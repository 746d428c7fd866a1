"""The loop of a run: what it writes, when it ends, and what an update computes."""

import dataclasses
import itertools
import json
import signal
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from compilations import counted_compilations
from jax.profiler import ProfileData
from tiny_workload import (
    Regression,
    batch_of,
    functions_of,
    make_workload,
    registered,
    rows_of,
    run,
    saved_update,
    stop_at,
    tiny_config,
)

import echo_jax as ej
from echo_jax import runs
from echo_jax.config import RunSpec
from echo_jax.files import FolderInUseError, FolderLock, run_folder
from echo_jax.training import Interrupted, NonFiniteLossError, calibrate
from echo_jax.training.arrays import make_mesh, param_shardings
from echo_jax.training.loop import train_checked
from echo_jax.training.saving import params_sha256
from echo_jax.training.start import check_start

pytestmark = pytest.mark.usefixtures("all_compiled_soon")


def test_a_run_leaves_what_its_readers_need(tmp_path):
    summary = run(tmp_path, echo__factor=2.5, updates=12)
    written, saved, environment = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("summary", "config", "environment")
    )
    assert written == summary
    config = tiny_config(echo__factor=2.5).to_dict()
    # How it is carried out and looked at is no part of a run.
    del config["distributed"], config["log"], config["profile"]
    for name in ("timeout_s", "check_finite"):
        del config["data"][name]
    assert saved == json.loads(json.dumps(config))
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["devices"] == ["cpu"] * 8
    assert environment["workload"] == {"synthetic_data": True}

    rows = rows_of(tmp_path)
    kinds = ["eval", "train", "eval", "train", "train", "eval"]
    wanted = [*zip(kinds, [0, 4, 6, 8, 12, 12], strict=True)]
    assert [(row["kind"], row["updates"]) for row in rows] == wanted
    # Fresh batch k is used 2, 3, 2, 3, 2 times.
    repeats = np.concatenate([np.arange(n) for n in (2, 3, 2, 3, 2)])
    for row in rows:
        assert row["fresh"] == 8 * (repeats[: row["updates"]] == 0).sum()
        assert row["updates"] * 8 == row["fresh"] + row["repeats"]
    trained = rows_of(tmp_path, "train")
    for first, row in zip((0, 4, 8), trained, strict=True):
        seen = {name for name in row if name.startswith("loss_repeat")}
        assert seen == {f"loss_repeat_{i}" for i in repeats[first : first + 4]}
    for before, after in itertools.pairwise(trained):
        busy_s = after["busy_s"] - before["busy_s"]
        wall_s = after["wall_s"] - before["wall_s"]
        assert busy_s > 0
        # The two clocks are read one after the other, so work may seem longer.
        idle = max(1 - busy_s / wall_s, 0)
        assert after["idle_fraction"] == pytest.approx(idle, abs=1e-6)
        assert after["examples_per_s"] == pytest.approx(32 / wall_s)
        per_s = 4 * after["flops_per_update"] / wall_s
        assert after["flops_per_s"] == pytest.approx(per_s, rel=1e-6)

    assert (summary["updates"], summary["fresh"], summary["repeats"]) == (12, 40, 56)
    assert summary["final"] == {"loss": rows[-1]["eval_loss"]}
    idle = 1 - summary["busy_s"] / summary["wall_s"]
    assert summary["idle_fraction"] == pytest.approx(idle)
    assert summary["train_final"] == {
        "loss": trained[-1]["loss"], "kept": trained[-1]["train_kept"]
    }  # fmt: skip
    assert summary["target"] is None and not summary["reached"]


def test_a_run_is_its_updates_one_after_another(tmp_path):
    summary = run(tmp_path, echo__factor=2.0, updates=3, eval_every=1)
    config = tiny_config(echo__factor=2.0)
    compiled = functions_of(echo__factor=2.0)
    state = compiled.init(compiled.init_key)
    batches = make_workload(config).train_dataset(ej.EchoSpec(2.0, batch_size=1))
    for batch in itertools.islice(batches, 3):
        state, _ = compiled.step_on_batch(state, batch)
    assert params_sha256(state.params) == summary["params_sha256"]


def test_a_run_under_way_is_joined_by_no_other(tmp_path):
    refused, killed = [], tmp_path / f".summary.json.{0:016x}.new"
    killed.touch()

    def join(number):
        with pytest.raises(FolderInUseError) as error:
            run(tmp_path)
        refused.append(error)

    whole = run(tmp_path, echo__factor=2.5, on_batch=join)
    assert len(refused) >= 12 and not killed.exists()
    assert [row["updates"] for row in rows_of(tmp_path)] == [0, 4, 6, 8, 12, 12]
    # A finished run is not trained again.
    written = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert run(tmp_path, echo__factor=2.5) == whole
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == written


def test_a_run_that_has_lost_its_folder_stops_there(tmp_path):
    class Lost(FolderLock):
        calls = 0

        def check(self):
            self.calls += 1
            if self.calls == 3:
                raise FolderInUseError(folder / ".lock", b"another process")

    config, folder = RunSpec.of(tiny_config(updates=100)), run_folder(tmp_path)
    workload = make_workload(config)
    accepted = check_start(config, workload, folder)
    with pytest.raises(FolderInUseError, match="in use by another process"):
        train_checked(accepted, Lost())
    assert not (tmp_path / "summary.json").exists()
    assert not any(row["updates"] > 4 for row in rows_of(tmp_path))


def test_training_learns_and_stops_at_the_target(tmp_path):
    options = {"updates": 80, "eval_every": 10, "log_every": 100, "optim__lr": 0.05}
    options["task"] = Regression(dropout=0.0)
    run(tmp_path / "all", **options)
    evals = rows_of(tmp_path / "all", "eval")
    assert evals[-1]["eval_loss"] < evals[0]["eval_loss"] / 4
    target = evals[0]["eval_loss"] / 2
    first = next(row for row in evals if row["eval_loss"] <= target)
    assert first["updates"] < 80

    summary = run(tmp_path / "stop", target=target, stop_at_target=True, **options)
    assert summary["reached"]
    assert summary["updates"] == summary["updates_to_target"] == first["updates"]
    assert summary["fresh_to_target"] == first["fresh"]
    assert 0 < summary["seconds_to_target"] <= summary["wall_s"]
    # A finished run knows its rows: another target is looked up, not trained for.
    looked_up = run(tmp_path / "all", target=target, **options)
    assert looked_up["updates"] == 80
    assert looked_up["updates_to_target"] == first["updates"]


@pytest.mark.parametrize("group", [1, 2])
def test_the_first_loss_that_is_not_finite_ends_the_run(tmp_path, group):
    # Batch placement, factor 2: fresh batch 3 is used by updates 7 and 8.
    options = {"echo__factor": 2.0, "updates": 40, "eval_every": 100}
    options |= {"checkpoint_every": 4, "log_every": 100, "dispatch__steps": group}
    message = r"loss of update 7 is not finite; the last checkpoint, of update 4,"
    with pytest.raises(NonFiniteLossError, match=message) as caught:
        run(tmp_path, nan_at_fresh=3, **options)
    assert caught.value.update == 7
    assert saved_update(tmp_path) == 4
    assert all(np.isfinite(row.get("loss", 0)) for row in rows_of(tmp_path))
    assert not (tmp_path / "summary.json").exists()


def test_another_config_or_other_data_in_the_folder_are_refused(tmp_path):
    def trained(updates, metadata, **overrides):
        replaced = {"metadata": metadata}
        return run(tmp_path, updates=updates, replaced=replaced, **overrides)

    saved = {"sha256": "a", "source": "here"}
    trained(2, saved)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(ValueError, match=r"echo\.factor \(1\.0 -> 2\.0\)"):
        trained(2, saved, echo__factor=2.0)
    for found in ({"train": {"sha256": "b"}}, {}):
        with pytest.raises(ValueError, match="of update 2 was trained on other data"):
            trained(4, found)
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    assert after == before
    # The same data may lie elsewhere.
    moved = saved | {"source": "there"}
    for metadata in ({"sha256": "b"}, {}):
        with pytest.raises(ValueError, match=r"data\.source \('' -> 'there'\)"):
            trained(4, metadata, data__source="there")
    assert trained(4, moved, data__source="there")["updates"] == 4
    assert trained(6, saved)["updates"] == 6


def test_a_workload_is_built_of_a_frozen_config(tmp_path):
    seen = []

    def build(config):
        seen.append(config)
        return make_workload(config)

    config = tiny_config(updates=1)
    with registered(build):
        runs.run_train(config, tmp_path)
    assert {*map(type, seen)} == {RunSpec}
    assert seen[0].to_dict() == config.to_dict()
    with pytest.raises(AttributeError):
        seen[0].optim.lr = 1.0


def test_data_that_ends_is_an_error(tmp_path):
    endless = make_workload(tiny_config()).train_dataset(ej.EchoSpec())
    some = grain.MapDataset.source(list(itertools.islice(endless, 40)))
    # A start makes the one to train, and one without an echo to be measured.
    datasets = iter([some[:length].to_iter_dataset() for length in (7, 40)])
    with pytest.raises(ValueError, match=r"'regression' ended after 7 upd.* repeat"):
        run(tmp_path, replaced={"train_dataset": lambda *_: next(datasets)})


def test_what_a_fresh_batch_takes_is_corrected_by_what_the_run_sees(tmp_path):
    workload = make_workload(tiny_config())
    # No batch of this workload takes 20 seconds.
    seen = SimpleNamespace(bounds=lambda: (20.0, 30.0), held_batches=0)

    def watched(*args):
        dataset = workload.train_dataset(*args)
        dataset.fresh_time = seen
        return dataset

    replaced = {"train_dataset": watched}
    summary = run(tmp_path, replaced=replaced, updates=2, log_every=1)
    assert summary["t_up_s"] == 20.0 > summary["t_up_start_s"] > 0
    assert summary["R"] == 20.0 / summary["t_down_s"]
    for row in rows_of(tmp_path, "train"):
        assert row["t_up_s"] == summary["t_up_s"]


def test_the_loader_is_measured_without_the_echo():
    config = RunSpec.of(tiny_config(echo__factor=3.0))
    workload = make_workload(config)
    repeats = []

    def spied(spec, part):
        dataset = workload.train_dataset(spec, part)
        return dataset.map(lambda batch: (repeats.extend(batch["repeat"]), batch)[1])

    rates = calibrate(config, dataclasses.replace(workload, train_dataset=spied))
    assert repeats and not any(repeats)
    assert rates.ratio == rates.t_up_s / rates.t_down_s


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR2])
def test_a_signal_stops_after_the_update_and_saves(tmp_path, signum):
    before = signal.getsignal(signum)
    message = rf"{signum.name} after update 3, and saved; .* same command"
    with pytest.raises(Interrupted, match=message) as caught:
        run(tmp_path, echo__factor=2.0, on_batch=stop_at(3, signum))
    assert caught.value.update == 3
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before
    assert saved_update(tmp_path) == 3


def test_a_signal_that_a_program_handles_by_itself_stays_its_own(tmp_path):
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    try:
        run(tmp_path, echo__factor=2.0, on_batch=stop_at(3, signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


def test_a_second_ctrl_c_aborts_at_once(tmp_path):
    def twice(number):
        if number == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, echo__factor=2.0, on_batch=twice)
    assert saved_update(tmp_path) is None


def test_the_window_counts_losses_by_repeat_and_starts_anew_after_every_log():
    compiled = functions_of(log_every=3)
    state, counts = compiled.init(compiled.init_key), []
    for i in range(4):
        repeat = [0, 1, 0, 6, 7, 8, 1000, i % 2]
        batch = {**batch_of(8 * i), "repeat": np.array(repeat, np.int32)}
        state, report = compiled.step_on_batch(state, batch)
        counts.append(report.window.count.tolist())
    assert counts == [
        [3, 1, 0, 0, 0, 0, 1, 3],
        [5, 3, 0, 0, 0, 0, 2, 6],
        [8, 4, 0, 0, 0, 0, 3, 9],
        [2, 2, 0, 0, 0, 0, 1, 3],
    ]
    row = report.row()
    means = [row[f"loss_repeat_{i}"] for i in (0, 1, 6, "7_and_later")]
    assert np.dot(means, [2, 2, 1, 3]) / 8 == pytest.approx(row["loss"])


def test_randomness_is_a_function_of_seed_and_update():
    def after_one(seed, start):
        compiled = functions_of(seed=seed, optim__lr=0.1)
        state = compiled.init(jax.random.key(0))
        state = state.replace(update=state.update + start)
        state, _ = compiled.step_on_batch(state, batch_of())
        return params_sha256(state.params)

    assert after_one(0, 0) == after_one(0, 0)
    assert len({after_one(0, 0), after_one(1, 0), after_one(0, 1)}) == 3


def test_equal_loss_on_any_mesh():
    seen = []
    for data, fsdp in ((1, 1), (4, 2)):
        compiled = functions_of(mesh__data=data, mesh__fsdp=fsdp)
        state = compiled.init(compiled.init_key)
        for i in range(8):
            state, report = compiled.step_on_batch(state, batch_of(8 * i))
            seen.append(float(report.window.loss.sum()))
    np.testing.assert_allclose(seen[8:], seen[:8], rtol=1e-5)
    first = state.params["first"]
    assert first.addressable_shards[0].data.shape == (4, 8)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == first.shape]
    assert len(moments) == 2
    assert all(x.sharding == first.sharding for x in moments)


def test_the_hash_sees_every_bit_and_no_mesh():
    params = {"a": np.arange(8, dtype=np.float32), "b": np.ones((2, 4), np.float32)}
    nudged = {**params, "a": np.nextafter(params["a"], np.float32(9))}
    split = jax.device_put(params, param_shardings(params, make_mesh(2, 4, 8)))
    shaped = {**params, "b": params["b"].ravel()}
    same, *others = map(params_sha256, (params, nudged, shaped))
    assert params_sha256(split) == same not in others


def test_nothing_is_compiled_after_the_second_step(tmp_path):
    times = {"updates": 8, "log_every": 3, "eval_every": 2, "checkpoint_every": 2}
    workload, counts = make_workload(tiny_config()), []

    def eval_batches(*args, **kwargs):
        counts.append(len(compiled))
        return workload.eval_batches(*args, **kwargs)

    # Another test may have compiled the programs of an equal task.
    jax.clear_caches()
    with counted_compilations() as compiled:
        replaced = {"eval_batches": eval_batches}
        run(tmp_path, replaced=replaced, echo__factor=2.5, **times)
    # After updates 0, 2, 4, ...
    assert len(counts) == 5 and counts[0] > 0
    assert {*counts[2:], len(compiled)} == {counts[2]}


def test_other_numbers_are_no_other_program(tmp_path):
    start = {"updates": 6, "optim__clip_norm": 1.0, "optim__schedule": "cosine"}
    others = [
        {"optim__lr": 0.02, "optim__b1": 0.8, "optim__weight_decay": 0.1},
        {"optim__clip_norm": 0.5, "optim__warmup_updates": 3},
        {"optim__decay_updates": 7, "seed": 3, "log_every": 3},
        {"echo__factor": 2.5, "echo__stage": "decode", "checkpoint_every": 2},
    ]
    found = {run(tmp_path / "start", **start)["params_sha256"]}
    with counted_compilations() as compiled:
        for number, numbers in enumerate(others):
            summary = run(tmp_path / str(number), **{**start, **numbers})
            found.add(summary["params_sha256"])
    assert compiled == []
    # The numbers count nevertheless.
    assert len(found) == 1 + len(others)


def test_a_profile_holds_its_updates_and_changes_nothing_of_the_run(tmp_path, capsys):
    plain = run(tmp_path / "plain", echo__factor=2.5)
    window = {"profile__start": 2, "profile__updates": 3}
    profiled = run(tmp_path / "profiled", echo__factor=2.5, **window)
    assert "profiled update 3 to 5; see" in capsys.readouterr().out
    (file,) = tmp_path.glob("profiled/profile/process-0/plugins/profile/*/*.xplane.pb")
    planes = ProfileData.from_file(str(file)).planes
    # Not which ones: to read an event's numbers ends the process in jax 0.12.
    events = [e.name for plane in planes for line in plane.lines for e in line.events]
    assert events.count("training update") == 3
    assert not (tmp_path / "plain" / "profile").exists()
    assert profiled["params_sha256"] == plain["params_sha256"]
