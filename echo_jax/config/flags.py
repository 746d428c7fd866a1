"""The fields of a config as flags: their values, and their descriptions."""

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags

from echo_jax.config.defaults import (
    Config,
    check_field,
    did_you_mean,
    load_config,
    with_fields,
    wrong_value,
)
from echo_jax.config.group import described, field_of
from echo_jax.config.run import RunSpec
from echo_jax.config.study import StudySpec
from echo_jax.config.workloads import FIELDS
from echo_jax.studies.fields import flat_fields


def load_with_flags(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config and applies ``--config.FIELD=VALUE`` flags, as `load_config`."""
    config = load_config(path)
    return with_fields(config, _values(config, flags_given))


class _WholeNumber(flags.IntegerParser):
    """Also reads 1e3, unlike Python's `int`."""

    def convert(self, argument: Any) -> int:
        try:
            return super().convert(argument)
        except ValueError:
            value = float(argument)
            # A float cannot represent larger integers exactly.
            if not (value.is_integer() and abs(value) <= 2**53):
                raise
            return int(value)


config_flags.register_flag_parser_for_type(int, _WholeNumber())


def _values(config: Config, flags_given: Sequence[str]) -> dict[str, Any]:
    """Returns the values of flags by the dotted names of their fields."""
    for flag in flags_given:
        if re.match("-+[A-Za-z]", flag):  # Not the value -1 of the flag before.
            _check_flag(flag.partition("=")[0], config)
    values, command_line = flags.FlagValues(), ["echo-jax", *flags_given]
    try:
        # This defines a flag for each field that is set, and changes the copy.
        config_flags.DEFINE_config_dict(
            "config", copy.deepcopy(config), flag_values=values, sys_argv=command_line
        )
        leftover = values(command_line)[1:]
    except flags.Error as error:
        said = str(error)
        found = re.search(r"(?s)--config\.([\w.]+)(?:=(.*?): |$)", said)
        if found is None:
            raise ValueError(said) from error
        said = wrong_value(config, found[1], found[2] or "")
        raise ValueError(f"--{said}") from error
    if leftover:
        raise ValueError(f"{leftover[0]!r} belongs to no option; remove it")
    return values["config"].override_values  # pyright: ignore[reportAttributeAccessIssue]


def _check_flag(flag: str, config: Config) -> None:
    """Refuses an option that is not a field of the config, and suggests one."""
    found = re.fullmatch(r"--(no)?config\.([\w.]+)", flag)
    if found is None:
        meant = did_you_mean(flag, ["--config", "--workdir"])
        raise ValueError(f"unknown option {flag!r}{meant}")
    is_negated, field = found.groups()
    check_field(config, field)
    if is_negated and not isinstance(field_of(config, field), bool):
        raise ValueError(
            f"{flag} is for a field that is true or false; set --config.{field}=VALUE"
        )


def field_lines(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the flag and the description of every field of a training or a study."""
    base = config.base if "base" in config else config
    about = dict(described(RunSpec))
    # A workload of somebody else has no texts for its fields.
    for kind, group in zip(
        FIELDS.get(base.workload, ()), ("model.", "data."), strict=False
    ):
        about |= dict(described(kind, group))
    of_study = dict(described(StudySpec)) if "base" in config else {}
    for name, value in flat_fields(config.to_dict()).items():
        group, _, rest = name.partition(".")
        own = rest.partition(".")[2] if group == "arms" else rest
        is_run = not of_study or group in ("base", "arms")
        said = about.get(own if of_study else name, "") if is_run else ""
        yield f"--config.{name}={value}", said or of_study.get(name, "")
