"""Nothing hangs in silence: what waits for data says so, and can be ended and saved."""

import dataclasses
import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console
from slow_cases import slow_but_for
from tiny_workload import make_workload, run, tiny_config

from echo_jax.files.folders import run_folder
from echo_jax.training import DataTimeoutError, Interrupted, train
from echo_jax.training.probe import calibrate, probe_config
from echo_jax.training.processes import watchdog
from echo_jax.training.processes.watchdog import Watchdog
from echo_jax.training.saving.checkpoint import Checkpoints
from echo_jax.training.trainer import Trainer

HOST = {"echo__factor": 2.5, "echo__after": "batch"}
SPREAD = {
    "echo__factor": 4.0,
    "echo__after": "decode",
    "echo__order": "spread",
    "echo__buffer": 20,
}
ECHOES = {
    "host": HOST,
    "groups": {**HOST, "dispatch__mode": "scan", "dispatch__steps": 4},
    "shards": {**HOST, "data__shards": 2},
    "spread": SPREAD,
    "device": {**SPREAD, "echo__where": "device"},
    "device, read when asked": {
        **SPREAD,
        "echo__where": "device",
        "data__prefetch": 0,
    },
}


class Clock:
    """Stands still until the data hangs; then every look takes 1000 seconds."""

    def __init__(self):
        self.runs = False
        self._seconds = itertools.count(step=1000)

    def __call__(self):
        return next(self._seconds) if self.runs else 0


