import dataclasses
import io
import itertools
import json
import math
import re
import signal
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest
from compilations import counted_compilations
from rich.console import Console
from tiny_workload import (
    Regression,
    make_workload,
    rows_of,
    run,
    stop_at,
    tiny_config,
)

from echo_jax.echo.spec import EchoSpec
from echo_jax.files.folders import run_folder
from echo_jax.files.json_files import unseal
from echo_jax.files.lock import FolderInUseError, FolderLock
from echo_jax.training import (
    Interrupted,
    NonFiniteLossError,
    calibrate,
    train,
    trainer,
)
from echo_jax.training.measure import measure_rates
from echo_jax.training.records.progress import Progress
from echo_jax.training.saving.checkpoint import Checkpoints, params_sha256
from echo_jax.training.trainer import compile_functions, train_checked


def json_of(workdir, name):
    return unseal(json.loads((workdir / name).read_text()))


def test_a_run_leaves_what_its_readers_need(tmp_path):
    summary = run(tmp_path, echo__factor=2.5, updates=12)
    assert json_of(tmp_path, "summary.json") == summary
    config = tiny_config(echo__factor=2.5).to_dict()
    # How it is carried out and looked at is no part of a run.
    del config["distributed"], config["log"], config["profile"]
    for name in ("timeout_s", "check_finite", "max_bad"):
        del config["data"][name]
    assert json_of(tmp_path, "config.json") == json.loads(json.dumps(config))

    environment = json_of(tmp_path, "environment.json")
    assert environment["versions"]["jax"] == jax.__version__
    assert environment["backend"] == "cpu"
    assert environment["devices"] == ["cpu"] * 8
    assert environment["workload"] == {"synthetic_data": True}

    rows = rows_of(tmp_path)
    assert [(row["kind"], row["updates"]) for row in rows] == [
        ("eval", 0),
        ("train", 4),
        ("eval", 6),
        ("train", 8),
        ("train", 12),
        ("eval", 12),
    ]
    for row in rows:
        assert row["wall_s"] == pytest.approx(row["train_s"] + row["wait_s"])
        assert row["updates"] * 8 == row["fresh"] + row["repeats"]
    for before, after in itertools.pairwise(rows):
        assert before["wall_s"] <= after["wall_s"]
        assert before["pause_s"] <= after["pause_s"]

    # Fresh batch k is used 2, 3, 2, 3, 2 times.
    uses = [2, 3, 2, 3, 2]
    repeats = np.concatenate([np.arange(n) for n in uses])
    for row in rows:
        assert row["fresh"] == 8 * (repeats[: row["updates"]] == 0).sum()
    seen = [
        {name for name in row if name.startswith("loss_repeat")}
        for row in rows
        if row["kind"] == "train"
    ]
    assert seen == [
        {f"loss_repeat_{i}" for i in repeats[first : first + 4]} for first in (0, 4, 8)
    ]
    last_train = rows[4]
    for before, after in itertools.pairwise([rows[1], rows[3], rows[4]]):
        busy_s = after["busy_s"] - before["busy_s"]
        assert 0 < busy_s <= after["wall_s"] - before["wall_s"] + 1e-6
        assert after["idle_fraction"] == pytest.approx(
            1 - busy_s / (after["wall_s"] - before["wall_s"]), abs=1e-6
        )
    # Of hidden units that dropout may drop.
    assert 0 < last_train["train_kept"] < 1
    assert last_train["examples_per_s"] == pytest.approx(
        32 / (last_train["wall_s"] - rows[3]["wall_s"])
    )

    assert summary["updates"] == 12
    assert (summary["fresh"], summary["repeats"]) == (40, 56)
    assert summary["final"] == {"loss": rows[-1]["eval_loss"]}
    assert summary["R"] == summary["t_up_s"] / summary["t_down_s"]
    assert summary["t_down_start_s"] > 0
    assert summary["idle_fraction"] == pytest.approx(
        1 - summary["busy_s"] / summary["wall_s"]
    )
    assert summary["train_final"] == {
        name.removeprefix("train_"): last_train[name] for name in ("loss", "train_kept")
    }
    assert summary["target"] is None
    assert not summary["reached"]
    assert not summary["simulated_storage"]
    assert re.fullmatch("[0-9a-f]{64}", summary["params_sha256"])


