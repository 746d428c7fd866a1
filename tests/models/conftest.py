"""Networks are compared with their equations, up to rounding."""

import pytest


@pytest.fixture(autouse=True)
def _compiled_soon(compiled_soon: None) -> None:
    """Half of the time of these tests was the compiler's."""