@pytest.fixture(autouse=True)
def hangups():
    """Are heard also where who runs the tests has them ignored, as ``nohup`` does."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setitem(Watchdog.__init__.__kwdefaults__, "now", clock)
    monkeypatch.setattr(watchdog, "_LOOK_EVERY_S", 0.01)
    return clock


def hanging_run(workdir, hang, clock, *, at=3, console=None, **options):
    """Trains, and calls a function when batch number ``at`` is read to train.

    Something is trained before that: what reads ahead waits for the first updates.
    """
    config = tiny_config(**options)
    workload = make_workload(config)

    def hung(make):
        def make_hung(*args):
            made = itertools.count(1)

            def pass_on(batch):
                if is_training.is_set() and next(made) == at:
                    assert is_trained.wait(timeout=60)
                    hang()
                return batch

            return make(*args).map(pass_on)

        return make_hung

    is_training, is_trained = threading.Event(), threading.Event()
    evaluated = workload.eval_batches
    dispatch = Trainer.dispatch

    def dispatch_and_say(trainer, inputs):
        dispatch(trainer, inputs)
        is_trained.set()

    def eval_batches(shard):
        is_training.set()  # A run begins with an evaluation.
        return evaluated(shard=shard)

    workload = dataclasses.replace(
        workload,
        train_dataset=hung(workload.train_dataset),
        fresh_dataset=hung(workload.fresh_dataset),
        eval_batches=eval_batches,
    )
    try:
        with mock.patch.object(Trainer, "dispatch", dispatch_and_say):
            return train(config, workload, workdir, console=console)
    finally:
        clock.runs = False


def saved_update(workdir):
    checkpoints = Checkpoints(run_folder(workdir / "checkpoints"), keep=2)
    latest = checkpoints.latest()
    checkpoints.close()
    return latest


def test_a_wait_is_said_after_30_seconds_and_at_doubling_intervals():
    seconds, notes = [0.0], []
    looked = Watchdog("of lm", note=notes.append, now=lambda: seconds[0])
    for _ in range(2):
        with looked.waiting("a batch"):
            for seconds[0] in range(1000):
                looked.look()
        seconds[0] = 0.0
    looked.look()
    said = [
        re.fullmatch(r"waits for a batch since .*, for (\d+) s .*", n) for n in notes
    ]
    assert [int(match[1]) for match in said if match] == 2 * [
        30,
        60,
        120,
        240,
        480,
        960,
    ]
    assert all(note.endswith(" s (of lm)") for note in notes)


@pytest.mark.parametrize(
    ("name", "signum"),
    slow_but_for(
        [
            ("host", signal.SIGINT),
            ("groups", signal.SIGTERM),
            ("device", signal.SIGTERM),
        ],
        [
            ("host", signal.SIGINT),
            ("host", signal.SIGHUP),
            ("host", signal.SIGUSR1),
            *((name, signal.SIGTERM) for name in ECHOES),
        ],
    ),
)
def test_a_signal_saves_a_run_whose_data_hangs(tmp_path, clock, name, signum):
    options = {**ECHOES[name], "data__timeout_s": 0.0}

    def hang():
        clock.runs = True
        os.kill(os.getpid(), signum)
        threading.Event().wait()

    with pytest.raises(Interrupted, match=f"{signum.name} .* and saved") as caught:
        # In the middle of the second group, where there are groups of four.
        at = 7 if name == "groups" else 3
        hanging_run(tmp_path / "run", hang, clock, at=at, **options)
    assert caught.value.exit_code == 128 + signum
    assert saved_update(tmp_path / "run") == caught.value.update
    resumed = run(tmp_path / "run", **options)
    unbroken = run(tmp_path / "unbroken", **options)
    for field in ("params_sha256", "updates", "fresh", "repeats"):
        assert resumed[field] == unbroken[field]


def test_data_that_does_not_come_ends_the_run_and_saves_it(tmp_path, clock):
    def hang():
        clock.runs = True
        threading.Event().wait()

    text = io.StringIO()
    console = Console(file=text, width=400)
    with pytest.raises(
        DataTimeoutError, match=r"timeout_s allows; .*, and saved"
    ) as end:
        hanging_run(tmp_path / "run", hang, clock, console=console, **HOST)
    assert end.value.exit_code == 75
    assert saved_update(tmp_path / "run") == end.value.update
    assert "waits for the input of update" in text.getvalue()
    assert "(of regression, read with data.pipeline=grain, " in text.getvalue()
    # With more patience it is the same run.
    resumed = run(tmp_path / "run", data__timeout_s=0.0, **HOST)
    unbroken = run(tmp_path / "unbroken", **HOST)
    assert resumed["params_sha256"] == unbroken["params_sha256"]


def test_data_may_come_as_late_as_is_asked_for(tmp_path, clock):
    def wait():
        clock.runs = True
        while clock() < 1e6:
            pass

    summary = hanging_run(tmp_path, wait, clock, data__timeout_s=0.0, **HOST)
    assert summary["updates"] == 12


def test_an_evaluation_whose_data_hangs_ends_the_run_and_saves_it(tmp_path, clock):
    config = tiny_config(eval_every=5)
    workload = make_workload(config)
    evaluations = itertools.count(1)

    def eval_batches(shard):
        if next(evaluations) == 2:
            clock.runs = True
            threading.Event().wait()
        yield from workload.eval_batches(shard=shard)

    hung = dataclasses.replace(workload, eval_batches=eval_batches)
    message = r"a batch of the evaluation since .* update 5, and saved"
    with pytest.raises(DataTimeoutError, match=message):
        train(config, hung, tmp_path)
    assert saved_update(tmp_path) == 5


def test_batches_for_batch_norm_that_hang_end_the_run_and_are_not_waited_for(
    tmp_path, clock
):
    config = tiny_config(eval_every=5, batch__norm="recompute")
    workload = make_workload(config)
    evaluated, closed = [], []

    class Hung:
        def __iter__(self):
            return self

        def __next__(self):
            clock.runs = True
            threading.Event().wait()

        def close(self):
            closed.append(self)

    def train_dataset(spec, *args):
        return Hung() if evaluated else workload.train_dataset(spec, *args)

    def eval_batches(shard):
        evaluated.append(shard)
        return workload.eval_batches(shard=shard)

    hung = dataclasses.replace(
        workload, train_dataset=train_dataset, eval_batches=eval_batches
    )
    with pytest.raises(DataTimeoutError, match=r"1 of 16 for batch norm since .* 5, a"):
        train(config, hung, tmp_path)
    assert saved_update(tmp_path) == 5
    assert not closed


def test_a_run_whose_data_never_comes_ends_and_is_not_saved(tmp_path, clock):
    config = tiny_config()
    workload = make_workload(config)

    def hang(batch):
        clock.runs = True
        threading.Event().wait()

    def train_dataset(*args):
        return workload.train_dataset(*args).map(hang)

    hung = dataclasses.replace(workload, train_dataset=train_dataset)
    message = r"how fast they come since .*, and not saved: nothing was trained yet$"
    with pytest.raises(DataTimeoutError, match=message):
        train(config, hung, tmp_path)
    assert saved_update(tmp_path) is None


def test_a_wait_of_another_thread_is_only_said(clock):
    clock.runs = True
    notes, is_said = [], threading.Event()

    def note(line):
        notes.append(line)
        is_said.set()

    def wait():
        with Watchdog(timeout_s=1, note=note) as looked, looked.waiting("a batch"):
            is_said.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert notes


# What no handler of a signal ends: a lock of C that its thread has already.
NATIVE = """
import ctypes, os, signal, sys, threading
def hang():
    os.kill(os.getpid(), signal.{signum})
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
TRAINS = """
sys.path[:0] = {paths!r}
import conftest
from echo_jax.terminal import ending
from echo_jax.training import Interrupted
from tiny_workload import run
def on_batch(number):
    if number == 5:
        hang()
with ending.EndsAtOnce(["echo-jax", "train"]):
    try:
        run(sys.argv[1], on_batch=on_batch, echo__factor=2.5, echo__after="batch")
    except Interrupted as error:
        ending.end(error.exit_code)
"""
# It goes on once its input is closed, after the signal.
HUNG_UP = """
def hang():
    os.read(0, 1)
"""
STARTS = """
from echo_jax import cli, runs
runs.run_train = lambda *args, **options: hang()
sys.argv[1:] = ["train", "--config", "configs/lm.py:tiny", "--workdir", sys.argv[1]]
cli.main()
"""
ROOT = Path(__file__).parents[2]
PATHS = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(ROOT)]


