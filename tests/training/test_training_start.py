"""What a run decides at its start, and runs on one held batch."""

import io
import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import rich.console
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

from echo_jax.files.folders import run_folder
from echo_jax.terminal import notes
from echo_jax.training import Interrupted, decide, train
from echo_jax.training.feeds.feed import HeldFeed, HostFeed, JoinedBatches
from echo_jax.training.feeds.of_config import make_echo_spec
from echo_jax.training.records import progress as progress_module
from echo_jax.training.records.progress import Progress
from echo_jax.training.saving.checkpoint import Checkpoints
from echo_jax.training.trainer import Trainer, compile_functions

DEVICE = {"echo__where": "device", "echo__after": "decode"}


@pytest.fixture
def ratio(monkeypatch):
    """Sets what the next runs measure as R."""

    def measures(value):
        original = decide.measure_loader
        monkeypatch.setattr(
            decide,
            "measure_loader",
            lambda *a, **kw: replace(original(*a, **kw), t_up_s=value),
        )
        monkeypatch.setattr(decide, "measure_step", lambda *args, **options: 1.0)

    return measures


@pytest.mark.parametrize(
    ("measured", "cap", "factor"), [(2.5049, 4, 2.5), (9.0, 3, 3.0), (0.4, 4, 1.0)]
)
def test_an_automatic_factor_is_the_ratio_up_to_the_cap(
    tmp_path, ratio, measured, cap, factor
):
    ratio(measured)
    automatic = run(tmp_path / "auto", echo__factor="auto", echo__cap=cap)
    assert automatic["echo"]["factor"] == factor
    assert automatic["echo"]["factor_asked"] == "auto"
    environment = json.loads((tmp_path / "auto" / "environment.json").read_text())
    assert environment["chosen"]["echo_factor"] == factor
    config = json.loads((tmp_path / "auto" / "config.json").read_text())
    assert config["echo"]["factor"] == "auto"
    given = run(tmp_path / "given", echo__factor=factor, echo__cap=cap)
    assert automatic["params_sha256"] == given["params_sha256"]
    assert automatic["fresh"] == given["fresh"]


@pytest.mark.parametrize("where", [{}, DEVICE])
def test_an_automatic_factor_is_measured_once(tmp_path, ratio, monkeypatch, where):
    ratio(2.5)
    options = {"echo__factor": "auto", **where}
    whole = run(tmp_path / "whole", **options)
    take = Trainer.take

    def take_until_5(trainer):
        if trainer.totals.updates == 5:
            signal.raise_signal(signal.SIGTERM)
        return take(trainer)

    with monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(Trainer, "take", take_until_5)
        run(tmp_path / "stopped", **options)
    ratio(7.0)
    resumed = run(tmp_path / "stopped", **options)
    assert resumed["echo"]["factor"] == 2.5
    assert resumed["params_sha256"] == whole["params_sha256"]


def test_an_impossible_automatic_factor_is_refused_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"buffer=8 is too small for order='spread'"):
        run(tmp_path / "run", echo__factor="auto", echo__after="decode",
            echo__order="spread", echo__buffer=8)  # fmt: skip
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "where", [{}, DEVICE, {"dispatch__mode": "scan", "dispatch__steps": 2}]
)
def test_a_held_batch_is_marked_everywhere_and_saved_nowhere(tmp_path, where):
    text = io.StringIO()
    config = tiny_config(data__hold_batch=True, checkpoint_every=4, **where)
    summary = train(
        config, make_workload(config), tmp_path, console=Console(file=text, width=200)
    )
    assert all("  [one batch held]  " in line for line in text.getvalue().splitlines())
    assert text.getvalue().count("writes no checkpoint") == 1
    rows = rows_of(tmp_path)
    assert all(row["hold_batch"] is True for row in rows)
    assert summary["hold_batch"] is True
    assert (summary["fresh"], summary["repeats"]) == (8, 88)
    last = [row for row in rows if row["kind"] == "train"][-1]
    # Updates 9 to 12, which are repeats 8 to 11.
    assert [name for name in last if name.startswith("loss_")] == [
        "loss_repeat_7_and_later"
    ]
    checkpoints = Checkpoints(run_folder(tmp_path / "checkpoints"), keep=2)
    assert checkpoints.latest() is None
    checkpoints.close()


def test_a_run_on_data_has_no_mark(tmp_path):
    summary = run(tmp_path)
    assert summary["hold_batch"] is False
    assert not any("hold_batch" in row for row in rows_of(tmp_path))


def test_a_stopped_run_on_a_held_batch_says_that_it_is_not_saved(tmp_path, monkeypatch):
    take = HeldFeed.take

    def stopping(feed, num_updates):
        signal.raise_signal(signal.SIGTERM)
        return take(feed, num_updates)

    monkeypatch.setattr(HeldFeed, "take", stopping)
    with pytest.raises(Interrupted, match="after update 1, and not saved: a run with"):
        run(tmp_path, data__hold_batch=True)


def test_a_held_batch_is_one_batch_and_has_no_state():
    config = tiny_config()
    workload = make_workload(config)
    compiled = compile_functions(config, workload)
    dataset = workload.train_dataset(make_echo_spec(config))
    sample = next(iter(dataset))
    feed = HeldFeed(HostFeed(JoinedBatches([dataset]), compiled.mesh, sample=sample))
    for number in range(3):
        inputs = feed.take(1)
        np.testing.assert_array_equal(inputs.batches["x"][0], sample["x"])
        np.testing.assert_array_equal(inputs.repeat, np.full((1, 8), number))
    for refused in (feed.get_state, lambda: feed.set_state({})):
        with pytest.raises(TypeError, match="holds one batch has no state"):
            refused()
    feed.close()


