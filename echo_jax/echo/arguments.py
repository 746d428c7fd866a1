"""Checks the arguments of public functions."""

import operator
from typing import Any

__all__ = ["integer"]


def integer(name: str, value: Any, at_least: int) -> int:
    """Returns an integer of any kind as an int.

    Args:
      name: The argument's name, for the errors.
      value: An int, an integer of NumPy or jax, or anything with ``__index__``.
      at_least: The smallest value that is allowed.

    Raises:
      TypeError: The value is not an integer.
      ValueError: The value is smaller than ``at_least``.

    Example:
      >>> integer("buffer", 4, at_least=1)
      4
    """
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
    """The integer that was probably meant."""
    try:
        return max(round(float(value)), at_least)
    except (TypeError, ValueError, OverflowError):
        return at_least