def test_a_config_is_checked_by_the_one_door_for_those_that_are_not(
    tmp_path, monkeypatch
):
    checked = []
    monkeypatch.setattr(trainer, "check_config", checked.append)
    config = tiny_config(updates=1)
    train(config, make_workload(config), tmp_path / "not")
    assert checked == [config]
    folder = run_folder(tmp_path / "checked")
    with FolderLock(folder) as lock:
        train_checked(config, make_workload(config), folder, lock)
    assert checked == [config]


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
    assert run(tmp_path, echo__factor=2.5) == whole


def test_a_run_that_has_lost_its_folder_stops_there(tmp_path):
    config = tiny_config(updates=100)

    class Lost(FolderLock):
        calls = 0

        def check(self):
            self.calls += 1
            if self.calls == 3:
                raise FolderInUseError("taken over")

    with pytest.raises(FolderInUseError, match="taken over"):
        folder = run_folder(tmp_path)
        train_checked(config, make_workload(config), folder, Lost())
    assert not (tmp_path / "summary.json").exists()
    assert not any(row["updates"] > 4 for row in rows_of(tmp_path))


def test_the_logged_loss_is_the_mean_over_the_window(tmp_path):
    run(tmp_path / "every", echo__factor=2.5, log_every=1)
    run(tmp_path / "fourth", echo__factor=2.5, log_every=4)
    every = [row["loss"] for row in rows_of(tmp_path / "every") if "loss" in row]
    fourth = [row["loss"] for row in rows_of(tmp_path / "fourth") if "loss" in row]
    np.testing.assert_allclose(
        fourth, np.reshape(every, (3, 4)).mean(axis=1), rtol=1e-5
    )


def test_training_learns_and_stops_at_the_target(tmp_path):
    options = {"updates": 400, "eval_every": 20, "log_every": 100}
    task = Regression(dropout=0.0)
    run(tmp_path / "all", task=task, **options)
    evals = [row for row in rows_of(tmp_path / "all") if row["kind"] == "eval"]
    losses = [row["eval_loss"] for row in evals]
    assert losses[-1] < losses[0] / 4
    target = losses[0] / 2
    first = next(row for row in evals if row["eval_loss"] <= target)
    assert first["updates"] < 400

    summary = run(
        tmp_path / "stop", task=task, target=target, stop_at_target=True, **options
    )
    assert summary["reached"]
    assert summary["updates"] == first["updates"]
    assert summary["updates_to_target"] == first["updates"]
    assert summary["fresh_to_target"] == first["fresh"]
    assert 0 < summary["seconds_to_target"] <= summary["wall_s"]

    # A finished run knows its rows: another target is looked up, not trained for.
    looked_up = run(tmp_path / "all", task=task, target=target, **options)
    assert looked_up["updates"] == 400
    assert looked_up["updates_to_target"] == first["updates"]


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path, updates=6)
    written = (tmp_path / "metrics.jsonl").stat().st_mtime_ns
    assert run(tmp_path, updates=6) == first
    assert (tmp_path / "metrics.jsonl").stat().st_mtime_ns == written
    assert run(tmp_path, updates=8)["updates"] == 8


def test_arms_with_an_equal_task_compile_once(tmp_path):
    with counted_compilations() as compiled:
        run(tmp_path / "a", task=Regression(width=24), updates=6)
        assert len(compiled) > 0
        compiled.clear()
        run(
            tmp_path / "b",
            task=Regression(width=24),
            updates=6,
            seed=5,
            echo__factor=2.5,
            echo__order="shuffle",
            echo__buffer=16,
            echo__after="decode",
            log_every=2,
            checkpoint_every=2,
        )
        assert compiled == []


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it(
    tmp_path, log_every
):
    # Batch placement, factor 2: fresh batch 3 is used by updates 7 and 8.
    options = {
        "echo__factor": 2.0,
        "updates": 40,
        "eval_every": 100,
        "checkpoint_every": 4,
        "log_every": log_every,
    }
    with pytest.raises(
        NonFiniteLossError,
        match=r"loss of update 7 is not finite; the "
        r"last checkpoint, of update 4,",
    ) as caught:
        run(tmp_path, nan_at_fresh=3, **options)
    assert caught.value.update == 7
    checkpoints = Checkpoints(run_folder(tmp_path / "checkpoints"), keep=2)
    assert checkpoints.latest() == 4
    checkpoints.close()
    assert all(np.isfinite(row.get("loss", 0)) for row in rows_of(tmp_path))
    assert not (tmp_path / "summary.json").exists()


