"""Cases of tests, of which the default suite tries a few and the slow one the rest."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but_for(soon: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Returns cases for `pytest.mark.parametrize`, of which all others are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in soon else pytest.mark.slow,
        )
        for case in cases
    ]
