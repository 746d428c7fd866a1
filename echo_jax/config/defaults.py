"""The fields of every training config, and the loading of configs.

The names are a contract: run folders, sweeps and notebooks rely on them. A
config file starts from `default_config`, sets the fields of its experiment,
and adds ``model``.
"""

import ast
import contextlib
import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from echo_jax.config.applies import leave_out
from echo_jax.config.files import failures_of, find_config, import_config
from echo_jax.config.group import defaults_of
from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import FIELDS
from echo_jax.studies.fields import flat_fields

Config: TypeAlias = Any
"""A `ConfigDict`. Its fields have types when it runs, but none that a type checker
knows, which would take ``config.echo.factor`` for an error."""

_TAKES = {
    int: "a whole number, such as 10 or 1e3",
    float: "a number, such as 0.1 or 1e-3",
    bool: "true or false",
    str: "a text",
    tuple: "values in parentheses, such as (5, 9) or (5,)",
}


def default_config(workload: str = "") -> Config:
    """Returns the shared fields with their defaults, locked.

    Args:
      workload: ``"lm"``, ``"imagenet"`` or another one, whose fields are there, too;
        ``""`` leaves them out.

    Fields keep their types: ``2.5`` is refused for an integer field, and ``3`` becomes
    ``3.0`` in a float field. Sizes are per update over all devices, times are seconds,
    and every schedule is indexed by updates.
    """
    fields = defaults_of(RunSpec)
    if workload:
        if workload not in FIELDS:
            raise ValueError(
                f"workload={workload!r} is unknown; use one of {', '.join(FIELDS)}"
            )
        model, data = map(defaults_of, FIELDS[workload])
        fields |= {"workload": workload, "model": model, "data": data}
    return ConfigDict(fields).lock()


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Loads a config file, as ``--config`` does on the command line.

    Args:
      name: ``"PATH.py"`` or ``"PATH.py:VARIANT"``, or the name of a packaged config,
        such as ``"lm"`` or ``"sweeps/s1_placement:tiny"``. The file defines
        ``get_config(variant)``; without a variant it is called without arguments.
      overrides: Changed fields: nested (``{"echo": {"factor": 2.0}}``), by dotted
        names (``{"echo.factor": 2.0}``), or both. Fields of the file that have no
        effect with them are reset, which is printed on standard error. An example is
        ``optim.clip_norm`` with ``{"optim.name": "lars"}``.

    Returns:
      The config, locked: of a training or of a study. `check_config` checks the former.

    Raises:
      FileNotFoundError: The file does not exist.
      OSError: The file cannot be read.
      AttributeError: The file defines no ``get_config``, or an override names a
        field that the config does not have.
      TypeError: An override has another type than the field.
      ValueError: The file fails, or does not return a config.

    Example:
      >>> config = load_config("configs/lm.py:tiny", {"echo.factor": 2.0})
      >>> config.echo.factor
      2.0
    """
    file, _, variant = name.partition(":")
    path = find_config(file)
    module = import_config(path)
    variants = (variant,) if variant else ()
    try:
        inspect.signature(module.get_config).bind(*variants)
    except TypeError as error:
        rule = f"needs a variant: give {file}:VARIANT"
        if variant:
            rule = f"has no variants; leave :{variant} out"
        raise ValueError(f"config {file!r} {rule}") from error
    with failures_of(path):
        config = module.get_config(*variants)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config() of {file} returned {config!r:.60}; let it return a changed "
            "echo_jax.config.default_config()"
        )
    return _with_fields(config, overrides or {})


def load_with_flags(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config and applies ``--config.FIELD=VALUE`` flags, as `load_config`.

    A value may follow its flag as the next word. ``--config.FIELD`` alone sets a field
    that is true or false, and ``--noconfig.FIELD`` clears it.
    """
    config = load_config(path)
    return _with_fields(config, dict(_values(config, [*flags_given])))


def _with_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns a loaded config with other fields, locked."""
    override(config, fields)
    leave_out(config, flat_fields(defaults_of(RunSpec)), flat_fields(fields))
    return config.lock()


def _values(config: Config, waiting: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name of each flag's field, and its value."""
    while waiting:
        flag, equals, text = waiting.pop(0).partition("=")
        found = re.fullmatch(r"--(no)?config\.([\w.]+)", flag)
        if found is None:
            meant = _did_you_mean(flag, ["--config", "--workdir"])
            raise ValueError(f"unknown option {flag!r}{meant}")
        is_negated, name = found.groups()
        check_field(config, name)
        usual = attrgetter(name)(config)
        is_switch = isinstance(usual, bool) and not equals
        if is_negated and not is_switch:
            raise ValueError(
                f"{flag} is for a field that is true or false; set "
                f"--config.{name}=VALUE"
            )
        if not equals:
            text = waiting.pop(0) if waiting and not is_switch else ""
        yield name, not is_negated if is_switch else _parsed(text, usual)


# A text that is not of the field's type stays as it is, and `override` refuses it.
def _parsed(text: str, usual: Any) -> Any:
    """Returns the value that a text means for a field of the type of `usual`."""
    if isinstance(usual, str):
        return text
    with contextlib.suppress(SyntaxError, ValueError):
        if isinstance(usual, float):
            return float(text)
        value = ast.literal_eval(text.capitalize() if isinstance(usual, bool) else text)
        is_whole = isinstance(value, float) and value.is_integer()
        return int(value) if is_whole and isinstance(usual, int) else value
    return text


def override(config: Config, overrides: Mapping[str, Any]) -> None:
    """Sets fields of a config.

    Args:
      config: The config; it is changed.
      overrides: See `load_config`.

    Raises:
      UnknownFieldError: The field does not exist.
      TypeError: The value has another type than the field.
    """
    for name, value in flat_fields(overrides).items():
        check_field(config, name)
        try:
            config.update_from_flattened_dict({name: value})
        except TypeError as error:
            usual = attrgetter(name)(config)
            takes = _TAKES.get(type(usual), type(usual).__name__)
            raise TypeError(
                f"config.{name}={value!r} must be {takes}; it is {usual!r} without it"
            ) from error


class UnknownFieldError(AttributeError, ValueError):
    """A field that a config does not have."""


def check_field(config: Config, name: str) -> None:
    """Refuses the dotted name of a field that a config does not have."""
    fields = flat_fields(config.to_dict())
    if name in fields:
        return
    group = f"{name}."
    if inside := [each for each in fields if each.startswith(group)]:
        raise UnknownFieldError(
            f"config.{name} is a group; set one of its fields: {', '.join(inside)}"
        )
    of_all = re.sub(r"^(arms\.[^.]+\.)?", "base.", name)
    hint = f"; of all variants it is --config.{of_all}" * (of_all in fields)
    raise UnknownFieldError(
        f"config has no field {name!r}{_did_you_mean(name, fields)}{hint}; "
        "'echo-jax configs show CONFIG' lists its fields"
    )


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a hint to the known word that is most like another one, or ""."""
    close = difflib.get_close_matches(word, [*known], n=1, cutoff=0.8)
    return f", did you mean {close[0]!r}?" if close else ""
