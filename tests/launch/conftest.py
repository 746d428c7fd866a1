"""The clouds that launch_tpu.sh is tested on."""

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_cloud import Cloud


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_as_in_a_terminal() -> None:
    """What a shell starts in the background, and all that starts there, ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def templates(tmp_path_factory) -> tuple[Path, Path]:
    """A folder with an empty cloud, and one with a TPU VM of two workers, set up."""
    empty, ready = (tmp_path_factory.mktemp(name) for name in ("empty", "ready"))
    for folder in (empty, ready):
        Cloud(folder).build()
    for argv in (["create", "--type=v5litepod-16"], ["setup"]):
        done = Cloud(ready).launch(*argv)
        assert done.returncode == 0, done.stderr
    Cloud(ready).calls()
    return empty, ready


@pytest.fixture
def cloud(templates, tmp_path) -> Iterator[Cloud]:
    shutil.copytree(templates[0], tmp_path, dirs_exist_ok=True)
    yield Cloud(tmp_path)
    Cloud(tmp_path).end_all()


@pytest.fixture
def ready(templates, tmp_path) -> Iterator[Cloud]:
    shutil.copytree(templates[1], tmp_path, dirs_exist_ok=True)
    yield Cloud(tmp_path)
    Cloud(tmp_path).end_all()
