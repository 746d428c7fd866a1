"""A full disk, at every kind of file: one sentence, and a resume that ends alike."""

import errno
import os

import pytest
from tiny_workload import ADAPTIVE, rows_of, run

from benchmarks.faults.disks import fill_at
from echo_jax.terminal import sentence

FULL = os.strerror(errno.ENOSPC)
OPTIONS = {"updates": 12, "checkpoint_every": 4, "log_every": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), **OPTIONS)


@pytest.mark.parametrize(
    ("name", "number", "options"),
    [
        ("config.json", 1, {}),
        ("environment.json", 1, {}),
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
