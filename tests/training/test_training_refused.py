"""A start that is refused leaves nothing behind; config.json is that of the run."""

import dataclasses
import io
import json
import signal

import pytest
from ml_collections import ConfigDict
from rich.console import Console
from tiny_workload import make_workload, run, stop_at, tiny_config

from echo_jax import refusals, runs
from echo_jax.files.lock import LOCK_NAME
from echo_jax.training import Interrupted, train
from echo_jax.training.records import environment
from echo_jax.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("compiled_soon")


def bad_evaluation(shard):
    raise ValueError("image 'a': it has 40x40 pixels")


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.glob("*.json*")}


def start(workdir, **overrides):
    """A start that the data of the first evaluation refuses."""
    config = tiny_config(**overrides)
    workload = dataclasses.replace(make_workload(config), eval_batches=bad_evaluation)
    with pytest.raises(ValueError, match="40x40"):
        train(config, workload, workdir)


def train_two_arms(config, workdir):
    arms = {"a": {}, "b": {}}
    base = config.to_dict()
    study = {"name": "two", "base": base, "arms": arms, "storage_ratio": 0.0}
    runs.run_study(ConfigDict(study), workdir)


@pytest.mark.parametrize(
    ("begin", "num_runs"),
    [
        (lambda config, workdir: train(config, make_workload(config), workdir), 1),
        (runs.run_train, 1),
        (train_two_arms, 2),
    ],
)
def test_a_start_judges_a_folder_once_and_behind_its_lock(
    tmp_path, monkeypatch, begin, num_runs
):
    monkeypatch.setattr(refusals, "build", make_workload)
    begin(tiny_config(updates=2), tmp_path)
    judged, differing = [], environment._differing

    def look(old, new):
        assert (tmp_path / LOCK_NAME).exists()
        judged.append(old["updates"])
        return differing(old, new)

    monkeypatch.setattr(environment, "_differing", look)
    begin(tiny_config(updates=4), tmp_path)
    assert judged == [2] * num_runs


def test_a_refused_start_is_in_nobodys_way(tmp_path):
    start(tmp_path / "made" / "run")
    assert not (tmp_path / "made").exists()
    run(tmp_path / "made" / "run", optim__lr=0.5)


def test_a_refused_start_takes_nothing_that_was_there(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "metrics.jsonl").write_text("")
    start(tmp_path, log__to=("tensorboard",))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "metrics.jsonl"}


def test_a_refused_extension_leaves_the_run_as_it_was(tmp_path, monkeypatch):
    run(tmp_path, updates=6, checkpoint_every=3)
    before = contents(tmp_path)

    def refuse(trainer):
        raise ValueError("image 'a': it has 40x40 pixels")

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take", refuse)
        start(tmp_path, updates=12, checkpoint_every=3)
    assert contents(tmp_path) == before
    assert run(tmp_path, updates=12, checkpoint_every=3)["updates"] == 12


def test_what_fails_after_an_update_is_a_run(tmp_path):
    with pytest.raises(FloatingPointError):
        run(tmp_path, nan_at_fresh=3, log_every=1)
    assert (tmp_path / "config.json").exists()
    with pytest.raises(ValueError, match="a run of another config"):
        run(tmp_path, optim__lr=0.5)


def test_a_signal_before_the_first_update_keeps_what_was_saved(tmp_path, monkeypatch):
    evaluate = Trainer.evaluate

    def stopping(trainer):
        signal.raise_signal(signal.SIGTERM)
        evaluate(trainer)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Trainer, "evaluate", stopping)
        run(tmp_path)
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
    done = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    before = contents(tmp_path)["config.json"]
    with pytest.raises(ValueError, match=r"updates, more than config\.updates=1; set"):
        run(tmp_path, updates=1, echo__factor=2.0)
    assert contents(tmp_path)["config.json"] == before
    assert done["updates"] > 1


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ({"local__schedule": "every", "local__every": 3}, "after update 2; one that"),
        (
            {"local__schedule": "linear", "local__p_end": 0.5},
            "ends with the run, so from here on as often",
        ),
    ],
)
def test_an_extension_says_that_it_moves_meetings(tmp_path, local, said):
    text = io.StringIO()
    for updates in (2, 4):
        config = tiny_config(updates=updates, **local)
        console = Console(file=text, width=400)
        train(config, make_workload(config), tmp_path, console=console)
    assert "config.updates was 2 and is 4: replicas me" in text.getvalue()
    assert said in text.getvalue()


@pytest.mark.parametrize(
    ("optim", "is_bent"),
    [
        ({"optim__schedule": "cosine"}, True),
        ({"optim__schedule": "linear"}, True),
        ({"optim__schedule": "cosine", "optim__decay_updates": 9}, False),
        ({"optim__schedule": "constant"}, False),
    ],
)
def test_an_extension_says_that_it_bends_the_schedule(tmp_path, optim, is_bent):
    def said(updates):
        text = io.StringIO()
        config = tiny_config(updates=updates, **optim)
        console = Console(file=text, width=400)
        train(config, make_workload(config), tmp_path, console=console)
        return text.getvalue()

    assert "schedule" not in said(2)
    longer = said(4)
    kind = optim["optim__schedule"]
    words = f"config.updates was 2 and is 4: the {kind} schedule decays to the end of"
    assert (words in longer) == is_bent
    assert "replicas" not in longer
    assert "resumes after update 2" in longer
