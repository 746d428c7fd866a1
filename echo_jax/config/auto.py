"""Config fields that hold a number, or the word ``"auto"`` for a measured value.

A field of a `ConfigDict` has the type of its default, and an untyped field accepts
anything. Therefore these fields have their own types, also on the command line.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import FieldReference, config_flags

__all__ = ["FloatOrAuto", "IntOrAuto", "auto_field", "whole_number"]

_AUTO = "auto"


class FloatOrAuto:
    """The type of a field: a float, or ``"auto"``. It has no instances."""


class IntOrAuto:
    """The type of a field: an integer, or ``"auto"``. It has no instances."""


def auto_field(default: float | str) -> FieldReference:
    """Returns a field of integers if the default is one, else of floats."""
    of_integers = isinstance(default, int)
    return _AutoField(default, field_type=IntOrAuto if of_integers else FloatOrAuto)


def whole_number(text: Any) -> int:
    """Reads an integer, also ``"1_000"``, ``"1e3"`` or ``"0x10"``."""
    if not isinstance(text, str):
        return int(text)
    with contextlib.suppress(ValueError):
        return int(text, 0)
    value = float(text)
    # A float cannot represent larger integers exactly.
    if not (value.is_integer() and abs(value) <= 2**53):
        raise ValueError(f"{text!r} is no whole number")
    return int(value)


class _AutoField(FieldReference):
    def set(self, value: Any, type_safe: bool = True) -> None:
        """Checks and sets the value; `FieldReference` also calls it for the default."""
        super().set(_checked(value, self.get_type()), type_safe=False)


class _AutoParser(flags.ArgumentParser):
    """Reads such a field from the command line."""

    def __init__(self, field_type: type, number: Callable[[Any], float], kind: str):
        super().__init__()
        self._type, self._number, self._kind = field_type, number, kind
        self.syntactic_help = f"{kind}, or 'auto'"

    def parse(self, argument: Any) -> float | str:
        try:
            value = argument if argument == _AUTO else self._number(argument)
            return _checked(value, self._type)
        except (TypeError, ValueError) as error:
            raise ValueError(f"it takes {self.syntactic_help}") from error

    def flag_type(self) -> str:
        return f"{self._kind} or auto"


_NUMBER = _AutoParser(FloatOrAuto, float, "a number")
_INTEGER = _AutoParser(IntOrAuto, whole_number, "an integer")
config_flags.register_flag_parser_for_type(FloatOrAuto, _NUMBER)
config_flags.register_flag_parser_for_type(IntOrAuto, _INTEGER)


def _checked(value: Any, field_type: type) -> float | str:
    if value == _AUTO:
        return _AUTO
    of_integers = field_type is IntOrAuto
    allowed = int if of_integers else int | float
    if isinstance(value, bool) or not isinstance(value, allowed):
        what = "an integer, such as 1," if of_integers else "a number, such as 1.0,"
        raise TypeError(f"{value!r} is no value of this field; set {what} or 'auto'")
    return value if of_integers else float(value)