def test_the_counts_are_those_of_the_feed(tmp_path):
    """At factor 2.5 with groups of 3: fresh batches 0, 2, 5, 7, 10 are first uses."""
    summary = run(
        tmp_path,
        echo__factor=2.5,
        dispatch__mode="scan",
        dispatch__steps=3,
        log_every=3,
    )
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    assert [row["fresh"] // 8 for row in rows] == [2, 3, 4, 5]
    assert (summary["fresh"], summary["repeats"]) == (40, 56)


def test_a_stop_at_the_start_is_no_checkpoint_of_a_group(tmp_path):
    with pytest.raises(Interrupted) as caught:
        run(tmp_path, on_batch=stop_at(1), echo__factor=2.0,
            dispatch__mode="scan", dispatch__steps=4)  # fmt: skip
    assert caught.value.update == 4


LOADS_FALL = {
    "echo__mode": "stochastic",
    "echo__load__schedule": "linear",
    "echo__load__updates": 10,
}


@pytest.mark.parametrize(
    ("overrides", "most"),
    [
        ({"echo__factor": 2.5}, 2.5),
        ({"echo__factor": "auto"}, 3.0),
        ({"echo__factor": "auto", "echo__cap": 2}, 2.0),
        ({"echo__mode": "adaptive", "echo__cap": 5}, 5),
        (LOADS_FALL | {"echo__load__end": 0.25}, 4.0),
        (LOADS_FALL | {"echo__load__quantity": "e", "echo__load__end": 6.0}, 6.0),
        ({"data__hold_batch": True}, float("inf")),
    ],
)
def test_how_many_updates_a_fresh_batch_serves(overrides, most):
    assert decide._most_updates(tiny_config(**overrides), 3.0) == most


def test_what_is_shown_of_a_run_is_no_markup():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200)
    with Progress(console, total=4, mark="[one batch held]") as progress:
        progress.note("reads [/] and \x1b]0;title\x07")
    assert "[one batch held]  update" in text.getvalue()
    assert r"reads [/] and \x1b]0;title\x07" in text.getvalue()


def test_a_notebook_is_shown_lines_of_text(monkeypatch, capsys):
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    # As Jupyter does.
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress(None, total=4) as progress:
        progress.note("a step takes 2 ms")
        progress.update(1)
    shown = capsys.readouterr().out
    assert shown[8:] == "  a step takes 2 ms\n"


def test_a_bar_says_what_takes_long_beside_it():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=200)
    with Progress(console, total=4) as shown:
        with shown.slow("compiling the update"):
            shown._bar.refresh()
        during = len(text.getvalue())
        shown._bar.refresh()
    assert "compiling the update ..." in text.getvalue()[:during]
    assert "compiling" not in text.getvalue()[during:]


def test_updates_without_a_row_are_said_now_and_then(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(notes.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(notes.time, "perf_counter", lambda: now[0])
    text = io.StringIO()
    shown = Progress(Console(file=text, width=200), total=10_100)

    def said_by(updates, update_s):
        before = len(text.getvalue())
        for _ in range(updates):
            now[0] += update_s
            shown.update(shown._done + 1)
        return [line[10:] for line in text.getvalue()[before:].splitlines()]

    shown.note("begins")
    assert said_by(1, 60.0) == []  # How fast it is nobody knows yet.
    shown.note("update 1 is evaluated")
    wanted = ["update 11/10100  ETA 2:48:09", "update 21/10100  ETA 2:47:59"]
    assert said_by(25, 1.0) == wanted
    shown.note("a row")
    assert said_by(9, 1.0) == []
    assert len(said_by(10_000, 0.002)) == 2


def test_what_is_trained_is_said_before_anything_is_compiled(tmp_path, monkeypatch):
    text = io.StringIO()

    def refuse(trainer):
        raise ValueError("compiles")

    monkeypatch.setattr(Trainer, "_first_state", refuse)
    config = tiny_config()
    # Compiled by no other test.
    workload = make_workload(config, task=Regression(width=15))
    with counted_compilations() as compiled, pytest.raises(ValueError, match="compile"):
        train(config, workload, tmp_path, console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["model:", "no"]
    assert not compiled


def test_the_time_left_does_not_count_what_was_compiled(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "perf_counter", lambda: now[0])
    text = io.StringIO()
    shown = Progress(Console(file=text, width=200), total=101)
    now[0] += 600  # of compiling
    row = {"kind": "train", "updates": 1, "loss": 1.0, "idle_fraction": 0.0}
    for update in (1, 2, 3):
        shown.update(update)
        now[0] += 2
    shown.row({**row, "examples_per_s": 4.0})
    # Two updates since the first took 6 s; 98 are left.
    assert "ETA 0:04:54" in text.getvalue()


def test_a_run_says_its_size_and_its_echo_once(tmp_path):
    for updates in (2, 4):
        if updates == 4:
            # What another version of Flax would write of a run that goes on.
            (tmp_path / "model.txt").write_text("of the first start")
        config = tiny_config(updates=updates)
        text = io.StringIO()
        console = Console(file=text, width=200)
        train(config, make_workload(config), tmp_path, console=console)
        said = [words in text.getvalue() for words in ("; see model.txt", "no echo: ")]
        assert said == [updates == 2] * 2
        table = (tmp_path / "model.txt").read_text()
        assert table == (
            "batch_stats/mean  float32[4]\nparams/bias  float32[16]\n"
            "params/first  float32[4,16]\nparams/second  float32[16,1]\n"
            if updates == 2
            else "of the first start"
        )
