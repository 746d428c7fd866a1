"""Loads configs from a command line: a file, and flags for its fields."""

import contextlib
import copy
import difflib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from echo_jax.config import Config, default_config, load_config
from echo_jax.config.applies import leave_out


def load_with_flags(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config and applies ``--config.FIELD=VALUE`` flags, as `load_config`."""
    config = load_config(path)
    for flag in flags_given:
        if re.match("-+[A-Za-z]", flag):  # Not the value -1 of the flag before.
            _check_flag(flag, config)
    values, before = flags.FlagValues(), copy.deepcopy(config)
    command_line = ["echo-jax", *flags_given]
    try:
        # This defines a flag for each override and changes the config as it parses.
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=command_line
        )
        leftover = values(command_line)[1:]
    except flags.IllegalFlagValueError as error:
        raise ValueError(_of_value(str(error), config)) from error
    except flags.Error as error:
        # The last flag has no value.
        raise ValueError(_of_value(f"{error}: it needs a value", config)) from error
    if leftover:
        raise ValueError(f"{leftover[0]!r} belongs to no option; remove it")
    typed = re.findall(r"(?m)^-+(?:no)?config\.([\w.]+)", "\n".join(flags_given))
    leave_out(config, default_config(), typed, before)
    return config


def _whole_number(text: Any) -> int:
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


class _WholeNumber(flags.IntegerParser):
    """Also reads 1e3, unlike Python's `int`."""

    def convert(self, argument: Any) -> int:
        return _whole_number(argument)


config_flags.register_flag_parser_for_type(int, _WholeNumber())

_TAKES = {
    int: "a whole number, such as 10 or 1e3",
    float: "a number, such as 0.1 or 1e-3",
    bool: "true or false",
    tuple: "values in parentheses, such as (5, 9) or (5,)",
}


def _of_value(said: str, config: Config) -> str:
    """Returns the error of a wrong value with the values that its field accepts."""
    found = re.search(r"(?s)--config\.([\w.]+)(=.*?)?: (.*)", said)
    if found is None:
        return said
    field, value, reason = found.groups(default="")
    *groups, last = field.split(".")
    for group in groups:
        config = config[group]
    takes = _TAKES.get(config.get_type(last))
    if takes and value:
        reason = f"it takes {takes}"
    return f"--config.{field}{value}: {reason}; it is {config[last]!r} without the flag"


def _check_flag(flag: str, config: Config) -> None:
    """Refuses an option that is not a field of the config, and suggests one."""
    name = flag.split("=", 1)[0]
    if not name.startswith(("--config.", "--noconfig.")):
        raise ValueError(
            f"unknown option {name!r}{_did_you_mean(name, ['--config', '--workdir'])}"
        )
    node: Any = config
    seen, kind = "config", ConfigDict
    path = name.split(".")[1:]
    for part in path:
        fields = list(node) if isinstance(node, ConfigDict) else []
        if part not in fields:
            raise ValueError(
                f"{name}: {seen} has no field {part!r}{_did_you_mean(part, fields)}"
                f"; it has {', '.join(fields) or 'no fields: it is a value'}"
                f"{_of_all_arms(path, config)}"
            )
        kind = node.get_type(part)
        node, seen = node[part], f"{seen}.{part}"
    if isinstance(node, ConfigDict):
        raise ValueError(f"{name} is a group; set one of its fields: {', '.join(node)}")
    if name.startswith("--no") and kind is not bool:
        raise ValueError(
            f"{name} is for a field that is true or false; set --{name[4:]}=VALUE"
        )


def _of_all_arms(path: Sequence[str], config: Config) -> str:
    """Returns a hint to the base if a study's field was looked for in an arm."""
    path = path[2:] if path[0] == "arms" else path
    node: Any = config.get("base")
    for part in path:
        if not isinstance(node, ConfigDict) or part not in node:
            return ""
        node = node[part]
    return f"; of all arms it is --config.base.{'.'.join(path)}" if path else ""


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
