"""Nothing hangs in silence: what waits for data says so, and can be ended."""

import dataclasses
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from rich.console import Console
from tiny_workload import ON_DEVICE, make_workload, run, saved_update, tiny_config

from echo_jax.config import RunSpec
from echo_jax.training import DataTimeoutError, Interrupted, calibrate, probe_config
from echo_jax.training.processes import Watchdog

HOST = {"echo__factor": 2.5, "echo__stage": "batch"}
DEVICE = {
    **ON_DEVICE,
    "echo__factor": 4.0,
    "echo__order": "spread",
    "echo__buffer": 20,
    "updates": 48,
}


class Clock:
    """Stands still until the data hangs; then every look takes 1000 seconds."""

    def __init__(self):
        self.runs = False
        self._seconds = itertools.count(step=1000)

    def __call__(self):
        return next(self._seconds) if self.runs else 0

    def hang(self, signum=None):
        self.runs = True
        if signum:
            os.kill(os.getpid(), signum)
        threading.Event().wait()


@pytest.fixture(autouse=True)
def hangups():
    """Are heard also where who runs the tests has them ignored, as ``nohup`` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(Watchdog, "now", clock)
    monkeypatch.setattr(Watchdog, "look_every_s", 0.01)
    yield clock
    clock.runs = False


def hanging_run(workdir, clock, hang, *, console=None, **options):
    """Trains, and calls a function when batch number 7 is read to train.

    What reads ahead reads less, so that something has been trained then.
    """
    workload = make_workload(tiny_config(**options))
    is_training = threading.Event()

    def hung(make):
        def make_hung(*args):
            made = itertools.count(1)

            def pass_on(batch):
                if is_training.is_set() and next(made) == 7:
                    hang()
                return batch

            return make(*args).map(pass_on)

        return make_hung

    def eval_batches(shard):
        is_training.set()  # A run begins with an evaluation.
        return workload.eval_batches(shard=shard)

    replaced = {
        "train_dataset": hung(workload.train_dataset),
        "fresh_dataset": hung(workload.fresh_dataset),
        "eval_batches": eval_batches,
    }
    try:
        return run(workdir, replaced=replaced, console=console, **options)
    finally:
        clock.runs = False


def test_a_wait_is_said_after_30_seconds_and_at_doubling_intervals(monkeypatch):
    seconds, notes = [0.0], []
    monkeypatch.setattr(Watchdog, "now", lambda *_: seconds[0])
    looked = Watchdog(RunSpec.of(tiny_config(data__timeout_s=0.0)), notes.append)
    for _ in range(2):
        with looked.waiting("a batch"):
            for seconds[0] in range(1000):
                looked.look()
        seconds[0] = 0.0
    looked.look()
    form = r"waits for a batch since .*, for (\d+) s \(of regression, data.*\)"
    said = [match[1] for note in notes if (match := re.fullmatch(form, note))]
    assert said == 2 * ["30", "60", "120", "240", "480", "960"]
    assert len(notes) == len(said)


def test_after_a_signal_only_a_wait_that_lasts_is_ended(monkeypatch):
    """An evaluation of a minute waits for each of its batches, and is not ended."""
    seconds, ends = [0.0], []
    monkeypatch.setattr(Watchdog, "now", lambda *_: seconds[0])
    monkeypatch.setattr("echo_jax.terminal.ending.owns_process", lambda: True)
    monkeypatch.setattr(
        "echo_jax.terminal.ending.end", lambda status, *_, **__: ends.append(status)
    )
    looked = Watchdog(RunSpec.of(tiny_config(data__timeout_s=0.0)), print)
    looked.stop(signal.SIGTERM)
    for seconds[0] in range(60):
        with looked.waiting("a batch"):
            seconds[0] += 1
            looked.look()
    assert not ends
    with looked.waiting("a batch"):
        seconds[0] += 8
        looked.look()
    assert ends == [143]


@pytest.mark.parametrize(
    ("options", "signum"),
    [
        ({**HOST, "data__shards": 2}, signal.SIGINT),
        ({**HOST, "dispatch__steps": 4}, signal.SIGHUP),
        (DEVICE, signal.SIGTERM),
    ],
    ids=["shards", "groups", "device"],
)
def test_a_signal_ends_a_run_whose_data_hangs(tmp_path, clock, options, signum):
    options = {**options, "data__timeout_s": 0.0, "checkpoint_every": 4}
    # It is saved where the signal comes between two waits.
    message = f"{signum.name} (while it waited for the input .* not saved|after update)"
    with pytest.raises(Interrupted, match=message) as caught:
        hanging_run(tmp_path / "run", clock, lambda: clock.hang(signum), **options)
    assert caught.value.exit_code == 128 + signum
    resumed = run(tmp_path / "run", **options)
    unbroken = run(tmp_path / "unbroken", **options)
    for field in ("params_sha256", "updates", "fresh", "repeats"):
        assert resumed[field] == unbroken[field]


def test_data_that_does_not_come_ends_the_run(tmp_path, clock):
    text, options = io.StringIO(), {**HOST, "checkpoint_every": 4}
    console = Console(file=text, width=400)
    message = r"timeout_s allows; not saved: run the same command again to go on from"
    with pytest.raises(DataTimeoutError, match=message) as end:
        hanging_run(tmp_path / "run", clock, clock.hang, console=console, **options)
    assert end.value.exit_code == 75
    assert saved_update(tmp_path / "run") >= 4
    assert "waits for the input of update" in text.getvalue()
    assert "(of regression, data.pipeline=grain, data.workers=0, " in text.getvalue()
    # With more patience it is the same run, and data may come late.

    def wait():
        clock.runs = True
        while clock() < 1e6:
            pass

    patient = {**options, "data__timeout_s": 0.0}
    resumed = run(tmp_path / "run", **patient)
    late = hanging_run(tmp_path / "late", clock, wait, **patient)
    assert resumed["params_sha256"] == late["params_sha256"]
    assert late["updates"] == 12


def test_an_evaluation_whose_data_hangs_ends_the_run(tmp_path, clock):
    workload = make_workload(tiny_config())
    evaluations = itertools.count(1)

    def eval_batches(shard):
        if next(evaluations) == 2:
            clock.hang()
        yield from workload.eval_batches(shard=shard)

    message = r"waited for a batch of the evaluation since .*, for \d+ s"
    with pytest.raises(DataTimeoutError, match=message):
        run(tmp_path, replaced={"eval_batches": eval_batches}, eval_every=5)
    assert not (tmp_path / "summary.json").exists()


def mapped(workload, function):
    """A training dataset whose batches are mapped, as a field of the workload."""
    made = workload.train_dataset
    return {"train_dataset": lambda *args: made(*args).map(function)}


def test_a_run_whose_data_never_comes_ends(tmp_path, clock):
    hung = mapped(make_workload(tiny_config()), lambda batch: clock.hang())
    with pytest.raises(DataTimeoutError, match=r"how fast they come since .*not saved"):
        run(tmp_path, replaced=hung)
    assert saved_update(tmp_path) is None


@pytest.mark.parametrize("how", ["calibration", "stage"])
def test_a_measurement_whose_data_hangs_says_so_and_ends(clock, how):
    config, said, batches = tiny_config(), [], itertools.count(1)
    workload = make_workload(config)
    message = r"^waited for .*, which is longer than --config.data.timeout_s allows; "
    with pytest.raises(DataTimeoutError, match=message) as caught:
        if how == "calibration":
            hung = mapped(workload, lambda x: clock.hang() if next(batches) == 3 else x)
            workload = dataclasses.replace(workload, **hung)
            calibrate(config, workload, note=said.append)
        else:
            probe_config(
                config,
                workload,
                seconds=0.1,
                stages={"decode": clock.hang},
                on_progress=lambda what, done: said.append(what),
            )
    assert caught.value.exit_code == 75
    assert any(line.startswith("waits for ") for line in said)


# What no handler of a signal ends: a lock of C that its thread has already.
HANGS_IN_C = """
import ctypes, json, os, signal, sys
sys.path[:0] = {paths!r}
import conftest
from echo_jax.terminal import ending
from tiny_workload import run
def on_batch(number):
    if number == 5:
        os.kill(os.getpid(), signal.SIGTERM)
        mutex = ctypes.create_string_buffer(256)
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
with ending.owning_process(["echo-jax", "train"]):
    run(sys.argv[1], on_batch=on_batch, checkpoint_every=2, **json.loads(sys.argv[2]))
"""


@pytest.mark.slow
def test_a_command_that_hangs_in_native_code_is_ended(tmp_path):
    paths = [str(Path(__file__).parents[up]) for up in range(3)]
    code, workdir = HANGS_IN_C.format(paths=paths), tmp_path / "run"
    command = [sys.executable, "-c", code, workdir, json.dumps(HOST)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 143, done.stderr
    line, again = done.stderr.splitlines()
    assert re.search("stopped by SIGTERM while it waited for the input of", line)
    assert again == "  echo-jax train"
    resumed = run(workdir, **HOST, checkpoint_every=2)
    assert resumed["params_sha256"] == run(tmp_path / "whole", **HOST)["params_sha256"]
