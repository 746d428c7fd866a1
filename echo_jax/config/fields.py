"""Lists the fields of a config with their descriptions."""

from collections.abc import Iterator, Mapping
from typing import Any

from echo_jax.config import Config
from echo_jax.config.group import described
from echo_jax.config.run import RunSpec
from echo_jax.config.study import StudySpec
from echo_jax.config.workloads import FIELDS


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
    for name, value in _leaves(config):
        group, _, rest = name.partition(".")
        own = rest.partition(".")[2] if group == "arms" else rest
        is_run = not of_study or group in ("base", "arms")
        said = about.get(own if of_study else name, "") if is_run else ""
        yield f"--config.{name}={value}", said or of_study.get(name, "")


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if hasattr(value, "keys"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
