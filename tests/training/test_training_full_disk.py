"""A full disk, at every kind of file: one sentence, and a resume that ends alike.

What Orbax runs into is real: a limit to the size of files stands in for the disk.
"""

import errno
import os
import resource

import pytest
from tiny_workload import Regression, run

from benchmarks.faults.disks import fill_at
from echo_jax.terminal.failures import forget, quiet_libraries, sentence
from echo_jax.training.saving.checkpoint import Checkpoints

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
    said = sentence(caught.value)
    assert f"/{name} cannot be written: {FULL} (" in said
    if number == 1 and name in ("config.json", "environment.json", "metrics.jsonl"):
        assert not (tmp_path / "made").exists()
    summary = run(folder, **OPTIONS, **options)
    assert summary["updates"] == 12
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 6 + 3
    if options is not ADAPTIVE:
        assert summary["params_sha256"] == whole["params_sha256"]


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_costs_no_other(tmp_path, monkeypatch, capfd):
    """Found out by threads of Orbax, some of which say so for pages."""
    options = {**OPTIONS, "task": Regression(width=100_000)}
    whole = run(tmp_path / "whole", **options)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    save = Checkpoints.save

    def save_in_little_room(checkpoints, update, *args):
        save(checkpoints, update, *args)
        if update == 4:
            checkpoints._manager.wait_until_finished()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))

    capfd.readouterr()
    with quiet_libraries():
        try:
            with monkeypatch.context() as patch:
                patch.setattr(Checkpoints, "save", save_in_little_room)
                run(tmp_path / "run", **options)
        except Exception as error:
            said = sentence(error)
            forget(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"run/checkpoints/8: {os.strerror(errno.EFBIG)}" in said
    assert "Traceback" not in capfd.readouterr().err
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert "4" in names and "8" not in names
    assert run(tmp_path / "run", **options)["params_sha256"] == whole["params_sha256"]