class Overflows(Regression):
    """Its losses are finite, and its gradient is not."""

    def loss(self, variables, batch, key):
        losses, state, metrics = super().loss(variables, batch, key)
        bias = variables["params"]["bias"]
        # sqrt has an infinite slope at 0, where the bias starts.
        return losses + jax.numpy.sqrt(bias * bias).sum(), state, metrics


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    with pytest.raises(
        NonFiniteLossError, match=r"the state after update 1 is not finite; use another"
    ):
        run(tmp_path, task=Overflows(), updates=1)
    checkpoints = Checkpoints(run_folder(tmp_path / "checkpoints"), keep=2)
    assert checkpoints.latest() is None
    checkpoints.close()


@pytest.mark.parametrize(
    ("earlier", "renamed"),
    [
        ({"inner": {"strategy": "loop", "updates": 0}}, "inner is config.dispatch"),
        ({"data": {"parts": 0}}, "data.parts is config.data.shards"),
        ({"model": {"dtype": "float32"}}, "model.dtype is config.precision.compute"),
    ],
)
def test_a_run_of_an_earlier_version_is_refused_in_a_sentence(
    tmp_path, earlier, renamed
):
    (tmp_path / "config.json").write_text(json.dumps(earlier))
    message = f"earlier echo_jax, whose config.{renamed} now; .* another --workdir"
    with pytest.raises(ValueError, match=message):
        run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_another_config_in_the_folder_is_refused_before_anything_is_written(tmp_path):
    run(tmp_path, updates=2)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    with pytest.raises(ValueError, match=r"echo\.factor \(1\.0 -> 2\.0\)"):
        run(tmp_path, updates=2, echo__factor=2.0)
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.json*")}
    assert after == before


def test_data_that_ends_is_an_error(tmp_path):
    config = tiny_config()
    workload = make_workload(config)
    endless = workload.train_dataset
    some = grain.MapDataset.source(list(itertools.islice(endless(EchoSpec()), 40)))
    # One is made to see whether it can be, one to be measured, one to train.
    cases = [((40, 40, 7), "after 7 updates"), ((40, 7, 40), "while it was")]
    for lengths, message in cases:
        datasets = iter([some[:length].to_iter_dataset() for length in lengths])
        ending = dataclasses.replace(
            workload, train_dataset=lambda *_, made=datasets: next(made)
        )
        with pytest.raises(ValueError, match=f"'regression' ended {message}.* repeat"):
            train(config, ending, tmp_path)


def test_measuring_changes_nothing_of_the_run():
    config = tiny_config(echo__factor=2.0)
    workload = make_workload(config)
    compiled = compile_functions(config, workload)
    state = compiled.init(compiled.init_key)
    before = params_sha256(state.params)
    measure_rates(compiled, state, workload, config)
    assert params_sha256(state.params) == before
    assert int(state.update) == 0


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(
    ("seen", "corrected"),
    [((20.0, 30.0), 20.0), ((0.0, 1e-9), 1e-9), ((0.0, math.inf), None)],
)
def test_what_a_fresh_batch_takes_is_corrected_by_what_the_run_sees(
    tmp_path, where, seen, corrected
):
    """No batch of this workload takes 20 seconds, and none a nanosecond."""
    after = "decode" if where == "device" else "batch"
    config = tiny_config(echo__where=where, echo__after=after, updates=2, log_every=1)
    workload = make_workload(config)

    def watched(make):
        def make_watched(*args):
            dataset = make(*args)
            dataset.fresh_time = SimpleNamespace(bounds=lambda: seen, held_batches=0)
            return dataset

        return make_watched

    workload = dataclasses.replace(
        workload,
        train_dataset=watched(workload.train_dataset),
        fresh_dataset=watched(workload.fresh_dataset),
    )
    summary = train(config, workload, tmp_path)
    assert summary["t_up_s"] == (corrected or summary["t_up_start_s"])
    assert 1e-9 < summary["t_up_start_s"] < 20
    assert summary["R"] == summary["t_up_s"] / summary["t_down_s"]
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    assert [row["t_up_s"] for row in rows] == [summary["t_up_s"]] * 2


