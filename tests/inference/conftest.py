"""Small runs, trained once for the tests of all that is done with a trained one."""

import os
import shutil

import pytest
from filelock import FileLock
from trained_runs import lm_config, shapes_config, write_text

from echo_jax.files import read_json
from echo_jax.runs import run_train


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    """Returns a run, which the first process that asks for it trains for all."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def find(name, config_in):
        with FileLock(shared / f"{name}.lock"):
            if not (shared / name).exists():
                begun = tmp_path_factory.mktemp(name)
                run_train(config_in(begun), begun / "run")
                begun.rename(shared / name)
        own = tmp_path_factory.mktemp(name) / "run"
        shutil.copytree(shared / name / "run", own)
        return own, read_json(own / "summary.json")

    return find


@pytest.fixture(scope="session")
def lm_run(trained_once):
    """A run of text, whose text is gone, and its summary."""
    return trained_once("lm", lambda folder: lm_config(write_text(folder)))


@pytest.fixture(scope="session")
def shapes_run(trained_once):
    """A run of images, and its summary."""
    fields = {"batch.norm": "recompute", "batch.norm_batches": 2}
    return trained_once("shapes", lambda folder: shapes_config(**fields))
