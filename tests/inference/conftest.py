"""Small runs, trained once for the tests of all that is done with a trained one."""

import pytest
from trained_runs import lm_config, shapes_config, write_text

from echo_jax.runs import run_train


@pytest.fixture(scope="session")
def lm_run(tmp_path_factory):
    """A run of text, whose text is gone, and its summary."""
    folder = tmp_path_factory.mktemp("lm")
    text = write_text(folder)
    summary = run_train(lm_config(text), folder / "run")
    text.rename(folder / "gone.txt")
    return folder / "run", summary


@pytest.fixture(scope="session")
def shapes_run(tmp_path_factory):
    """A run of images, and its summary."""
    folder = tmp_path_factory.mktemp("shapes") / "run"
    return folder, run_train(shapes_config(), folder)
