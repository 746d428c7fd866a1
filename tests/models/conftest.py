"""Networks are compared with their equations, up to rounding."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _compiled_soon(all_compiled_soon: None) -> None:
    """Half of the time of these tests was the compiler's."""
