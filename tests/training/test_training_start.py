"""The start of a run, refused or not, what it says, and runs on one held batch."""

import dataclasses
import io
import json
import re
import signal
import time

import pytest
from compilations import counted_compilations
from rich.console import Console
from tiny_workload import Regression, make_workload, rows_of, run, stop_at, tiny_config

from echo_jax.training import Interrupted, train
from echo_jax.training.records import Progress

pytestmark = pytest.mark.usefixtures("compiled_soon")
DEVICE = {"echo__where": "device", "echo__after": "decode"}


def said_by(workdir, replaced=None, **overrides):
    """Trains; returns the summary, and what is printed."""
    config, text = tiny_config(**overrides), io.StringIO()
    workload = dataclasses.replace(make_workload(config), **replaced or {})
    console = Console(file=text, width=400)
    return train(config, workload, workdir, console=console), text.getvalue()


def refuse(*args, **options):
    raise ValueError("image 'a': it has 40x40 pixels")


def start(workdir, replaced="eval_batches", **overrides):
    """A start that the data refuses, by default that of the first evaluation."""
    with pytest.raises(ValueError, match="40x40"):
        said_by(workdir, {replaced: refuse}, **overrides)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.json*")}


def test_a_refused_start_is_in_nobodys_way(tmp_path):
    start(tmp_path / "made" / "run")
    assert not (tmp_path / "made").exists()
    run(tmp_path / "made" / "run", optim__lr=0.5)


def test_a_refused_extension_leaves_the_run_as_it_was(tmp_path):
    run(tmp_path, updates=6, checkpoint_every=3)
    before = contents(tmp_path)
    start(tmp_path, "train_dataset", updates=12, checkpoint_every=3)
    assert contents(tmp_path) == before
    assert run(tmp_path, updates=12, checkpoint_every=3)["updates"] == 12


def test_what_fails_after_an_update_is_a_run(tmp_path):
    with pytest.raises(FloatingPointError):
        run(tmp_path, nan_at_fresh=3, log_every=1)
    assert (tmp_path / "config.json").exists()
    with pytest.raises(ValueError, match=r"a run of another config.*optim\.lr \(0\.01"):
        run(tmp_path, optim__lr=0.5)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is damaged: .*another"):
        run(tmp_path)


def stopping_evaluation(shard):
    signal.raise_signal(signal.SIGTERM)
    return make_workload(tiny_config()).eval_batches(shard)


def test_a_signal_before_the_first_update_keeps_what_was_saved(tmp_path):
    with pytest.raises(Interrupted):
        said_by(tmp_path, {"eval_batches": stopping_evaluation})
    assert (tmp_path / "config.json").exists()
    assert run(tmp_path)["updates"] == 12


def test_a_shorter_command_leaves_the_config_of_the_longer_run(tmp_path):
    run(tmp_path, updates=4)
    longer = run(tmp_path, updates=8)
    before = contents(tmp_path)
    assert json.loads(before["config.json"])["updates"] == 8
    assert run(tmp_path, updates=4) == longer
    assert contents(tmp_path) == before


def test_a_run_that_is_ahead_of_its_command_is_refused(tmp_path):
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(8), echo__factor=2.0)
    before = contents(tmp_path)["config.json"]
    with pytest.raises(ValueError, match=r"updates, more than config\.updates=1; set"):
        run(tmp_path, updates=1, echo__factor=2.0)
    assert contents(tmp_path)["config.json"] == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"local__schedule": "every", "local__every": 3}, "met .* after update 2; one"),
        ({"optim__schedule": "cosine"}, "the cosine schedule decays to the end of"),
        ({"optim__schedule": "cosine", "optim__decay_updates": 9}, ""),
    ],
)
def test_an_extension_says_what_it_moves(tmp_path, options, said):
    assert "config.updates was" not in said_by(tmp_path, updates=2, **options)[1]
    longer = said_by(tmp_path, updates=4, **options)[1]
    assert "resumes after update 2" in longer
    assert ("config.updates was 2 and is 4: " in longer) == bool(said)
    assert re.search(said, longer)


@pytest.mark.parametrize("where", [{"dispatch__steps": 3}, DEVICE])
def test_a_held_batch_is_marked_everywhere_and_saved_nowhere(tmp_path, where):
    given = {"data__hold_batch": True, "checkpoint_every": 4, **where}
    summary, said = said_by(tmp_path, **given)
    assert all("  [one batch held]  " in line for line in said.splitlines())
    assert said.count("writes no checkpoint") == 1
    rows = rows_of(tmp_path)
    assert all(row["hold_batch"] is True for row in [*rows, summary])
    assert (summary["fresh"], summary["repeats"]) == (8, 88)
    last = [row for row in rows if row["kind"] == "train"][-1]
    # Updates 9 to 12, which are repeats 8 to 11.
    losses = [name for name in last if name.startswith("loss_")]
    assert losses == ["loss_repeat_7_and_later"]
    assert not [*(tmp_path / "checkpoints").iterdir()]


def test_a_stopped_run_on_a_held_batch_says_that_it_is_not_saved(tmp_path):
    with pytest.raises(Interrupted, match="after update 1, and not saved: a run with"):
        said_by(tmp_path, {"eval_batches": stopping_evaluation}, data__hold_batch=True)


def test_updates_without_a_row_are_said_now_and_then(monkeypatch):
    now, done, text = [100.0], 0, io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shown = Progress(Console(file=text, width=200), total=10_100)

    def said_by(updates, update_s):
        nonlocal done
        before = len(text.getvalue())
        for _ in range(updates):
            now[0] += update_s
            done += 1
            shown.update(done)
        return [line[10:] for line in text.getvalue()[before:].splitlines()]

    shown.note("begins")
    assert said_by(1, 60.0) == []  # How fast it is nobody knows yet.
    shown.note("update 1 is evaluated")
    # The time left does not count the minute of compiling.
    wanted = ["update 11/10100  ETA 2:48:09", "update 21/10100  ETA 2:47:59"]
    assert said_by(25, 1.0) == wanted
    shown.note("a row")
    assert said_by(9, 1.0) == []
    assert len(said_by(10_000, 0.002)) == 2


class Full(io.StringIO):
    def write(self, text):
        super().write(text)
        if "no echo" in text:
            raise OSError("the disk is full")


def test_what_is_trained_is_said_before_anything_is_compiled(tmp_path):
    text, config = Full(), tiny_config()
    # Compiled by no other test.
    workload = make_workload(config, task=Regression(width=15))
    with counted_compilations() as compiled, pytest.raises(OSError, match="is full"):
        train(config, workload, tmp_path, console=Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["model:", "no"]
    assert not compiled


def test_a_run_says_its_size_and_its_echo_once(tmp_path):
    first = said_by(tmp_path, updates=2)[1]
    assert (tmp_path / "model.txt").read_text() == (
        "batch_stats/mean  float32[4]\nparams/bias  float32[16]\n"
        "params/first  float32[4,16]\nparams/second  float32[16,1]\n"
    )
    # What another version of Flax would write of a run that goes on.
    (tmp_path / "model.txt").write_text("of the first start")
    second = said_by(tmp_path, updates=4)[1]
    for words in ("; see model.txt", "no echo: "):
        assert words in first and words not in second
    assert (tmp_path / "model.txt").read_text() == "of the first start"
