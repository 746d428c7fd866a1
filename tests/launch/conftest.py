"""The clouds that launch_tpu.sh is tested on."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch_cloud import Cloud


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


def _copy(template: Path, folder: Path) -> Iterator[Cloud]:
    shutil.copytree(template, folder, dirs_exist_ok=True)
    yield Cloud(folder)
    Cloud(folder).end_all()


@pytest.fixture
def cloud(templates, tmp_path) -> Iterator[Cloud]:
    yield from _copy(templates[0], tmp_path)


@pytest.fixture
def ready(templates, tmp_path) -> Iterator[Cloud]:
    yield from _copy(templates[1], tmp_path)
