"""Checks the arguments of public functions."""

import operator
from typing import Any

__all__ = ["integer"]


def integer(name: str, value: Any, at_least: int) -> int:
    """Returns an integer of any kind as an int; raises if it is below ``at_least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        fix = _fix(name, _nearest(value, at_least))
        raise TypeError(f"{name} must be an integer, got {value!r}. {fix}") from None
    if whole < at_least:
        fix = _fix(name, at_least)
        raise ValueError(f"{name} must be at least {at_least}, got {whole}. {fix}")
    return whole


def _fix(name: str, value: int) -> str:
    return f"Use {name}={value}." if name.isidentifier() else f"Use {value}."


def _nearest(value: Any, at_least: int) -> int:
    """Returns the integer that was probably meant."""
    try:
        return max(round(float(value)), at_least)
    except (TypeError, ValueError, OverflowError):
        return at_least
