"""Small runs, trained once for the tests of all that is done with a trained one."""

import os
import shutil

import pytest
from filelock import FileLock
from trained_runs import lm_config, shapes_config, write_text

from echo_jax.files.json_files import read_json
from echo_jax.runs import run_train


@pytest.fixture(scope="session")
def trained_once(tmp_path_factory):
    """Returns a run, which the first process that asks for it trains for all.

    To compile one takes longer than most of what is done with it.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent

    def find(name, train):
        with FileLock(shared / f"{name}.lock"):
            if not (shared / name).exists():
                begun = tmp_path_factory.mktemp(name)
                train(begun)
                begun.rename(shared / name)
        own = tmp_path_factory.mktemp(name) / "run"
        shutil.copytree(shared / name / "run", own)
        return own, read_json(own / "summary.json")

    return find


@pytest.fixture(scope="session")
def lm_run(trained_once):
    """A run of text, whose text is gone, and its summary."""

    def train(folder):
        text = write_text(folder)
        run_train(lm_config(text), folder / "run")

    return trained_once("lm", train)


@pytest.fixture(scope="session")
def shapes_run(trained_once):
    """A run of images, and its summary."""
    return trained_once(
        "shapes", lambda folder: run_train(shapes_config(), folder / "run")
    )
