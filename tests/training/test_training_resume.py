"""A run that was stopped ends like one that was not, bit for bit."""

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import pytest
from tiny_workload import ADAPTIVE, rows_of, run, stop_at

from benchmarks.faults.disks import fill_at
from echo_jax.terminal import sentence
from echo_jax.training import Interrupted

BUFFERED = {"echo__factor": 4.0, "echo__stage": "decode", "echo__buffer": 20}
ECHOES = {
    "batch": {"echo__factor": 2.5, "echo__stage": "batch"},
    "consecutive": {"echo__factor": 2.5, "echo__stage": "decode"},
    "window_shuffle": {**BUFFERED, "echo__order": "window_shuffle"},
    "shuffle_buffer": {**BUFFERED, "echo__order": "shuffle_buffer"},
    "spread": {**BUFFERED, "echo__order": "spread"},
}
# Rows are logged at 4 and 8, and 6 is evaluated: one echo is stopped at every phase,
# and the others, which restore anywhere by law 4, at one, or two that differ.
STOPS = [("batch", 5), ("consecutive", 4), ("window_shuffle", 6), ("shuffle_buffer", 5)]
STOPS += [("spread", update) for update in (4, 5, 6, 7, 8)]


def exact(row):
    """A row without what depends on time."""
    timed = ("_s", "_per_s", "idle_fraction", "longest_wait_at")
    return {name: value for name, value in row.items() if not name.endswith(timed)}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    @functools.cache
    def end_of(echo):
        workdir = tmp_path_factory.mktemp(echo)
        summary = run(workdir, **ECHOES[echo])
        return summary["params_sha256"], [*map(exact, rows_of(workdir))]

    return end_of


@pytest.mark.parametrize(("echo", "update"), STOPS)
def test_stopped_at_any_phase(tmp_path, unbroken, echo, update):
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(update), **ECHOES[echo])
    summary = run(tmp_path, **ECHOES[echo])
    rows = [*map(exact, rows_of(tmp_path))]
    assert (summary["params_sha256"], rows) == unbroken(echo)


def test_stopped_again_and_again(tmp_path, unbroken):
    seconds = []
    for batches in (3, 1, 4):
        with pytest.raises(Interrupted):
            run(tmp_path, on_batch=stop_at(batches), **ECHOES["spread"])
        seconds.append(rows_of(tmp_path)[-1]["pause_s"])
    summary = run(tmp_path, **ECHOES["spread"])
    rows = [*map(exact, rows_of(tmp_path))]
    assert (summary["params_sha256"], rows) == unbroken("spread")
    # The clock goes on from sitting to sitting.
    assert seconds == sorted(seconds)
    assert summary["pause_s"] > seconds[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_soon")
def test_goes_on_with_fewer_devices(tmp_path, monkeypatch):
    """The same config on another machine, where ``data=-1`` means another number."""
    options = {**ECHOES["spread"], "mesh__data": -1, "mesh__fsdp": 2}
    all_devices = jax.devices()
    whole = run(tmp_path / "unbroken", **options)
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", on_batch=stop_at(5), **options)
    monkeypatch.setattr(jax, "devices", lambda: all_devices[:2])
    resumed = run(tmp_path / "stopped", **options)
    assert resumed["updates"] == 12
    assert resumed["final"]["loss"] == pytest.approx(whole["final"]["loss"], rel=1e-5)


KILLED_RUN = """
import sys
sys.path[:0] = {paths!r}
import conftest
from test_training_resume import LONG
from tiny_workload import run
run(sys.argv[1], updates=1_000_000, **LONG)
"""
LONG = {"log_every": 10, "eval_every": 50, "checkpoint_every": 50, **ECHOES["spread"]}


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path):
    paths = [str(Path(__file__).parents[up]) for up in range(3)]
    workdir = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED_RUN.format(paths=paths), str(workdir)]
    with subprocess.Popen(command, stdout=-3, stderr=-3) as process:
        while not (workdir / "checkpoints" / "100").is_dir():
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    assert not (workdir / "summary.json").exists()
    saved = [path.name for path in (workdir / "checkpoints").iterdir()]
    # Not a million, to be quick: this may change.
    updates = max(int(name) for name in saved if name.isdigit()) + 100
    summary = run(workdir, updates=updates, **LONG)
    whole = run(tmp_path / "unbroken", updates=updates, **LONG)
    assert summary["params_sha256"] == whole["params_sha256"]
    rows = [exact(row) for row in rows_of(workdir)]
    assert rows == [exact(row) for row in rows_of(tmp_path / "unbroken")]


FULL = os.strerror(errno.ENOSPC)
LOGGED = {"updates": 12, "checkpoint_every": 4, "log_every": 2}


@pytest.fixture(scope="module")
def not_full(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), **LOGGED)


@pytest.mark.parametrize(
    ("name", "number", "options"),
    [
        ("config.json", 1, {}),
        ("environment.json", 1, {}),
        ("metrics.jsonl", 1, {}),
        ("metrics.jsonl", 6, {}),
        ("summary.json", 1, {}),
        ("decisions.json", 2, ADAPTIVE),
    ],
)
def test_a_full_disk_names_the_file_and_the_same_command_goes_on(
    tmp_path, not_full, name, number, options
):
    folder = tmp_path / "made" / "run"
    with pytest.MonkeyPatch.context() as patch:
        fill_at(number, name, partial(patch.setattr, raising=False))
        with pytest.raises(OSError) as caught:
            run(folder, **LOGGED, **options)
    assert f"/{name}: {FULL}; free some space, and the" in sentence(caught.value)
    summary = run(folder, **LOGGED, **options)
    assert summary["updates"] == 12
    assert len(rows_of(folder)) == 6 + 3
    if options is not ADAPTIVE:
        assert summary["params_sha256"] == not_full["params_sha256"]
