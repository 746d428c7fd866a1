"""A full disk, at every kind of file: one sentence, and a resume that ends alike.

What Orbax runs into is real: a limit to the size of files stands in for the disk.
"""

import errno
import os
import resource
import time

import pytest
from tiny_workload import Regression, rows_of, run

from benchmarks.faults.disks import fill_at
from echo_jax.terminal import forget, quiet_libraries, sentence

FULL = os.strerror(errno.ENOSPC)
OPTIONS = {"updates": 12, "checkpoint_every": 4, "log_every": 2}
ADAPTIVE = {
    "echo__mode": "adaptive",
    "echo__where": "device",
    "echo__after": "decode",
    "echo__buffer": 32,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "number", "options"),
    [
        ("config.json", 1, {}),
        ("environment.json", 1, {}),
        ("environment.json", 2, {}),
        ("metrics.jsonl", 1, {}),
        ("metrics.jsonl", 6, {}),
        ("summary.json", 1, {}),
        ("tape.json", 2, ADAPTIVE),
    ],
)
def test_the_file_is_named_and_the_same_command_goes_on(
    tmp_path, whole, name, number, options
):
    folder = tmp_path / "made" / "run"
    with pytest.MonkeyPatch.context() as patch:
        fill_at(number, name, patch.setattr)
        with pytest.raises(OSError) as caught:
            run(folder, **OPTIONS, **options)
    assert f"/{name} cannot be written: {FULL} (" in sentence(caught.value)
    if number == 1 and name in ("config.json", "environment.json", "metrics.jsonl"):
        assert not (tmp_path / "made").exists()
    summary = run(folder, **OPTIONS, **options)
    assert summary["updates"] == 12
    assert len(rows_of(folder)) == 6 + 3
    if options is not ADAPTIVE:
        assert summary["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_costs_no_other(tmp_path, capfd):
    """Found out by threads of Orbax, some of which say so for pages."""
    options = {**OPTIONS, "task": Regression(width=100_000), "echo__factor": 2.0}
    whole = run(tmp_path / "whole", **options)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = tmp_path / "run" / "checkpoints"

    def leave_little_room(number):
        if number == 8:
            while not (checkpoints / "4").is_dir():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    capfd.readouterr()
    with quiet_libraries():
        try:
            run(tmp_path / "run", **options, on_batch=leave_little_room)
        except Exception as error:
            said = sentence(error)
            forget(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"run/checkpoints/8: {os.strerror(errno.EFBIG)}" in said
    assert "Traceback" not in capfd.readouterr().err
    names = {path.name for path in checkpoints.iterdir()}
    assert "4" in names and "8" not in names
    assert run(tmp_path / "run", **options)["params_sha256"] == whole["params_sha256"]
