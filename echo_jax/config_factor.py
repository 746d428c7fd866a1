"""The config field ``echo.factor``: a number, or the word ``"auto"``.

A field of a `ConfigDict` has the type of its default, and an untyped one would take
anything. This one has a type of its own, on the command line too.
"""

from typing import Any

from absl import flags
from ml_collections import FieldReference, config_flags

__all__ = ["EchoFactor", "factor_field"]


class EchoFactor:
    """The type of the field: a float, or ``"auto"``. It has no instances."""


def factor_field(default: float | str) -> FieldReference:
    """Returns a field for a config.

    Args:
      default: Its first value.

    Returns:
      The field, to be assigned to a name in a `ConfigDict`. What it is set to later
      is checked, and integers become floats.

    Example:
      >>> config = ConfigDict({"factor": factor_field(1.0)})
      >>> config.factor = 3
      >>> config.factor
      3.0
      >>> config.factor = "many"
      Traceback (most recent call last):
      TypeError: Could not override field 'factor' (reference). an echo factor ...
    """
    return _FactorField(default, field_type=EchoFactor)


class _FactorField(FieldReference):
    def set(self, value: Any, type_safe: bool = True) -> None:
        """Sets the value, which `FieldReference` calls for the default too."""
        super().set(_as_factor(value), type_safe=False)


class _FactorParser(flags.ArgumentParser):
    """Reads the field from the command line."""

    syntactic_help = "a number, or 'auto'"

    def parse(self, argument: Any) -> float | str:
        try:
            return _as_factor(argument if argument == "auto" else float(argument))
        except (TypeError, ValueError) as error:
            raise ValueError("an echo factor is a number, or 'auto'") from error

    def flag_type(self) -> str:
        return "echo factor"


config_flags.register_flag_parser_for_type(EchoFactor, _FactorParser())


def _as_factor(value: Any) -> float | str:
    if value == "auto":
        return "auto"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(
            f"an echo factor is a number, or 'auto', not {value!r}; "
            "set --config.echo.factor=1.0"
        )
    return float(value)