def ended(code, workdir, signum):
    code = (NATIVE + code).format(paths=PATHS, signum=signum.name)
    return subprocess.run(
        [sys.executable, "-c", code, str(workdir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_a_run_that_hangs_in_native_code_is_saved(tmp_path):
    done = ended(TRAINS, tmp_path / "run", signal.SIGTERM)
    assert done.returncode == 143, done.stderr
    line, _ = done.stderr.splitlines()
    assert re.search("stopped by SIGTERM after update 4, and saved", line)
    resumed = run(tmp_path / "run", **HOST)
    assert resumed["params_sha256"] == run(tmp_path / "whole", **HOST)["params_sha256"]


@pytest.mark.slow
def test_a_second_signal_ends_a_command_that_hangs_in_native_code(tmp_path):
    twice = "os.kill(os.getpid(), signal.SIGUSR1); hang()"
    code = TRAINS.replace("        hang()", f"        {twice}")
    done = ended(code, tmp_path, signal.SIGTERM)
    assert done.returncode in (143, 138), done.stderr
    line, _ = done.stderr.splitlines()
    assert "ended at once by a second signal" in line


@pytest.mark.slow
def test_a_run_whose_terminal_is_hung_up_is_saved(tmp_path):
    terminal, of_the_run = pty.openpty()
    code = (NATIVE + HUNG_UP + TRAINS).format(paths=PATHS, signum="SIGHUP")
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=of_the_run,
        stderr=of_the_run,
        cwd=ROOT,
    ) as process:
        os.close(of_the_run)
        shown = b""
        while b"eval_loss" not in shown:  # It trains.
            shown += os.read(terminal, 1000)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.stdin is not None
        process.stdin.close()
    assert process.returncode == 129
    assert saved_update(tmp_path) in range(1, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
)
def test_a_signal_at_the_start_ends_the_command_in_one_line(tmp_path, signum):
    done = ended(STARTS, tmp_path, signum)
    assert done.returncode == 128 + signum
    first, second = done.stderr.splitlines()
    assert first == (
        f"echo-jax train: interrupted by {signum.name}; run the same command to resume"
    )
    assert second.startswith("  echo-jax train --config configs/lm.py:tiny")


def hanging_measurement(hang):
    workload = make_workload(tiny_config())
    batches = itertools.count(1)

    def pass_on(batch):
        if next(batches) == 3:
            hang()
        return batch

    def train_dataset(*args):
        return workload.train_dataset(*args).map(pass_on)

    return dataclasses.replace(workload, train_dataset=train_dataset)


@pytest.mark.parametrize("how", ["calibration", "probe", "stage"])
def test_a_measurement_whose_data_hangs_says_so_and_ends(clock, how):
    def hang():
        clock.runs = True
        threading.Event().wait()

    config, said = tiny_config(), []
    workload = make_workload(config) if how == "stage" else hanging_measurement(hang)

    def measure():
        if how == "calibration":
            calibrate(config, workload, note=said.append)
        else:
            probe_config(
                config,
                workload,
                seconds=0.1,
                stages={"decode": hang} if how == "stage" else {},
                on_progress=lambda what, done: said.append(what),
            )

    message = r"^waited for .*timeout_s allows; .* not saved: there was nothing to save"
    with pytest.raises(DataTimeoutError, match=message) as caught:
        measure()
    assert caught.value.exit_code == 75
    assert any(line.startswith("waits for ") for line in said)
