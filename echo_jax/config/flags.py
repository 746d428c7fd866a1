"""The fields of a config as flags: their values, and their descriptions."""

import ast
import contextlib
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from echo_jax.config.defaults import (
    Config,
    check_field,
    did_you_mean,
    load_config,
    with_fields,
)
from echo_jax.config.group import described
from echo_jax.config.run import RunSpec
from echo_jax.config.study import StudySpec
from echo_jax.config.workloads import FIELDS
from echo_jax.studies.fields import flat_fields


def load_with_flags(path: str, flags_given: Sequence[str]) -> Config:
    """Loads a config and applies ``--config.FIELD=VALUE`` flags, as `load_config`.

    A value may follow its flag as the next word. ``--config.FIELD`` alone sets a field
    that is true or false, and ``--noconfig.FIELD`` clears it.
    """
    config = load_config(path)
    return with_fields(config, dict(_values(config, [*flags_given])))


def _values(config: Config, waiting: list[str]) -> Iterator[tuple[str, Any]]:
    """Yields the dotted name of each flag's field, and its value."""
    while waiting:
        flag, equals, text = waiting.pop(0).partition("=")
        found = re.fullmatch(r"--(no)?config\.([\w.]+)", flag)
        if found is None:
            meant = did_you_mean(flag, ["--config", "--workdir"])
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


def field_lines(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the flag and the description of every field of a training or a study."""
    is_study = "base" in config
    workload = config.base.workload if is_study else config.workload
    of_run, of_study = dict(described(RunSpec)), dict(described(StudySpec))
    # A workload of somebody else has no texts for its fields.
    if workload in FIELDS:
        model, data = FIELDS[workload]
        of_run |= {**dict(described(model, "model.")), **dict(described(data, "data."))}
    for name, value in flat_fields(config.to_dict()).items():
        own = re.sub(r"^(base|arms\.[^.]+)\.", "", name)
        about = of_study if is_study and own == name else of_run
        yield f"--config.{name}={value}", about.get(own, "")
