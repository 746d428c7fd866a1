"""Checks the arguments of public functions."""

import operator
from typing import Any


def integer(name: str, value: Any, at_least: int) -> int:
    """Returns an integer of any kind as an int; raises if it is below ``at_least``."""
    try:
        if isinstance(value, bool):
            raise TypeError
        whole = operator.index(value)
    except TypeError:
        try:
            nearest = max(round(float(value)), at_least)
        except (TypeError, ValueError, OverflowError):
            nearest = at_least
        fix = f"{name}={nearest}" if name.isidentifier() else nearest
        raise TypeError(
            f"{name} must be an integer, got {value!r}. Use {fix}."
        ) from None
    if whole < at_least:
        fix = f"{name}={at_least}" if name.isidentifier() else at_least
        raise ValueError(f"{name} must be at least {at_least}, got {whole}. Use {fix}.")
    return whole
