"""Configs as a command line gives them: a file, and flags for its fields."""

import difflib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from echo_jax.config import Config, load_config

__all__ = ["load_with_flags"]


def load_with_flags(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config file and applies ``--config.FIELD=VALUE`` flags to it.

    Args:
      path: ``FILE.py`` or ``FILE.py:VARIANT``; see `echo_jax.config.load_config`.
      flags_given: The words of a command line that belong to the config.

    Raises:
      AttributeError: The file is no config.
      OSError: The file cannot be read.
      ValueError: A flag is no field of the config, or its value does not fit.

    Example:
      >>> config = load_with_flags("configs/lm.py:tiny", ["--config.updates=10"])
      >>> config.updates
      10
    """
    config = load_config(path)
    for flag in flags_given:
        if re.match("-+[A-Za-z]", flag):  # Not the value -1 of a flag before it.
            _check_flag(flag, config)
    values = flags.FlagValues()
    command_line = ["echo-jax", *flags_given]
    try:
        # Defines a flag for each override, and changes the config as it parses.
        config_flags.DEFINE_config_dict(
            "config", config, flag_values=values, sys_argv=command_line
        )
        leftover = values(command_line)[1:]
    except flags.Error as error:
        raise ValueError(str(error)) from error
    if leftover:
        raise ValueError(f"{leftover[0]!r} belongs to no option; remove it")
    return config


def _check_flag(flag: str, config: Config) -> None:
    """Refuses an option that is no field of the config, naming what is close."""
    name = flag.split("=", 1)[0]
    if not name.startswith(("--config.", "--noconfig.")):
        raise ValueError(
            f"unknown option {name!r}{_did_you_mean(name, ['--config', '--workdir'])}",
        )
    node: Any = config
    seen = "config"
    for part in name.split(".")[1:]:
        fields = list(node) if isinstance(node, ConfigDict) else []
        if part not in fields:
            raise ValueError(
                f"{name}: {seen} has no field {part!r}{_did_you_mean(part, fields)}"
                f"; it has {', '.join(fields) or 'no fields: it is a value'}",
            )
        node, seen = node[part], f"{seen}.{part}"
    if isinstance(node, ConfigDict):
        raise ValueError(f"{name} is a group; set one of its fields: {', '.join(node)}")


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""
