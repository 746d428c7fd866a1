"""A bucket of a stand-in for Google Cloud Storage, for the tests of several files."""

import pytest
from fake_gcs import Bucket, serve


@pytest.fixture(scope="session")
def served():
    # One address for the whole process: TensorStore asks for it once.
    bucket = Bucket("bucket")
    with serve(bucket) as address:
        yield bucket, address


@pytest.fixture
def bucket(served):
    bucket, address = served
    bucket.empty()
    # Of its own: a test may undo what it has patched itself.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", address)
        yield bucket


@pytest.fixture(autouse=True)
def _nobody_wonders(monkeypatch):
    """On a busy machine anything may take long, and tests compare what is printed."""
    monkeypatch.setattr("echo_jax.terminal.notes._PAUSES_S", (1000.0,))
