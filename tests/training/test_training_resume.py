"""A run that was stopped ends like one that was not, bit for bit."""

import functools

import jax
import pytest
from tiny_workload import rows_of, run, stop_at

from echo_jax.training import Interrupted

BUFFERED = {"echo__factor": 4.0, "echo__after": "decode", "echo__buffer": 20}
ECHOES = {
    "batch": {"echo__factor": 2.5, "echo__after": "batch"},
    "consecutive": {"echo__factor": 2.5, "echo__after": "decode"},
    "shuffle": {**BUFFERED, "echo__order": "shuffle"},
    "shuffle_buffer": {**BUFFERED, "echo__order": "shuffle_buffer"},
    "spread": {**BUFFERED, "echo__order": "spread"},
}
# Rows are logged at 4 and 8, and 6 is evaluated: one echo is stopped at every phase,
# and the others, which restore anywhere by law 4, at one, or two that differ.
STOPS = [("batch", 5), ("consecutive", 4), ("shuffle", 6), ("shuffle_buffer", 5)]
STOPS += [("spread", update) for update in (4, 5, 6, 7, 8)]


def exact(row):
    """A row without what depends on time."""
    timed = ("_s", "_per_s", "idle_fraction")
    return {name: value for name, value in row.items() if not name.endswith(timed)}


@functools.cache
def unbroken(echo, root):
    workdir = root / f"unbroken_{echo}"
    summary = run(workdir, **ECHOES[echo])
    return summary["params_sha256"], [exact(row) for row in rows_of(workdir)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("unbroken")


@pytest.mark.parametrize(("echo", "update"), STOPS)
def test_stopped_at_any_phase(tmp_path, root, echo, update):
    with pytest.raises(Interrupted):
        run(tmp_path, on_batch=stop_at(update), **ECHOES[echo])
    summary = run(tmp_path, **ECHOES[echo])
    sha256, rows = unbroken(echo, root)
    assert summary["params_sha256"] == sha256
    assert [exact(row) for row in rows_of(tmp_path)] == rows


def test_stopped_again_and_again(tmp_path, root):
    seconds = []
    for batches in (3, 1, 4):
        with pytest.raises(Interrupted):
            run(tmp_path, on_batch=stop_at(batches), **ECHOES["spread"])
        seconds.append(rows_of(tmp_path)[-1]["pause_s"])
    summary = run(tmp_path, **ECHOES["spread"])
    assert summary["params_sha256"] == unbroken("spread", root)[0]
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
