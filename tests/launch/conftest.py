"""The cloud that launch_tpu.sh is tested on."""

from collections.abc import Iterator

import pytest
from launch_cloud import Cloud


@pytest.fixture
def cloud(tmp_path) -> Iterator[Cloud]:
    cloud = Cloud(tmp_path)
    yield cloud
    cloud.end_all()