def test_the_loader_is_measured_without_the_echo():
    config = tiny_config(echo__factor=3.0)
    workload = make_workload(config)
    repeats = []

    def spied(spec, part):
        dataset = workload.train_dataset(spec, part)
        return dataset.map(lambda batch: (repeats.extend(batch["repeat"]), batch)[1])

    rates = calibrate(config, dataclasses.replace(workload, train_dataset=spied))
    assert repeats
    assert not any(repeats)
    assert rates.ratio == rates.t_up_s / rates.t_down_s


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_stops_after_the_update_and_saves(tmp_path, signum):
    before = signal.getsignal(signum)
    with pytest.raises(
        Interrupted, match=rf"{signum.name} after update 3, and saved; .* same command"
    ) as caught:
        run(tmp_path, echo__factor=2.0, on_batch=stop_at(3, signum))
    assert caught.value.update == 3
    assert caught.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before
    checkpoints = Checkpoints(run_folder(tmp_path / "checkpoints"), keep=2)
    assert checkpoints.latest() == 3
    checkpoints.close()


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
    checkpoints = Checkpoints(run_folder(tmp_path / "checkpoints"), keep=2)
    assert checkpoints.latest() is None
    checkpoints.close()


def shown(tmp_path, fields=None, **options):
    text = io.StringIO()
    config = tiny_config(**fields or {})
    console = Console(file=text, width=200, **options)
    train(config, make_workload(config), tmp_path, console=console)
    return text.getvalue()


def test_progress_is_plain_lines_in_a_file(tmp_path):
    *about, lines = shown(tmp_path).split("\n", 2)
    assert [line[10:] for line in about] == [
        "model: 96 parameters in 3 arrays: first 64, bias 16, second 16; see model.txt",
        "no echo: every batch is used once",
    ]
    lines = lines.splitlines()
    assert len(lines) == 6
    assert re.fullmatch(r"\d\d:\d\d:\d\d  update 0  eval_loss \S+", lines[0])
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d  update 8/12  loss \d+\.\d{4}  \d+ examples/s  idle \d+%  "
        r"kept 0\.\d+  ETA \d+:\d\d:\d\d",
        lines[3],
    )


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "1,024 examples of train; evaluated on 20 of validation"),
        (
            {"eval_split": "train", "train_examples": 1024},
            "1,024 examples of train (data.train_examples); evaluated on 20 of the "
            "same (data.eval_split), which it may know by heart",
        ),
    ],
)
def test_a_run_says_what_it_is_trained_and_evaluated_on(fields, says):
    text, config = io.StringIO(), tiny_config()
    with config.unlocked():
        config.data.update(source="data/tiny", **fields)
    workload = dataclasses.replace(
        make_workload(config), num_examples=1024, num_evaluated=20
    )
    with Progress(Console(file=text, width=200), total=1) as progress:
        progress.begins(config, workload, "small")
    assert f"  data: data/tiny, {says}\n" in text.getvalue()


def test_progress_counts_the_updates_that_are_computed(tmp_path, monkeypatch):
    """Not those that were sent to the device, of which two may be in flight."""
    shown, seen = [0], {}
    show = Progress.update
    monkeypatch.setattr(
        Progress, "update", lambda bar, done: (shown.append(done), show(bar, done))
    )

    def look(batch):
        seen[batch] = shown[-1]

    run(tmp_path, on_batch=look, echo__factor=2.0)
    # Batch 7 is made after an evaluation, which waits for all.
    assert [seen[k] for k in range(1, 13)] == [0, 0, 0, 1, 2, 3, 6, 6, 6, 7, 8, 9]
    assert shown == [*range(13)]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"local__schedule": "every"}, "config.local.schedule='every' changes nothing"),
        ({"batch__statistics": "device"}, "config.batch.statistics='device' changes"),
        ({"local__schedule": "every", "mesh__data": 2}, "2 replicas, one on each"),
    ],
)
def test_a_run_says_what_its_number_of_devices_means(tmp_path, fields, says):
    text = shown(tmp_path, fields={**fields, "updates": 2})
    assert says in text


def test_progress_is_a_bar_on_a_terminal(tmp_path):
    text = shown(tmp_path, force_terminal=True)
    assert "12/12" in text
    assert "━" in text
    assert "ETA" in text
    assert re.search(r"update 6  eval_loss", text)


@pytest.mark.parametrize("found", [{"sha256": "b"}, {"train": {"sha256": "b"}}, {}])
def test_other_data_than_the_checkpoints_are_refused(tmp_path, found):
    def workload(config, metadata):
        return dataclasses.replace(make_workload(config), metadata=metadata)

    saved = {"sha256": "a", "source": "here"}
    config = tiny_config(updates=2)
    train(config, workload(config, saved), tmp_path)
    longer = tiny_config(updates=4)
    with pytest.raises(ValueError, match="of update 2 was trained on other data than"):
        train(longer, workload(longer, found), tmp_path)
    # They may lie elsewhere.
    summary = train(longer, workload(longer, saved | {"source": "there"}), tmp_path)
    assert summary["updates"] == 4
