"""The fields of every training config, and the loading of configs.

The names are a contract: run folders, sweeps and notebooks rely on them. A
config file starts from `default_config`, sets the fields of its experiment,
and adds ``model``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from ml_collections import ConfigDict

from echo_jax.config.applies import leave_out
from echo_jax.config.files import failures_of, find_config, import_config
from echo_jax.config.group import defaults_of
from echo_jax.config.run import RunSpec
from echo_jax.config.workloads import FIELDS

Config: TypeAlias = Any
"""A `ConfigDict`. Its fields have types when it runs, but none that a type checker
knows, which would take ``config.echo.factor`` for an error."""


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
    _check_call(file, module.get_config, variants)
    with failures_of(path):
        config = module.get_config(*variants)
    if not isinstance(config, ConfigDict):
        raise ValueError(
            f"get_config() of {file} returned {config!r:.60}; it has to return an "
            "ml_collections.ConfigDict, such as default_config() changed"
        )
    before = copy.deepcopy(config)
    override(config, overrides or {})
    leave_out(config, default_config(), [*_names(overrides or {})], before)
    return config.lock()


def _names(overrides: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the dotted names of the fields that are set."""
    for name, value in overrides.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _check_call(
    file: str, get_config: Callable[..., Any], variants: tuple[str, ...]
) -> None:
    """Refuses an unknown variant argument, and a missing one."""
    try:
        inspect.signature(get_config).bind(*variants)
    except TypeError as error:
        raise ValueError(
            f"config {file!r} has no variants; leave :{variants[0]} out"
            if variants
            else f"config {file!r} needs a variant: give {file}:VARIANT, or let "
            "get_config() be called without one"
        ) from error


def override(config: Config, overrides: Mapping[str, Any], prefix: str = "") -> None:
    """Sets fields of a config.

    Args:
      config: The config; it is changed.
      overrides: See `load_config`.
      prefix: Precedes the names of fields in errors.

    Raises:
      AttributeError: The field does not exist.
      TypeError: The value has another type than the field.
    """
    for name, value in overrides.items():
        field, _, rest = name.partition(".")
        if field not in config:
            raise AttributeError(
                f"config has no field {prefix + field!r}; "
                f"it has {', '.join(prefix + known for known in sorted(config))}"
            )
        if rest:
            value = {rest: value}
        if isinstance(value, Mapping) and isinstance(config[field], ConfigDict):
            override(config[field], value, f"{prefix}{field}.")
            continue
        try:
            config[field] = value
        except TypeError as error:
            kind = config.get_type(field)
            if kind not in (bool, float, int, str, tuple):
                raise  # One of our fields, whose error names the valid values.
            raise TypeError(
                f"config.{prefix}{field}={value!r} is no {kind.__name__}, and the "
                f"field holds one: {config[field]!r}"
            ) from error
